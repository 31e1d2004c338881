"""Transformer Engine's DotProductAttention in plain torch, for machines without a GPU: it takes the arguments of 2.x by
their names, and refuses what it refuses. Megatron's own wrapper runs over it, as installed."""

import contextlib
import importlib.util
import sys
from pathlib import Path
from unittest import mock

import torch
from megatron.core import utils
from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
from megatron.core.models.gpt import gpt_layer_specs
from packaging.version import Version

from megatron_ep.megatron import attention

MASKS = ("padding_causal", "padding_causal_bottom_right")


class DotProductAttention(torch.nn.Module):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.1,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
    ):
        super().__init__()
        assert cp_group is None and attention_dropout == 0, "not in this stand-in"
        widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        self.widths, self.groups = widths, (num_gqa_groups or num_attention_heads) // tp_size
        self.softmax_scale = softmax_scale or widths[0] ** -0.5
        self.qkv_format, self.attn_mask_type = qkv_format, attn_mask_type
        self.calls = []  # (mask, lengths of the queries, of the keys)

    def get_extra_state(self):
        return torch.zeros(3)  # of fp8, as there; checkpoints have it

    def set_extra_state(self, state):
        assert state.shape == (3,)

    def forward(
        self,
        query_layer,
        key_layer,
        value_layer,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        num_splits=1,
    ):
        qkv_format, attn_mask_type = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        assert qkv_format == "thd" and attn_mask_type in MASKS, (qkv_format, attn_mask_type)
        assert attention_mask is None and cu_seqlens_q_padded is None and cu_seqlens_kv_padded is None
        assert query_layer.shape[2] == key_layer.shape[2] == self.widths[0] and value_layer.shape[2] == self.widths[1]
        assert key_layer.shape[:2] == value_layer.shape[:2] and key_layer.shape[1] == self.groups
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape and cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        q_sizes, k_sizes = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
        assert (max(q_sizes), max(k_sizes)) == (max_seqlen_q, max_seqlen_kv), "cuDNN gets an error, or wrong rows"
        self.calls.append((attn_mask_type, q_sizes, k_sizes))
        rows = zip(query_layer.split(q_sizes), key_layer.split(k_sizes), value_layer.split(k_sizes), strict=True)
        return torch.cat([self._attend(*part, attn_mask_type) for part in rows])

    def _attend(self, q, k, v, mask):
        k, v = (x.repeat_interleave(q.shape[1] // self.groups, dim=1) for x in (k, v))
        offset = len(k) - len(q) if mask.endswith("bottom_right") else 0
        later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + offset)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.softmax_scale
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(dim=2), v).flatten(1)


@contextlib.contextmanager
def installed():
    """Yields Megatron's TEDotProductAttention over the stand-in. Megatron's specs have it, and
    `megatron_ep.megatron.attention` takes it for what it stands for. Other layers of Transformer Engine are mocks."""
    te = mock.MagicMock(__version__="2.2.0")
    te.pytorch.DotProductAttention = DotProductAttention
    te.pytorch.RMSNorm = type("RMSNorm", (torch.nn.Module,), {})  # from 0.20 on one base of two
    modules = {"transformer_engine": te, "transformer_engine.pytorch": te.pytorch}
    modules["transformer_engine.pytorch.fp8"] = te.pytorch.fp8
    with mock.patch.object(utils, "_te_version", Version("2.2.0")):
        with mock.patch.dict(sys.modules, modules):
            wrapper = _load(transformer_engine.__file__)
            with mock.patch.dict(sys.modules, {transformer_engine.__name__: wrapper}):
                provider = _load(transformer_engine_spec_provider.__file__)
        names = {"TESpecProvider": provider.TESpecProvider, "TEFusedMLP": wrapper.TEFusedMLP, "TENorm": wrapper.TENorm}
        with (
            mock.patch.object(attention, "te", wrapper),
            mock.patch.multiple(gpt_layer_specs, **names, HAVE_TE=True, create=True),
        ):
            yield wrapper.TEDotProductAttention


def _load(file):
    """A module from its file once more, under another name."""
    found = importlib.util.spec_from_file_location(f"{Path(file).stem}_over_stand_in", file)
    module = importlib.util.module_from_spec(found)
    with mock.patch.dict(sys.modules, {found.name: module}):  # where dataclasses look
        found.loader.exec_module(module)
    return module

"""Packed sequences (THD) of other lengths on every rank, for Megatron-LM's scripts: micro-batches of mock data that are
cut, each sample elsewhere, and fall into documents that do not see each other; and on the host an attention for them,
in plain torch, since Megatron's own local attention refuses packed sequences."""

import torch
from megatron.core import utils
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.transformer.dot_product_attention import DotProductAttention

DOCUMENTS = ((5, 4, 2), (3, 9, 4), (7,), (1, 6), (4, 4, 1, 6))  # lengths in sixteenths of a sequence, sample by sample
# From 0.19 on Megatron looks for documents only where it is told to.
FLAGS = ("--dataloader-inter-document-masking",) if hasattr(GPTDatasetConfig, "inter_document_masking") else ()


def _cut(sample, number):
    """The sample's first tokens as documents, between a seventh of them (in sample 2) and all."""
    whole = sample["tokens"].shape[0]
    lengths = torch.tensor([0, *DOCUMENTS[number % len(DOCUMENTS)]]) * whole // 16
    ends = lengths.cumsum(0)
    kept = {key: sample[key][: ends[-1]].clone() for key in ("tokens", "labels", "loss_mask")}
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    return {**kept, "position_ids": positions, "cu_seqlens": ends.int(), "max_seqlen": lengths.max().int()}


def pack_mock_data():
    """From now on mock data comes packed. A script needs `--micro-batch-size 1` and FLAGS."""
    whole_sample, batch = MockGPTDataset.__getitem__, getattr(utils, "get_thd_batch_on_this_cp_rank", None)
    MockGPTDataset.__getitem__ = lambda data, number: _cut(whole_sample(data, number), number or 0)
    if batch is not None:  # Megatron 0.16 leaves the loader's batch dimension where attention wants none
        utils.get_thd_batch_on_this_cp_rank = lambda rows, ends, *rest: batch(rows, ends.squeeze(0), *rest)


class PackedAttention(torch.nn.Module):
    def __init__(self, config, *_, softmax_scale=None, **__):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        """[t, heads, d], and [t, groups, d] twice -> [t, heads * d]"""
        ends = packed_seq_params.cu_seqlens_q
        assert ends[-1] == query.shape[0], "documents fill the micro-batch"
        tokens = torch.arange(query.shape[0])
        document = torch.bucketize(tokens, ends[1:], right=True)
        seen = (document.unsqueeze(1) == document) & (tokens.unsqueeze(1) >= tokens)
        heads_of_a_group = query.shape[1] // key.shape[1]
        query, key, value = (
            part.transpose(0, 1)
            for part in (
                query,
                key.repeat_interleave(heads_of_a_group, dim=1),
                value.repeat_interleave(heads_of_a_group, dim=1),
            )
        )
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale)
        return output.transpose(0, 1).flatten(1)


def take_documents():
    """From now on layers of the local spec are made with this attention."""
    from megatron.training import training

    # Megatron 0.19 counts their operations on a device that it names by itself.
    training.update_seqlen_stats_from_cu_seqlens = lambda _: None
    DotProductAttention.__new__ = staticmethod(
        lambda cls, config, *args, **kwargs: PackedAttention(config, *args, **kwargs)
    )

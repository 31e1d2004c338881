"""`sequence_spec` puts attention of packed sequences that is balanced over ranks into a model's spec: Transformer
Engine's attention if the spec has it, else attention in torch, `DispatchedCoreAttention`.

It replaces Megatron's core attention, between rotary embedding and output projection. Q, K and V are sent to the ranks
that compute, and the output is sent back. The ranks are those of data and context parallelism (DP x CP); each
tensor-parallel rank moves its own heads.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as te
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.buffer.buffer import Buffer
from megatron_ep.megatron.layer import replaced
from megatron_ep.megatron.shared_buffers import abort_peers_on_error, shared_buffer, use
from megatron_ep.sequences.dispatcher import SequenceDispatcher, sms_for_sequences
from megatron_ep.sequences.plan import SequencePlan, Shard
from megatron_ep.sequences.planner import RowBytes, balance

Spec = TypeVar("Spec")

_dispatchers: WeakKeyDictionary[Buffer, SequenceDispatcher] = WeakKeyDictionary()
_originals: dict[type, Callable[..., None]] = {}


class VarlenAttention(torch.nn.Module):
    """Causal attention of packed sequences (THD) in torch, one sequence at a time; Megatron's own needs Transformer
    Engine for them. A sequence may have more keys than queries: its last query attends to all of them.

    config: the model's config; attention_dropout must be 0, and context_parallel_size 1.
    attn_mask_type: a causal type; None means causal.
    softmax_scale: None for 1 / sqrt(width of Q).
    options: further arguments of Megatron's core attention, ignored.

    Raises ValueError if the config asks for attention that is not supported.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attn_mask_type: Any = None,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if attn_mask_type is not None and "causal" not in attn_mask_type.name:
            raise ValueError(f"attn_mask_type is {attn_mask_type.name}, must be causal")
        for name, allowed, why in (
            ("context_parallel_size", 1, "for attention on the rank itself"),
            ("attention_dropout", 0, "with packed sequences here"),
            ("window_size", None, "because attention is over all earlier tokens"),
            ("softmax_type", "vanilla", "for attention in torch"),
        ):
            if (value := getattr(config, name, allowed)) != allowed:
                raise ValueError(f"{name} is {value!r}, must be {allowed!r} {why}")
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        attention_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Maps query [t, heads, D], key [s, KV heads, D], value [s, KV heads, width] to [t, heads * width].

        Raises ValueError without packed sequences, for another number of rows than they have, and for an
        attention_bias.
        """
        refusal = _refusal(packed_seq_params, attention_bias)
        if refusal:
            raise ValueError(refusal)
        assert packed_seq_params is not None, "it would have been refused"
        q_sizes = _sizes("cu_seqlens_q", packed_seq_params.cu_seqlens_q, query)
        k_sizes = _sizes("cu_seqlens_kv", packed_seq_params.cu_seqlens_kv, key)
        out = [_no_output(query, key, value)]
        for q, k, v in zip(query.split(q_sizes), key.split(k_sizes), value.split(k_sizes), strict=True):
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
            group = q.shape[0] // k.shape[0]
            k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
            rows = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
            out.append(rows.transpose(0, 1))
        return torch.cat(out).flatten(1)


class _Mask(enum.Enum):
    """A mask of Transformer Engine, which Megatron's wrapper passes on by name and `AttnMaskType` lacks."""

    padding_causal_bottom_right = enum.auto()


class _Dispatched(torch.nn.Module):
    """Balances a core attention over ranks. Precedes it among the bases of a class.

    In the first layer of a micro-batch all ranks of a DP x CP group exchange the lengths of their documents and make
    the same plan, which the other layers and recomputation use as well. The rows of a document have Megatron's layout:
    all on one rank, or with context parallelism its first and last chunk on the first rank, and so on.

    The plan is kept with the `PackedSeqParams`. It is made again if these have another tensor of cu_seqlens, or if that
    was changed in place, and by every layer for inference tensors, whose changes cannot be seen. Making a plan is
    collective: all ranks must do it alike.
    """

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        of_one_rank = copy.copy(config)  # the base class gets whole sequences
        of_one_rank.context_parallel_size = 1
        super().__init__(of_one_rank, **options)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        attention_bias: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Maps query [t, heads, D], key [t, KV heads, D], value [t, KV heads, width] to [t, heads * width].

        Raises ValueError without packed sequences, for another number of rows than they have, and for an
        attention_bias: all ranks raise it if a plan is being made; otherwise the other ranks raise EPAbortError. Raises
        EPError as `SequenceDispatcher` does.
        """
        refusal = _refusal(packed_seq_params, attention_bias)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        step = getattr(packed_seq_params, "_ep_sequences", None)
        if step is None or not step.is_of(packed_seq_params):
            use(group, self)
            step = _plan_step(packed_seq_params, refusal, group, query, key, value)
        elif refusal:
            with abort_peers_on_error(group):
                raise ValueError(refusal)
        q, k, v = step.dispatcher.dispatch(query.contiguous(), key.contiguous(), value.contiguous(), step.plan)
        if step.context_rows is not None:
            k, v = k[step.context_rows], v[step.context_rows]
        if len(q):
            mask = _Mask.padding_causal_bottom_right
            out = super().forward(q, k, v, None, attn_mask_type=mask, packed_seq_params=step.params)
        else:
            out = _no_output(q, k, v).flatten(1)
        return step.dispatcher.combine(out, step.plan)


class DispatchedCoreAttention(_Dispatched, VarlenAttention):
    """`VarlenAttention` of packed sequences, balanced over ranks. `sequence_spec` makes a similar class for Transformer
    Engine's attention.

    config, layer_number, attn_mask_type, attention_type, cp_comm_type, softmax_scale, pg_collection, options: see
        Megatron's core attention. Rows move over the DP x CP group of Megatron's `parallel_state`, not over groups of
        pg_collection.

    Raises ValueError if `VarlenAttention` does not support the config.
    """


@functools.cache
def _dispatched_te(kind: type) -> type:
    """Returns the class for Megatron's wrapper of Transformer Engine's attention: a subclass, so that checkpoints have
    the same names with and without it."""

    class DispatchedTEDotProductAttention(_Dispatched, kind):
        def __init__(self, config: TransformerConfig, *, attn_mask_type: Any, **options: Any) -> None:
            if "causal" not in attn_mask_type.name:
                raise ValueError(f"attn_mask_type is {attn_mask_type.name}, must be causal")
            super().__init__(config, attn_mask_type=attn_mask_type, **options)

    return DispatchedTEDotProductAttention


def _no_output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns [0, heads, width] that depends on all three, so that every rank takes part in the backward pass."""
    nothing = query[:0, :, :1] * (key[:0].sum() + value[:0].sum())
    return nothing.expand(0, query.shape[1], value.shape[2])


def sequence_spec(spec: Spec) -> Spec:
    """Returns a copy of a spec in which every self-attention is balanced over ranks.

    Transformer Engine computes if it did before, otherwise torch (`DispatchedCoreAttention`). Everything else is
    unchanged. The model needs packed sequences (`PackedSeqParams`).

    spec: spec of a layer, a block or a multi-token-prediction block, as Megatron's `get_gpt_*_spec` functions return
        them, or as `ep_layer_spec` returns it.

    Raises ValueError if there is no self-attention in the spec, or one has a core attention of another kind.
    """
    return _with_core_attention(spec, _dispatched)


def varlen_spec(spec: Spec) -> Spec:
    """Returns a copy of a spec with `VarlenAttention`: each rank computes the attention of its own packed sequences.

    Raises ValueError as `sequence_spec` does.
    """
    return _with_core_attention(spec, lambda _: ModuleSpec(module=VarlenAttention))


def _with_core_attention(spec: Spec, core_of: Callable[[Any], Any]) -> Spec:
    changed = replaced(spec, functools.partial(_self_attention, core_of))
    if changed is spec:
        raise ValueError(f"spec: no self-attention in this {type(spec).__name__}")
    return changed


def enable() -> None:
    """Balances every self-attention that Megatron builds in this process from now on, like `sequence_spec`.

    Raises RuntimeError if it is already enabled.
    """
    if _originals:
        raise RuntimeError("attention.enable(): already enabled; disable() first")
    for kind in (SelfAttention, MLASelfAttention):
        _originals[kind] = original = kind.__init__
        kind.__init__ = _initializer(original)


def disable() -> None:
    """Makes self-attention built from now on Megatron's own again. Idempotent."""
    for kind, original in _originals.items():
        kind.__init__ = original  # type: ignore[misc]
    _originals.clear()


def _initializer(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def initialize(
        layer: torch.nn.Module, config: TransformerConfig, submodules: Any, *args: Any, **options: Any
    ) -> None:
        original(layer, config, _self_attention(_dispatched, submodules) or submodules, *args, **options)

    return initialize


def _self_attention(core_of: Callable[[Any], Any], node: Any) -> Any:
    """Returns the submodules of a self-attention with another core attention; None for anything else."""
    if not isinstance(node, (SelfAttentionSubmodules, MLASelfAttentionSubmodules)):
        return None
    return dataclasses.replace(node, core_attention=core_of(node.core_attention))


def _dispatched(core_attention: Any) -> Any:
    """Returns a core attention that is balanced over ranks. Raises ValueError for one that cannot be."""
    kind = get_module(core_attention) if isinstance(core_attention, ModuleSpec) else core_attention
    if isinstance(kind, type) and issubclass(kind, _Dispatched):
        return core_attention
    if te.HAVE_TE and isinstance(kind, type) and issubclass(kind, te.TEDotProductAttention):
        params = core_attention.params if isinstance(core_attention, ModuleSpec) else {}
        return ModuleSpec(module=_dispatched_te(kind), params=params)
    if kind not in (DotProductAttention, VarlenAttention):
        raise ValueError(
            f"core_attention is {getattr(kind, '__name__', kind)}, must be DotProductAttention, or Transformer "
            "Engine's TEDotProductAttention where that is installed: attention on other ranks has no other"
        )
    return ModuleSpec(module=DispatchedCoreAttention)


def packed_sequences(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """Returns the `PackedSeqParams` of consecutive sequences.

    cu_seqlens: int32 [sequences + 1]: the start of each sequence, and the end of the last.
    """
    longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    return PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)


# ---- the plan of a micro-batch


@dataclass
class _Step:
    """The plan of a micro-batch. params: the sequences whose attention this rank computes. context_rows: rows of their
    keys, see `RankTables`. ends, version: cu_seqlens of the plan, and their version counter when it was made."""

    dispatcher: SequenceDispatcher
    plan: SequencePlan
    params: PackedSeqParams
    context_rows: torch.Tensor | None
    ends: torch.Tensor
    version: int

    def is_of(self, params: PackedSeqParams) -> bool:
        return _ends(params) is self.ends and not self.ends.is_inference() and self.ends._version == self.version


@dataclass
class _Own:
    """A rank's micro-batch, as sent to the other ranks. refusal: why it is invalid; "" if it is valid."""

    data_rank: int
    context_rank: int
    lengths: list[int]  # lengths of its documents, on all context-parallel ranks together
    refusal: str = ""


def _refusal(params: PackedSeqParams | None, attention_bias: torch.Tensor | None) -> str:
    """Returns why the arguments are invalid; "" if they describe attention of packed sequences."""
    if params is None or params.qkv_format != "thd":
        got = "None" if params is None else f"of format {params.qkv_format!r}"
        return f"packed_seq_params is {got}, must describe packed sequences: qkv_format 'thd'"
    ends = _ends(params)
    if not isinstance(ends, torch.Tensor) or ends.dim() != 1:
        return f"packed_seq_params.cu_seqlens_q is {ends!r}, must be a tensor [sequences + 1]"
    return "" if attention_bias is None else "attention_bias is given, must be None with packed sequences"


def _ends(params: PackedSeqParams) -> Any:
    return params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded


def _sizes(name: str, cu_seqlens: torch.Tensor, rows: torch.Tensor) -> list[int]:
    sizes = cu_seqlens.diff().tolist()
    if sum(sizes) != len(rows) or min(sizes, default=0) < 0:
        raise ValueError(f"{name} has sequences of {sizes} tokens, must be of the {len(rows)} rows that are given")
    return sizes


def _plan_step(
    params: PackedSeqParams | None,
    refusal: str,
    group: dist.ProcessGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> _Step:
    """Makes the plan of a micro-batch. Collective. refusal: why this rank's is invalid, which all ranks then raise."""
    context_ranks = parallel_state.get_context_parallel_world_size()
    everyone: list[Any] = [None] * group.size()
    own = _own_documents(params, refusal, query.shape[0], context_ranks)
    dist.all_gather_object(everyone, own, group=group)
    refusals = [f"rank {rank} of data parallelism: {own.refusal}" for rank, own in enumerate(everyone) if own.refusal]
    if refusals:
        raise ValueError(refusals[0])
    assert params is not None, "it would have been refused"
    shards = shards_of(everyone, context_ranks)
    q, k, v = (x.shape[1:].numel() * x.element_size() for x in (query, key, value))
    out = query.shape[1] * value.shape[2] * value.element_size()
    plan = SequencePlan.build(balance(shards, group.size(), row_bytes=RowBytes(q, k + v, out)), group.size())
    settings = {"row_bytes": max(q, k + v, out), "num_sms": sms_for_sequences(query.device)}
    buffer = shared_buffer(group, group.size(), query.device, settings)
    if buffer not in _dispatchers:
        _dispatchers[buffer] = SequenceDispatcher(buffer)
    tables = plan.of_rank(group.rank())
    ends_q, ends_k = tables.cu_seqlens_q.to(query.device), tables.cu_seqlens_k.to(query.device)
    longest = {"max_seqlen_q": tables.max_seqlen_q, "max_seqlen_kv": tables.max_seqlen_k}
    sequences = PackedSeqParams("thd", ends_q, ends_k, **longest)
    context_rows = None if tables.context_rows is None else tables.context_rows.to(query.device)
    ends = _ends(params)
    version = 0 if ends.is_inference() else ends._version
    step = params._ep_sequences = _Step(_dispatchers[buffer], plan, sequences, context_rows, ends, version)
    return step


def _own_documents(params: PackedSeqParams | None, refusal: str, rows: int, context_ranks: int) -> _Own:
    own = _Own(parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank(), [], refusal)
    if refusal:
        return own
    own.lengths = _ends(params).diff().tolist()
    if sum(own.lengths) != rows * context_ranks:
        own.refusal = (
            f"packed_seq_params has {sum(own.lengths)} tokens, must have the {rows * context_ranks} of the micro-batch"
        )
    chunks = 2 * context_ranks if context_ranks > 1 else 1
    for length in own.lengths:
        if length % chunks:
            own.refusal = f"packed_seq_params has a sequence of {length} tokens, must be a multiple of {chunks}"
    return own


def shards_of(everyone: list[Any], context_ranks: int) -> list[Shard]:
    """Returns the shards of the documents of all ranks, with the ranks that have their rows."""
    rank_at = {(own.data_rank, own.context_rank): rank for rank, own in enumerate(everyone)}
    chunks = 2 * context_ranks if context_ranks > 1 else 1
    shards, document = [], 0
    for data_rank in sorted({own.data_rank for own in everyone}):
        for length in everyone[rank_at[data_rank, 0]].lengths:
            for index in range(chunks):
                home = rank_at[data_rank, min(index, chunks - 1 - index)]
                shards.append(Shard(document, index, home, home, length // chunks))
            document += 1
    return shards

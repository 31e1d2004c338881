"""Finds the plans of dispatches and combines with checked arguments, makes those that are missing, and runs them.

Lists have one entry per rank of this process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ep import _C
from megatron_ep.normal import one_hop, plan
from megatron_ep.normal.handle import Handle
from megatron_ep.normal.one_hop import OneHopCombinePlan, OneHopDispatchPlan

Tensors = Sequence[torch.Tensor]
# Rows, scales and weights, with one tensor per rank each.
DispatchOutputs = tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor] | None]

# Offset in a handle's layout. It is copied here, because reading it from the extension would break torch.compile.
OVERFLOW = int(_C.Heap.overflow_offset)


def launch_dispatch(
    handle: Handle,
    x: Tensors,
    scales: Tensors | None,
    weights: Tensors | None,
    *,
    clears_end: bool,
    all_weights: bool = False,
) -> DispatchOutputs:
    """Dispatches x [T, H], scales [T, S] and weights [T, K] to [R, H], [R, S] and [R] (flat: [R, K]).

    The first dispatch of a handle makes its layout.

    clears_end: whether rows that no token fills are zeros, as their weights always are, if expert_capacity or
        max_recv_tokens makes room for them.
    all_weights: flat: whether to send the weights of other ranks' experts, which are zeros otherwise.
    """
    prepared = dispatch_plan(handle, x, scales, weights, clears_end=clears_end, all_weights=all_weights)
    parts = prepared.run(handle, handle.group.live_backend(), x, scales, weights)
    out, out_scales, out_weights = zip(*parts, strict=True)
    return list(out), list(out_scales) if scales else None, list(out_weights) if weights else None


def launch_combine(
    handle: Handle,
    x: Tensors,
    weights: Tensors | None,
    row_weights: Tensors | None = None,
    biases: Tensors = (),
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Combines x [R, H] to sums [T, H], and returns weights [R] (flat: [R, K]) as [T, K]; row_weights [R] multiply x.

    biases: at most two tensors [T, H] that are added to the sums, in a process with one rank. K and their number
        together are at most 32.
    """
    prepared = combine_plan(handle, x, weights, row_weights)
    parts = prepared.run(handle, handle.group.live_backend(), x, weights, row_weights, biases)
    y, y_weights = zip(*parts, strict=True)
    return list(y), list(y_weights) if weights else None


def dispatch_plan(
    handle: Handle,
    x: Tensors,
    scales: Tensors | None,
    weights: Tensors | None,
    *,
    clears_end: bool,
    all_weights: bool = False,
) -> plan.DispatchPlan | OneHopDispatchPlan:
    """Returns the cached plan of a dispatch: with new ids if the handle has a request, else with its layout."""
    asked = None if handle.request is None else (handle.topk_idx[0].dtype, handle.request)
    how = (handle.topk, handle.is_flat, handle.one_hop, plan.is_planned(handle), clears_end, all_weights)
    key = ("dispatch", how, asked, *map(_types_of, (x, scales, weights)))
    known: plan.DispatchPlan | OneHopDispatchPlan | None = handle.group.call_cache.get(key)
    if known is None:
        if handle.one_hop is not None:
            known = OneHopDispatchPlan(handle, x, scales, weights, clears_end=clears_end)
        else:
            known = plan.DispatchPlan(handle, x, scales, weights, clears_end=clears_end, all_weights=all_weights)
        handle.group.call_cache.add(key, known)
    return known


def combine_plan(
    handle: Handle, x: Tensors, weights: Tensors | None, row_weights: Tensors | None
) -> plan.CombinePlan | OneHopCombinePlan:
    """Returns the cached plan of a combine."""
    weight_types = (weights is not None and weights[0].dtype, row_weights is not None)
    how = (handle.topk, handle.is_flat, handle.one_hop, plan.is_planned(handle))
    num_tokens = [rank.counts.num_tokens for rank in handle.ranks]
    key = ("combine", how, x[0].dtype, x[0].shape[1], *weight_types, *num_tokens)
    known: plan.CombinePlan | OneHopCombinePlan | None = handle.group.call_cache.get(key)
    if known is None:
        if handle.one_hop is not None:
            known = OneHopCombinePlan(handle, x, weights)
        else:
            known = plan.CombinePlan(handle, x, weights, row_weights)
        handle.group.call_cache.add(key, known)
    return known


def _types_of(tensors: Tensors | None) -> object:
    return None if tensors is None else tuple((tensor.dtype, tensor.shape) for tensor in tensors)


# ---- results of a handle


def tokens_per_expert_of(handle: Handle) -> list[torch.Tensor]:
    """Returns int64 [L] per rank, which the caller may change. Copies only from the second call on, because a copy on a
    GPU is a launch."""
    given = []
    for rank in handle.ranks:
        counts = rank.tokens_per_expert
        given.append(counts[1].clone() if rank.has_given_counts else counts[0])
        rank.has_given_counts = True
    return given


def overflow_of(handle: Handle) -> list[torch.Tensor]:
    """Returns views int32 [1] per rank, which are not 0 once rows did not fit."""
    offset = OVERFLOW if handle.one_hop is None else one_hop.OVERFLOW
    return [rank.layout.narrow(0, offset, 1) for rank in handle.ranks]

"""The launches of the normal mode: counts, dispatch and combine. `megatron_ep.normal.api` checks their arguments.

Lists have one entry per rank of this process. A process with one rank caches plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.normal import one_hop, plan, row_counts
from megatron_ep.normal.handle import Handle
from megatron_ep.normal.one_hop import OneHopCombinePlan, OneHopDispatchPlan, listed
from megatron_ep.normal.plan import at

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
    if plans_calls(handle.group):
        given = (x[0], at(scales, 0), at(weights, 0))
        prepared = dispatch_plan(handle, *given, clears_end=clears_end, all_weights=all_weights)
        parts = [prepared.run(handle, handle.group.live_backend(), at(handle.topk_idx, 0), *given)]
    elif handle.one_hop is not None:
        of_all = OneHopDispatchPlan(handle, x, scales, weights, clears_end=clears_end)
        parts = of_all.run_all(handle, handle.group.live_backend(), handle.topk_idx, x, scales, weights)
    else:
        parts = _dispatch_on_all(handle, x, scales, weights, clears_end, all_weights)
    handle.request, handle.topk_idx = None, ()
    out, out_scales, out_weights = zip(*parts, strict=True)
    return list(out), list(out_scales) if scales else None, list(out_weights) if weights else None


def plans_calls(group: RankGroup) -> bool:
    """Returns whether calls use cached plans, which need a single rank in this process."""
    return len(group.ranks) == 1


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
    if plans_calls(handle.group):
        given = (x[0], at(weights, 0), at(row_weights, 0))
        parts = [combine_plan(handle, *given).run(handle, handle.group.live_backend(), *given, biases)]
    elif handle.one_hop is not None:
        of_all = OneHopCombinePlan(handle, x, weights)
        parts = of_all.run_all(handle, handle.group.live_backend(), x, weights, row_weights)
    else:
        assert not biases
        parts = _combine_on_all(handle, x, weights, row_weights)
    y, y_weights = zip(*parts, strict=True)
    return list(y), list(y_weights) if weights else None


def dispatch_plan(
    handle: Handle,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor | None,
    *,
    clears_end: bool,
    all_weights: bool = False,
) -> plan.DispatchPlan | OneHopDispatchPlan:
    """Returns the cached plan of a dispatch: with new ids if the handle has a request, else with its layout."""
    asked = None if handle.request is None else (handle.topk_idx[0].dtype, handle.request)
    how = (handle.topk, handle.is_flat, handle.one_hop, plan.is_planned(handle), clears_end, all_weights)
    key = ("dispatch", how, asked, *map(_type_of, (x, scales, weights)))
    known: plan.DispatchPlan | OneHopDispatchPlan | None = handle.group.call_cache.get(key)
    if known is None:
        if handle.one_hop is not None:
            known = OneHopDispatchPlan(handle, [x], listed(scales), listed(weights), clears_end=clears_end)
        else:
            known = plan.DispatchPlan(handle, x, scales, weights, clears_end=clears_end, all_weights=all_weights)
        handle.group.call_cache.add(key, known)
    return known


def combine_plan(
    handle: Handle, x: torch.Tensor, weights: torch.Tensor | None, row_weights: torch.Tensor | None
) -> plan.CombinePlan | OneHopCombinePlan:
    rank = handle.ranks[0]
    weight_types = (weights is not None and weights.dtype, row_weights is not None)
    how = (handle.topk, handle.is_flat, handle.one_hop, plan.is_planned(handle), rank.counts.num_tokens)
    key = ("combine", how, x.dtype, x.shape[1], *weight_types)
    known: plan.CombinePlan | OneHopCombinePlan | None = handle.group.call_cache.get(key)
    if known is None:
        if handle.one_hop is not None:
            known = OneHopCombinePlan(handle, [x], listed(weights))
        else:
            known = plan.CombinePlan(handle, rank, x, weights, row_weights)
        handle.group.call_cache.add(key, known)
    return known


def _type_of(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tensor.shape)


# ---- several ranks


def _dispatch_on_all(
    handle: Handle,
    x: Tensors,
    scales: Tensors | None,
    weights: Tensors | None,
    clears_end: bool,
    all_weights: bool,
) -> list[plan.Outputs]:
    group, request, topk_idx = handle.group, handle.request, handle.topk_idx
    backend = group.live_backend()
    stream = backend.current_stream()
    tensors = [(x[i], at(scales, i), at(weights, i)) for i in range(len(x))]
    plans = [plan.DispatchPlan(handle, *of, clears_end=clears_end, all_weights=all_weights) for of in tensors]
    call = backend.launcher.prepare_dispatch(plans[0].row, [p.members for p in plans], plan.DISPATCH_PER_LAUNCH)
    phase = plan.DISPATCH
    if request is not None:
        first, n = plans[0], len(x)
        per_expert = [backend.new_counts(group.num_local_experts, wait=first.waits, index=i) for i in range(n)]
        layouts: list[Any] = [None] * n
        if first.is_counted:
            layouts = [torch.empty(p.layout_size, dtype=torch.int32, device=group.device) for p in plans]
            given = [plan.counts_given(*of) for of in zip(topk_idx, per_expert, layouts, strict=True)]
            totals, _ = backend.launch(backend.launcher, call, plan.NOTIFY, stream, tuple(itertools.chain(*given)))
            counts = row_counts.known(group, request, topk_idx, totals, handle.is_flat)
            per_expert = [backend.taken_counts(of_rank) for of_rank in per_expert] if first.waits else per_expert
        else:
            counts, phase = [p.room for p in plans], plan.WITHOUT_WAIT
        handle.ranks = [p.new_rank(stream, counts[i], layouts[i], per_expert[i]) for i, p in enumerate(plans)]
    parts = [
        p.arguments(handle, backend, stream, handle.ranks[i], at(topk_idx, i), *tensors[i]) for i, p in enumerate(plans)
    ]
    backend.launch(backend.launcher, call, phase, stream, tuple(itertools.chain(*(given for _, given in parts))))
    group.calls.note("dispatch", handle.ranks[0].layout.data_ptr())
    group.raise_if_aborted()
    return [outputs for outputs, _ in parts]


def _combine_on_all(
    handle: Handle, x: Tensors, weights: Tensors | None, row_weights: Tensors | None
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    backend = handle.group.live_backend()
    stream, plans, parts = backend.current_stream(), [], []
    for i, rank in enumerate(handle.ranks):
        given = (x[i], at(weights, i), at(row_weights, i))
        plans.append(plan.CombinePlan(handle, rank, *given))
        parts.append(plans[i].arguments(handle, backend, stream, rank, *given))
    call = backend.launcher.prepare_combine(plans[0].row, [p.members for p in plans], plan.COMBINE_PER_LAUNCH)
    backend.launch(
        backend.launcher, call, plan.COMBINE, stream, tuple(itertools.chain(*(given for *_, given in parts)))
    )
    handle.group.calls.note("combine", handle.ranks[0].layout.data_ptr())
    handle.group.raise_if_aborted()
    return [(y, y_weights) for y, y_weights, _ in parts]


# ---- results of a handle, gradients, checks


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


def gradient_of_rows(x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of x [..., H], which was multiplied by weights [...] before a combine.

    grad: [..., H], gradient of the products.
    is_row: bool [...], False for padding, where x and weights are undefined.
    """
    return (grad * torch.where(is_row, weights, weights.new_zeros(())).unsqueeze(-1)).to(x.dtype)


def gradient_of_weights(
    x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor, is_row: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of weights [...], see `gradient_of_rows`."""
    products = grad.to(weights.dtype) * x
    return torch.where(is_row, products.sum(dim=-1), weights.new_zeros(()))


def check_capture(group: RankGroup, max_recv_tokens: int | None) -> None:
    """Raises ValueError if the host would wait for counts while a CUDA graph is captured. Does not notify other ranks,
    because all ranks capture alike."""
    backend = group.live_backend()
    if max_recv_tokens is None and not backend.host_knows_counts and backend.is_capturing():
        raise ValueError(
            "max_recv_tokens is None, must be given while a CUDA graph is captured: without it the host waits for "
            "counts that nothing exchanges yet"
        )

"""Moves Q, K and V to the ranks that compute attention, and its output back."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_ep.buffer.any_buffer import AnyBuffer, rank_group_of
from megatron_ep.buffer.arguments import Tensors, as_list, check_payload, check_summable
from megatron_ep.normal.autograd import need_gradient
from megatron_ep.normal.plan import format_of
from megatron_ep.sequences.autograd import differentiable_dispatch, differentiable_move
from megatron_ep.sequences.handles import PlanHandles, handles_of
from megatron_ep.sequences.plan import SequencePlan


def sms_for_sequences(device: torch.device) -> int | None:
    """Returns `Config.num_sms` for a buffer that only moves sequences: half of the GPU, because nothing else runs
    meanwhile. Two H100, 24 and 64 of 132 SMs: 4.6 and 2.8 ms (`tests/bench/run.py sequences`)."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).multi_processor_count) // 2


class SequenceDispatcher:
    """Moves the rows of attention by a plan, which defines where each one goes, so that no counts are exchanged.

    With a Buffer calls take and return tensors; with a LocalCluster, lists with one tensor per rank. All calls and
    their backward passes are collective: all ranks make the same calls in the same order, by the same plan, and what is
    computed from the results must take part in the loss on all ranks or on none. `overlap.start` runs them in parallel
    with other work.

    buffer: a Buffer or LocalCluster, which other calls may use as well. `Config.row_bytes` should be those of the
        largest row, of Q or of K with V, in float32 where 16-bit gradients are summed across nodes.

    The tables of a plan are computed in the first call with it, and kept as long as the plan. Raises ValueError if
    buffer is neither a Buffer nor a LocalCluster.
    """

    def __init__(self, buffer: AnyBuffer):
        self._group = rank_group_of(buffer)
        self._handles: WeakKeyDictionary[SequencePlan, PlanHandles] = WeakKeyDictionary()

    def dispatch(self, q: Tensors, k: Tensors, v: Tensors, plan: SequencePlan) -> tuple[Any, Any, Any]:
        """Sends rows of Q to the rank that computes their attention, and rows of K and V once to each rank that needs
        them.

        q, k, v: [T, ...], with T = `RankTables.num_rows` of the plan, in the order of documents and their shards;
            contiguous; bfloat16, float16, float32, float64 or float8_e4m3fn. Further dimensions are arbitrary but equal
            on all ranks, and may differ between q, k and v (grouped queries, MLA). k and v have one dtype. Each gets a
            gradient on all ranks or on none, unless it is float8.

        Returns q [num_q_rows, ...], k and v [num_kv_rows, ...]: see `RankTables` of this rank, `plan.of_rank`. The
        gradients of k and v are summed over the copies of a row in float32 (float64 for float64), in a fixed order, and
        rounded once: `megatron_ep.sequences.reference.sum_copies`.

        Raises ValueError for a wrong argument before anything is sent; other ranks then get EPAbortError. Raises
        EPTimeoutError when another rank does not take part, EPError when one has another plan.
        """
        group = self._group
        with group.abort_peers_on_error():
            handles = self._handles_of(plan)
            rows = plan.q_rows.sum(1)
            given = [self._check(name, x, rows) for name, x in (("q", q), ("k", k), ("v", v))]
            if given[1][0].dtype != given[2][0].dtype:
                raise ValueError(f"v is {given[2][0].dtype}, must be {given[1][0].dtype} as k is")
            n, flat = len(group.ranks), [_flat(x) for tensors in given for x in tensors]
            _check_moves(handles, *flat[::n], needs_gradient=need_gradient(flat[n:]))
        out = differentiable_dispatch(handles, *flat)
        q, k, v = (self._result(out[i * n : (i + 1) * n], tensors[0].shape[1:]) for i, tensors in enumerate(given))
        return q, k, v

    def combine(self, out: Tensors, plan: SequencePlan) -> Any:
        """Sends the output of attention back to the home ranks of its queries.

        out: [num_q_rows, ...], contiguous, in the order of q from `dispatch`. Gets a gradient.

        Returns [T, ...]. Raises as `dispatch` does.
        """
        with self._group.abort_peers_on_error():
            handles = self._handles_of(plan)
            given = self._check("out", out, plan.q_rows.sum(0))
        rows = differentiable_move(handles.out, handles.q, *map(_flat, given))
        return self._result(rows, given[0].shape[1:])

    def _handles_of(self, plan: SequencePlan) -> PlanHandles:
        group = self._group
        group.check_usable()
        if not isinstance(plan, SequencePlan):
            raise ValueError(f"plan is a {type(plan).__name__}, must be a SequencePlan")
        if plan.world != group.topology.world_size:
            raise ValueError(
                f"plan is for {plan.world} ranks, must be for the {group.topology.world_size} of the buffer"
            )
        handles = self._handles.get(plan)
        if handles is None or handles.q.resets_since_made:  # a call that fills the tables may not have finished
            handles = self._handles[plan] = handles_of(plan, group)
        return handles

    def _check(self, name: str, value: Tensors, rows: torch.Tensor) -> list[torch.Tensor]:
        tensors = as_list(name, value, self._group)
        for x in tensors:
            if x.dim() < 2 or x.shape[1:] != tensors[0].shape[1:]:
                other = "" if x.dim() < 2 else f", and {tuple(tensors[0].shape)} on another rank"
                raise ValueError(f"{name} has shape {tuple(x.shape)}{other}, must be [rows, ...], alike on all ranks")
        check_payload(name, [x.flatten(1) for x in tensors], rows[self._group.ranks].tolist())
        return tensors

    def _result(self, rows: tuple[torch.Tensor, ...], shape: torch.Size) -> Any:
        tensors = [x.unflatten(1, shape) for x in rows]
        return tensors if self._group.takes_lists else tensors[0]


def _check_moves(
    handles: PlanHandles, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, needs_gradient: bool
) -> None:
    """Raises ValueError if a ring is too small for a row of these tensors or of their gradients, or if their dtype
    cannot be summed."""
    format_of(handles.q.group, handles.q.topk, q, None, None)
    format_of(handles.kv.group, handles.kv.topk, k, v, None)
    if not needs_gradient:
        return
    widens, device_type = handles.widens_sums(k.dtype), handles.kv.group.device.type
    check_summable("the gradient of k and v", torch.float32 if widens else k.dtype, device_type)
    if widens:
        for x in (k, v):
            format_of(handles.kv.group, handles.kv.topk, x[:0].detach().float(), None, None)


def _flat(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(1)
    return rows.detach() if x.dtype == torch.float8_e4m3fn else rows

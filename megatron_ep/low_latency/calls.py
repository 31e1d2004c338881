"""The launches of low-latency calls.

A call launches its sending half immediately, and its receiving half with it or, when the caller calls the hook, by
`Pending.receive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import Backend, Members
from megatron_ep.buffer.low_latency import SEND, LowLatencyRanks
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.plans import RECEIVED, CombinePlan, DispatchPlan, InFlight, Pending
from megatron_ep.low_latency.rows import Float8, aligned_column
from megatron_ep.normal.one_hop import fill_with_zeros, row_format

Tensor = torch.Tensor
Maybe = Tensor | None
# The tensors of a rank: x, topk_idx, topk_weights, scales, recv_rows and recv_wait_ns of a dispatch; x, values,
# weights, out and recv_wait_ns of a combine, where values travel with the rows, and weights multiply them.
DispatchInputs = tuple[Tensor, Tensor, Maybe, Maybe, Maybe, Maybe]
CombineInputs = tuple[Tensor, Maybe, Maybe, Maybe, Maybe]
Received = tuple[Tensor, Maybe, Maybe]  # rows, their weights and scales


class LowLatencyCalls:
    """Launches low-latency calls with checked arguments on the ranks of this process.

    Inputs and results are those of each rank. pending: a list to which the call is appended; None: it is received
    immediately.

    row_bytes: bytes of the largest row that is not float8.
    """

    def __init__(self, group: RankGroup, ranks: LowLatencyRanks, row_bytes: int):
        self.group = group
        self.masks = ranks.masks
        self.ranks = ranks
        self.row_bytes = row_bytes
        self.resets = 0
        self.dispatches, self.combines = InFlight("dispatch"), InFlight("combine")
        self.backend.attach(self)

    def check_received(self) -> None:
        """Raises ValueError if a call has not been received."""
        self.dispatches.check_received()
        self.combines.check_received()

    @property
    def backend(self) -> Backend:
        return self.group.live_backend()

    @property
    def memories(self) -> Sequence[Any]:
        return self.ranks.memories

    @property
    def network_memory(self) -> Any:
        return self.ranks.network_memory

    def release(self) -> None:
        self.ranks.release()

    def reset(self) -> None:
        self.resets += 1
        self.ranks.reset()
        self.dispatches.give_up()
        self.combines.give_up()

    def plan(
        self,
        x: Sequence[Tensor],
        topk: int,
        index_bytes: int,
        weights: Sequence[Tensor] | None,
        float8: Float8 | None,
        *,
        masked: bool,
        expert_alignment: int,
        rows: int,
    ) -> DispatchPlan:
        """Returns the plan of a dispatch with tensors like these. rows: number of rows that each rank has room for."""
        hidden, dtype = x[0].shape[1], x[0].dtype
        local_experts = self.group.num_local_experts
        shape = (local_experts, rows // local_experts) if masked else (rows,)
        members = {
            "index_bytes": index_bytes,
            "expert_alignment": expert_alignment,
            "expert_rows": shape[-1] if masked else 0,
        }
        if float8 is not None:
            dtype = torch.float8_e4m3fn
            members["quantize"] = int(getattr(_C.ScaleFormat, float8.scale_format or "none"))
            members["scale_column"] = aligned_column(shape[-1]) if float8.column else 0
        weight_bytes = 0 if weights is None else weights[0].element_size()
        row = row_format(topk, hidden, dtype, float8.scale_dtype if float8 else None, weight_bytes)
        num_tokens = tuple(part.shape[0] for part in x)
        return DispatchPlan(
            topk=topk,
            masked=masked,
            expert_alignment=expert_alignment,
            num_tokens=num_tokens,
            rows=rows,
            shape=shape,
            out_shape=(*shape, hidden),
            dtype=dtype,
            float8=float8,
            offsets=self.ranks.offsets(topk),
            call=self.ranks.launcher.prepare_dispatch(
                row, self._members(num_tokens, rows, members), self.DISPATCH_PER_LAUNCH
            ),
        )

    def plan_combine(
        self, handle: LowLatencyHandle, x: Tensor, values: Maybe, *, sum_at_expert: bool, renormalize: bool
    ) -> CombinePlan:
        """Returns the plan of a combine with tensors like these of one rank, for handles of the same dispatch plan."""
        plan = handle.plan
        row = row_format(plan.topk, x.shape[-1], x.dtype, None, 0 if values is None else values.element_size())
        members: Members = {"sum_at_expert": sum_at_expert, "renormalize": renormalize}
        of_ranks = self._members(plan.num_tokens, plan.rows, members)
        return CombinePlan(sum_at_expert, self.ranks.launcher.prepare_combine(row, of_ranks, self.COMBINE_PER_LAUNCH))

    def _members(self, num_tokens: Sequence[int], rows: int, members: Members) -> list[Members]:
        """Returns the kernel arguments of each rank: `members`, its tokens and rows, and its masks."""
        return [
            members | {"num_tokens": tokens, "max_rows": rows} | (self.masks.members(i) if self.masks else {})
            for i, tokens in enumerate(num_tokens)
        ]

    # Members of csrc/core/low_latency_args.h that each launch passes, rank by rank, in the order of `dispatch`.
    DISPATCH_PER_LAUNCH = (
        *("layout", "call", "topk_idx", "x", "scales", "weights", "recv_x", "recv_scales", "recv_weights"),
        *("recv_rows", "recv_wait_ns", "required"),
    )

    def dispatch(
        self,
        handle: LowLatencyHandle,
        backend: Backend,
        inputs: Sequence[DispatchInputs],
        pending: list[Pending] | None,
        *,
        zero: bool = False,
    ) -> list[Received]:
        """Dispatches x [T, H] and topk_weights [T, K] to [*rows, H], [*rows], and scales, if there are any.

        handle: a new one, which gets its layouts. zero: whether rows without a token are zeros.
        """
        plan, stream = handle.plan, backend.current_stream()
        size, call_offset = plan.offsets["size"], 4 * plan.offsets["dispatch_call"]
        handle.made_on = stream
        parts: list[Received] = []
        per_launch: tuple[Any, ...] = ()
        for x, ids, weights, scales, recv_rows, wait_ns in inputs:
            layout = torch.empty(size, dtype=torch.int32, device=self.group.device)
            out, probs, out_scales = backend.new_output(plan.out_shape, plan.dtype), None, None
            if weights is not None:
                probs = backend.new_output(plan.shape, weights.dtype)
            if plan.float8 is not None:
                out_scales = plan.float8.new_scales(plan.out_shape, backend, zero=zero)
            if zero:
                fill_with_zeros(out, probs)
            required = None if handle.forward is None else self._required(handle.forward, backend, len(parts))
            handle.layouts.append(layout)
            parts.append((out, probs, out_scales))
            number = layout.data_ptr() + call_offset
            per_launch += (layout, number, ids, x, scales, weights, out, out_scales, probs)
            per_launch += (recv_rows, wait_ns, required)
        handle.call = self._launch(self.dispatches, backend, plan.call, stream, per_launch, pending)
        return parts

    # The same in the order of `combine`.
    COMBINE_PER_LAUNCH = (
        *("layout", "call", "x", "values", "row_weights", "token_weights", "y", "y_values"),
        *("recv_wait_ns", "required"),
    )

    def combine(
        self,
        handle: LowLatencyHandle,
        backend: Backend,
        plan: CombinePlan,
        inputs: Sequence[CombineInputs],
        pending: list[Pending] | None,
    ) -> list[tuple[Tensor, Maybe]]:
        """Combines x [*rows, H] to sums [T, H], and returns values [*rows] as [T, K].

        weights: weights of rows if the plan sums at the expert, else of tokens.
        """
        if handle.resets != self.resets:
            handle.check()
        if handle.call is not RECEIVED:
            handle.check_received()
        stream, made_by = backend.current_stream(), handle.plan
        if handle.made_on != stream:
            backend.keep_for_launch(handle.layouts, handle.made_on)
        parts: list[tuple[Tensor, Maybe]] = []
        per_launch: tuple[Any, ...] = ()
        call: Any
        for x, values, weights, out, recv_wait_ns in inputs:
            i = len(parts)
            layout, tokens = handle.layouts[i], made_by.num_tokens[i]
            y, y_values = backend.new_output((tokens, x.shape[-1]), x.dtype) if out is None else out, None
            if values is not None:
                y_values = torch.empty(tokens, made_by.topk, dtype=values.dtype, device=x.device)
            if pending is None:
                call = layout.data_ptr() + 4 * made_by.offsets["combine_call"]
            else:  # two combines of the same dispatch may be in flight
                call = torch.empty(1, dtype=torch.int64, device=x.device)
            required = None if handle.forward is None else self._required(handle.forward, backend, i)
            of_rows, of_tokens = (weights, None) if plan.sum_at_expert else (None, weights)
            parts.append((y, y_values))
            per_launch += (layout, call, x, values, of_rows, of_tokens, y, y_values, recv_wait_ns, required)
        self._launch(self.combines, backend, plan.call, stream, per_launch, pending)
        return parts

    def _required(self, forward: LowLatencyHandle, backend: Backend, i: int) -> Maybe:
        """Returns the ranks that must not have been masked since the forward pass; None without masks."""
        if self.masks is None:
            return None
        backend.keep_for_launch(forward.layouts, forward.made_on)
        return forward.active(i)

    def _launch(
        self,
        in_flight: InFlight,
        backend: Backend,
        call: _C.Call,
        stream: int,
        per_launch: tuple[Any, ...],
        pending: list[Pending] | None,
    ) -> Pending:
        """Launches a call, or its sending half."""
        if in_flight.first is not RECEIVED:
            in_flight.check()
        sent = RECEIVED
        if pending is None:
            self.ranks.launch(backend, call, stream, per_launch)
        else:
            sent = Pending(self, call, per_launch, stream)
            backend.launch(self.ranks.launcher, call, SEND, stream, per_launch, self.ranks)
            pending.append(sent)
        if self.masks is not None or backend.aborted() is not None:
            self.check_launched(backend)
        if sent is not in_flight.last:
            in_flight.first, in_flight.last = in_flight.last, sent
        return sent

    def check_launched(self, backend: Backend) -> None:
        """Logs masks, and raises a failure that is known after a launch."""
        if self.masks is not None:
            self.masks.log_news()
        if backend.aborted() is not None:
            self.group.raise_if_aborted()

"""The launches of the halves of low-latency calls.

A call launches its sending half immediately, and its receiving half with it or, when the caller calls the hook, by
`Pending.receive`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import Backend, Members
from megatron_ep.buffer.low_latency import RECEIVE, RECEIVED, SEND, Call, InFlight, LowLatencyRanks
from megatron_ep.buffer.low_latency_mask import Masks
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.plans import CombineArguments, CombinePlan, DispatchArguments, DispatchPlan
from megatron_ep.low_latency.rows import Float8, aligned_column
from megatron_ep.normal.one_hop import fill_with_zeros, row_format
from megatron_ep.normal.plan import at

# Members of csrc/core/low_latency_args.h that each launch passes, rank by rank, in this order.
DISPATCH_GIVEN = (
    *("layout", "call", "topk_idx", "x", "scales", "weights", "recv_x", "recv_scales", "recv_weights"),
    *("recv_rows", "recv_wait_ns", "required"),
)
COMBINE_GIVEN = (
    *("layout", "call", "x", "values", "row_weights", "token_weights", "y", "y_values"),
    *("recv_wait_ns", "required"),
)


class Pending:
    """A call whose receiving half can be launched.

    given: members of the launch, which keep its tensors. stream: the stream on which they were created.
    """

    def __init__(self, calls: LowLatencyCalls, call: _C.Call, given: tuple[Any, ...], stream: int):
        # A received call keeps no references, because `calls` keeps the call: a reference cycle would be freed by the
        # collector at any time, for example while a CUDA graph is captured.
        self._rest: tuple[Any, ...] | None = (calls, call, given, stream)
        self._given_up = False

    @property
    def received(self) -> bool:
        return self._rest is None

    @property
    def was_received(self) -> bool:
        return self._rest is None and not self._given_up

    def receive(self) -> None:
        """Launches the receiving half. Raises ValueError if called twice, or after a reset."""
        if self._given_up:
            raise ValueError(
                "the hook of a low-latency call was called after the buffer's reset, must be called before"
            )
        if self._rest is None:
            raise ValueError("the hook of a low-latency call was called twice, must be called once")
        calls, call, given, made_on = self._rest
        group: RankGroup = calls.group
        try:
            backend = group.live_backend()
            if backend.aborted() is not None:
                group.check_usable()
            stream = backend.current_stream()
            if made_on != stream:
                backend.keep_for_launch([part for part in given if isinstance(part, torch.Tensor)], made_on)
            backend.launch(calls.ranks.group, call, RECEIVE, stream, given, calls.ranks)
            self._rest = None
            calls.check_launched(backend)
        except BaseException as error:
            group.abort_peers(error)
            raise

    def give_up(self) -> None:
        if self._rest is not None:
            self._rest, self._given_up = None, True


class LowLatencyCalls:
    """Launches low-latency calls with checked arguments on the ranks of this process."""

    def __init__(self, group: RankGroup, ranks: LowLatencyRanks, masks: Masks | None):
        self.group = group
        self.masks = masks
        self.ranks = ranks
        self.resets = 0
        self.dispatches, self.combines = InFlight("dispatch"), InFlight("combine")
        self.backend.attach(self)

    @property
    def plans_calls(self) -> bool:
        """Whether the plan of a call is used again without its checks: without masks, in a process with one rank."""
        return self.masks is None and not self.group.takes_lists

    def new_handle(self, plan: DispatchPlan, forward: LowLatencyHandle | None = None) -> LowLatencyHandle:
        """Returns a handle for one dispatch."""
        size, device = plan.offsets["size"], self.group.device
        layouts = [torch.empty(size, dtype=torch.int32, device=device) for _ in plan.num_tokens]
        return LowLatencyHandle(self, plan, layouts, self.backend.current_stream(), forward)

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
        if self.masks is not None:
            self.masks.reset()
        self.dispatches.give_up()
        self.combines.give_up()

    def plan(
        self,
        x: Sequence[torch.Tensor],
        topk: int,
        index_bytes: int,
        weights: Sequence[torch.Tensor] | None,
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
            hidden=hidden,
            dtype=dtype,
            float8=float8,
            offsets=self.ranks.offsets(topk),
            call=self.ranks.group.dispatch(row, self._members(num_tokens, rows, members), DISPATCH_GIVEN),
        )

    def launch_dispatch(
        self,
        handle: LowLatencyHandle,
        given: DispatchArguments,
        x: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | None,
        *,
        zero: bool,
        pending: list[Pending] | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Dispatches x [T, H] and weights [T, K] to [*rows, H] and [*rows], and to scales, if there are any.

        zero: whether rows without a token are zeros. pending: receives the call; None: it is received immediately.
        """
        self.dispatches.check()
        backend, counters, parts, members = self.backend, given.counters or {}, [], tuple[Any, ...]()
        for i in range(len(handle.layouts)):
            tensors = (x[i], given.ids[i], at(weights, i), at(given.scales, i))
            counts = (at(counters.get("recv_rows"), i), at(counters.get("recv_wait_ns"), i))
            part, of_rank = self.dispatch_arguments(
                backend, given.plan, handle.layouts[i], *tensors, *counts, self._required(handle, i), zero
            )
            parts.append(part)
            members += of_rank
        handle.call = self.send(self.dispatches, backend, given.plan.call, backend.current_stream(), members, pending)
        out, out_weights, out_scales = ([t for t in of if t is not None] for of in zip(*parts, strict=True))
        return out, out_weights, out_scales

    def dispatch_arguments(
        self,
        backend: Backend,
        plan: DispatchPlan,
        layout: torch.Tensor,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None = None,
        recv_rows: torch.Tensor | None = None,
        recv_wait_ns: torch.Tensor | None = None,
        required: torch.Tensor | None = None,
        zero: bool = False,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None], tuple[Any, ...]]:
        """Allocates one rank's rows, weights and scales, and returns them with the launch arguments."""
        out = backend.new_output(plan.out_shape, plan.dtype)
        out_weights = out_scales = None
        if weights is not None:
            out_weights = backend.new_output(plan.shape, weights.dtype)
        if plan.float8 is not None:
            out_scales = plan.float8.new_scales(plan.shape, plan.hidden, backend, zero=zero)
        if zero:
            fill_with_zeros(out, out_weights)
        call = layout.data_ptr() + 4 * plan.offsets["dispatch_call"]
        given = (layout, call, ids, x, scales, weights, out, out_scales, out_weights, recv_rows, recv_wait_ns, required)
        return (out, out_weights, out_scales), given

    def plan_combine(
        self,
        handle: LowLatencyHandle,
        x: torch.Tensor,
        values: torch.Tensor | None,
        *,
        sum_at_expert: bool,
        renormalize: bool,
    ) -> CombinePlan:
        """Returns the plan of a combine with tensors like these of one rank, for handles of the same dispatch plan."""
        plan = handle.plan
        row = row_format(plan.topk, x.shape[-1], x.dtype, None, 0 if values is None else values.element_size())
        members: Members = {"sum_at_expert": sum_at_expert, "renormalize": renormalize}
        of_ranks = self._members(plan.num_tokens, plan.rows, members)
        return CombinePlan(sum_at_expert, self.ranks.group.combine(row, of_ranks, COMBINE_GIVEN))

    def _members(self, num_tokens: Sequence[int], rows: int, members: Members) -> list[Members]:
        """Returns the kernel arguments of each rank: `members`, its tokens and rows, and its masks."""
        return [
            members | {"num_tokens": tokens, "max_rows": rows} | (self.masks.members(i) if self.masks else {})
            for i, tokens in enumerate(num_tokens)
        ]

    def launch_combine(
        self,
        handle: LowLatencyHandle,
        given: CombineArguments,
        x: Sequence[torch.Tensor],
        *,
        values: Sequence[torch.Tensor] | None = None,
        weights: Sequence[torch.Tensor] | None = None,
        pending: list[Pending] | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Combines x [*rows, H] to sums [T, H], and returns values [*rows] as [T, K].

        weights: weights of rows if the plan sums at the expert, else of tokens.
        """
        handle.check()
        handle.check_received()
        self.combines.check()
        backend, plan, parts, members = self.backend, given.plan, [], tuple[Any, ...]()
        backend.keep_for_launch(handle.layouts, handle.made_on)
        wait_ns, has_hook = (given.counters or {}).get("recv_wait_ns"), pending is not None
        for i in range(len(handle.layouts)):
            tensors = (x[i], at(values, i), at(weights, i), has_hook, at(given.out, i), at(wait_ns, i))
            part, of_rank = self.combine_arguments(backend, plan, handle, i, *tensors, self._required(handle, i))
            parts.append(part)
            members += of_rank
        self.send(self.combines, backend, plan.call, backend.current_stream(), members, pending)
        return [y for y, _ in parts], [y_values for _, y_values in parts if y_values is not None]

    def combine_arguments(
        self,
        backend: Backend,
        plan: CombinePlan,
        handle: LowLatencyHandle,
        rank: int,
        x: torch.Tensor,
        values: torch.Tensor | None,
        weights: torch.Tensor | None,
        has_hook: bool,
        out: torch.Tensor | None = None,
        recv_wait_ns: torch.Tensor | None = None,
        required: torch.Tensor | None = None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], tuple[Any, ...]]:
        """Allocates one rank's sums and values, and returns them with the launch arguments."""
        tokens, layout = handle.plan.num_tokens[rank], handle.layouts[rank]
        y = backend.new_output((tokens, x.shape[-1]), x.dtype) if out is None else out
        y_values = None
        if values is not None:
            y_values = torch.empty(tokens, handle.plan.topk, dtype=values.dtype, device=x.device)
        if has_hook:  # two combines of the same dispatch may be in flight
            call: Any = torch.empty(1, dtype=torch.int64, device=x.device)
        else:
            call = layout.data_ptr() + 4 * handle.plan.offsets["combine_call"]
        of_rows, of_tokens = (weights, None) if plan.sum_at_expert else (None, weights)
        return (y, y_values), (layout, call, x, values, of_rows, of_tokens, y, y_values, recv_wait_ns, required)

    def _required(self, handle: LowLatencyHandle, i: int) -> torch.Tensor | None:
        """Returns the ranks that must not have been masked since the forward pass; None without masks."""
        if self.masks is None or handle.forward is None:
            return None
        self.backend.keep_for_launch(handle.forward.layouts, handle.forward.made_on)
        return handle.forward.active(i)

    def dispatch_by_plan(
        self,
        backend: Backend,
        plan: DispatchPlan,
        x: Any,
        ids: Any,
        weights: Any,
        pending: list[Pending] | None,
    ) -> tuple[LowLatencyHandle, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
        """Dispatches like `launch_dispatch`, for one rank, without counters and masks. Returns handle, rows, their
        weights and scales."""
        stream = backend.current_stream()
        layout = torch.empty(plan.offsets["size"], dtype=torch.int32, device=self.group.device)
        handle = LowLatencyHandle(self, plan, [layout], stream)
        parts, given = self.dispatch_arguments(backend, plan, layout, x, ids, weights)
        handle.call = self.send(self.dispatches, backend, plan.call, stream, given, pending)
        return handle, parts

    def combine_by_plan(
        self,
        backend: Backend,
        plan: CombinePlan,
        handle: LowLatencyHandle,
        x: Any,
        weights: Any,
        pending: list[Pending] | None,
    ) -> torch.Tensor:
        """Combines like `launch_combine`, with the restrictions of `dispatch_by_plan`. Returns the sums."""
        if handle.resets != self.resets:
            handle.check()
        if handle.call is not RECEIVED:
            handle.check_received()
        stream = backend.current_stream()
        if handle.made_on != stream:
            backend.keep_for_launch(handle.layouts, handle.made_on)
        parts, given = self.combine_arguments(backend, plan, handle, 0, x, None, weights, pending is not None)
        self.send(self.combines, backend, plan.call, stream, given, pending)
        return parts[0]

    def send(
        self,
        in_flight: InFlight,
        backend: Backend,
        call: _C.Call,
        stream: int,
        given: tuple[Any, ...],
        pending: list[Pending] | None,
    ) -> Call:
        """Launches a call."""
        ranks = self.ranks
        sent: Call = RECEIVED
        if pending is not None:
            sent = Pending(self, call, given, stream)
            backend.launch(ranks.group, call, SEND, stream, given, ranks)
            pending.append(sent)
        else:
            ranks.launch(backend, call, stream, given)
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

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
from megatron_ep.buffer.low_latency import RECEIVE, SEND, SEND_AND_RECEIVE, Call, InFlight, LowLatencyRanks
from megatron_ep.buffer.low_latency_mask import Masks
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.low_latency.handle import LowLatencyHandle, RankPart
from megatron_ep.low_latency.plans import CombineArguments, CombinePlan, Counters, DispatchArguments, DispatchPlan
from megatron_ep.low_latency.rows import Float8, aligned_column, new_tensor, row_format

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

    tensors, stream: tensors of the call, and the stream on which they were created.
    """

    def __init__(
        self,
        calls: LowLatencyCalls,
        call: _C.Call,
        given: Sequence[int],
        tensors: Sequence[torch.Tensor],
        stream: int,
    ):
        # A received call keeps no references, because `calls` keeps the call: a reference cycle would be freed by the
        # collector at any time, for example while a CUDA graph is captured.
        self._rest: tuple[Any, ...] | None = (calls, call, given, tensors, stream)
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
        calls, call, given, tensors, made_on = self._rest
        with calls.group.abort_peers_on_error():
            calls.group.check_usable()
            calls.backend.keep_for_launch(tensors, made_on)
            calls.ranks.launch(call, RECEIVE, *given)
            self._rest = None
            calls.log_masks()
            calls.group.raise_if_aborted()

    def give_up(self) -> None:
        if self._rest is not None:
            self._rest, self._given_up = None, True


class Received:
    """A call whose halves were launched together."""

    received = was_received = True

    def give_up(self) -> None: ...


RECEIVED = Received()


class LowLatencyCalls:
    """Launches low-latency calls with checked arguments on the ranks of this process."""

    def __init__(self, group: RankGroup, heap: _C.LowLatencyHeap, ranks: LowLatencyRanks, masks: Masks | None):
        self.group = group
        self.heap = heap
        self.masks = masks
        self.ranks = ranks
        self._offsets: dict[int, dict[str, int]] = {}
        self.resets = 0
        self.in_flight = {"dispatch": InFlight("dispatch"), "combine": InFlight("combine")}
        self.backend.attach(self)

    @property
    def plans_calls(self) -> bool:
        """Whether `dispatch_by_plan` and `combine_by_plan` may launch: without masks, in a process with one rank."""
        return self.masks is None and not self.group.takes_lists

    def offsets(self, topk: int) -> dict[str, int]:
        if topk not in self._offsets:
            self._offsets[topk] = self.heap.layout(topk=topk, warps=self.ranks.warps)
        return self._offsets[topk]

    def new_handle(self, plan: DispatchPlan, forward: LowLatencyHandle | None = None) -> LowLatencyHandle:
        """Returns a handle for one dispatch."""
        size, device, made_on = plan.offsets["size"], self.group.device, self.backend.current_stream()
        ranks = []
        for num_tokens in plan.num_tokens:
            layout = torch.empty(size, dtype=torch.int32, device=device)
            ranks.append(RankPart(num_tokens, layout, plan.rows, made_on))
        return LowLatencyHandle(self, plan, ranks, forward=forward)

    def check_received(self) -> None:
        """Raises ValueError if a call has not been received."""
        for calls in self.in_flight.values():
            calls.check_received()

    def log_masks(self) -> None:
        """Logs a warning for each rank that calls have masked, on a GPU possibly some calls ago."""
        if self.masks is not None:
            self.masks.log_news()

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
        for calls in self.in_flight.values():
            calls.give_up()

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
            hidden=hidden,
            dtype=dtype,
            float8=float8,
            offsets=self.offsets(topk),
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
        backend, plan = self.backend, given.plan
        out: list[torch.Tensor] = []
        out_weights: list[torch.Tensor] = []
        out_scales: list[torch.Tensor] = []
        counters, addresses = given.counters or {}, list[int]()
        for i, rank in enumerate(handle.ranks):
            out.append(new_tensor((*plan.shape, plan.hidden), plan.dtype, backend, zero=zero))
            if weights is not None:
                out_weights.append(new_tensor(plan.shape, weights[i].dtype, backend, zero=zero))
            if plan.float8 is not None:
                out_scales.append(plan.float8.new_scales(plan.shape, plan.hidden, backend, zero=zero))
            layout = rank.layout.data_ptr()
            addresses += (
                layout,
                layout + 4 * plan.offsets["dispatch_call"],
                given.ids[i].data_ptr(),
                x[i].data_ptr(),
                _address(given.scales, i),
                _address(weights, i),
                out[i].data_ptr(),
                _address(out_scales, i),
                _address(out_weights, i),
                _address(counters.get("recv_rows"), i),
                _address(counters.get("recv_wait_ns"), i),
                self._required(handle, i),
            )
        used = (x, given.ids, weights, given.scales, out, out_weights, out_scales)
        handle.call = self._send("dispatch", plan.call, addresses, handle, used, given.counters, pending)
        return out, out_weights, out_scales

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
        backend, plan, out = self.backend, given.plan, given.out
        y: list[torch.Tensor] = []
        y_values: list[torch.Tensor] = []
        calls: list[torch.Tensor] = []
        wait_ns, addresses = (given.counters or {}).get("recv_wait_ns"), list[int]()
        for i, rank in enumerate(handle.ranks):
            backend.keep_for_launch((rank.layout,), rank.made_on)
            shape = (rank.num_tokens, x[i].shape[-1])
            y.append(backend.new_output(shape, x[i].dtype) if out is None else out[i])
            if values is not None:
                y_values.append(torch.empty(rank.num_tokens, handle.topk, dtype=values[i].dtype, device=x[i].device))
            layout = rank.layout.data_ptr()
            if pending is None:
                call = layout + 4 * handle.plan.offsets["combine_call"]
            else:  # two combines of the same dispatch may be in flight
                calls.append(torch.empty(1, dtype=torch.int64, device=self.group.device))
                call = calls[i].data_ptr()
            factors = _address(weights, i)
            addresses += (
                layout,
                call,
                x[i].data_ptr(),
                _address(values, i),
                factors if plan.sum_at_expert else 0,
                0 if plan.sum_at_expert else factors,
                y[i].data_ptr(),
                _address(y_values, i),
                _address(wait_ns, i),
                self._required(handle, i),
            )
        used = (x, values, weights, y, y_values, calls)
        self._send("combine", plan.call, addresses, handle, used, given.counters, pending)
        return y, y_values

    def _required(self, handle: LowLatencyHandle, i: int) -> int:
        """Returns the address of the ranks that must not have been masked since the forward pass; 0 without masks."""
        if self.masks is None or handle.forward is None:
            return 0
        forward = handle.forward.ranks[i]
        self.backend.keep_for_launch([forward.layout], forward.made_on)
        return handle.active(forward).data_ptr()

    def dispatch_by_plan(
        self, backend: Backend, plan: DispatchPlan, x: Any, topk_idx: Any, weights: Any
    ) -> tuple[LowLatencyHandle, torch.Tensor, torch.Tensor | None]:
        """Dispatches like `launch_dispatch`, for one rank, received immediately, without float8, counters and masks.
        Returns handle, rows and their weights."""
        out = backend.new_output((*plan.shape, plan.hidden), plan.dtype)
        probs = None if weights is None else backend.new_output(plan.shape, weights.dtype)
        layout = torch.empty(plan.offsets["size"], dtype=torch.int32, device=self.group.device)
        [num_tokens], at = plan.num_tokens, layout.data_ptr()
        rank = RankPart(num_tokens, layout, plan.rows, backend.current_stream())
        self.ranks.launch(
            plan.call,
            SEND_AND_RECEIVE,
            at,
            at + 4 * plan.offsets["dispatch_call"],
            topk_idx.data_ptr(),
            x.data_ptr(),
            0,
            0 if weights is None else weights.data_ptr(),
            out.data_ptr(),
            0,
            0 if probs is None else probs.data_ptr(),
            0,
            0,
            0,
        )
        if backend.aborted() is not None:
            self.group.raise_if_aborted()
        self.in_flight["dispatch"].add(RECEIVED)
        return LowLatencyHandle(self, plan, [rank], RECEIVED, resets=self.resets), out, probs

    def combine_by_plan(
        self, backend: Backend, plan: CombinePlan, handle: LowLatencyHandle, x: Any, weights: Any
    ) -> torch.Tensor:
        """Combines like `launch_combine`, with the restrictions of `dispatch_by_plan`. Returns the sums."""
        [rank] = handle.ranks
        handle.check()
        handle.check_received()
        if rank.made_on != backend.current_stream():
            backend.keep_for_launch((rank.layout,), rank.made_on)
        y = backend.new_output((rank.num_tokens, x.shape[-1]), x.dtype)
        at, factors = rank.layout.data_ptr(), 0 if weights is None else weights.data_ptr()
        self.ranks.launch(
            plan.call,
            SEND_AND_RECEIVE,
            at,
            at + 4 * handle.plan.offsets["combine_call"],
            x.data_ptr(),
            0,
            factors if plan.sum_at_expert else 0,
            0 if plan.sum_at_expert else factors,
            y.data_ptr(),
            0,
            0,
            0,
        )
        if backend.aborted() is not None:
            self.group.raise_if_aborted()
        self.in_flight["combine"].add(RECEIVED)
        return y

    def _send(
        self,
        kind: str,
        launch: _C.Call,
        given: Sequence[int],
        handle: LowLatencyHandle,
        tensors: Sequence[Sequence[torch.Tensor] | None],
        counters: Counters | None,
        pending: list[Pending] | None,
    ) -> Call:
        """Launches a call. tensors: tensors that it uses, in addition to those of the handle and the counters."""
        in_flight = self.in_flight[kind]
        in_flight.check()
        call: Call = RECEIVED
        if pending is None:
            self.ranks.launch(launch, SEND_AND_RECEIVE, *given)
        else:
            used = [rank.layout for rank in handle.ranks]
            for part in (*tensors, *(counters or {}).values()):
                used += part or ()
            call = Pending(self, launch, given, used, self.backend.current_stream())
            self.ranks.launch(launch, SEND, *given)
            pending.append(call)
        self.log_masks()
        self.group.raise_if_aborted()
        in_flight.add(call)
        return call


def _address(tensors: Sequence[torch.Tensor] | None, i: int) -> int:
    return tensors[i].data_ptr() if tensors else 0

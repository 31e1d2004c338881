"""The halves of low-latency calls as launches.

A call's sending half is launched when it is made; its receiving half with it, or by `Pending.receive` when the caller
calls the hook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch

from megatron_ep import _C
from megatron_ep.backends.interface import Backend
from megatron_ep.backends.low_latency import InFlight, LowLatencyRanks
from megatron_ep.backends.low_latency_mask import Masks
from megatron_ep.low_latency.handle import LowLatencyHandle, RankPart
from megatron_ep.low_latency.rows import Float8, aligned_column, new_tensor, row_format
from megatron_ep.normal.rank_group import PAYLOAD_TYPES, RankGroup

Counters = Mapping[str, Sequence[torch.Tensor]]  # the callers', one a rank: recv_rows, recv_wait_ns


class Pending:
    """A call whose receiving half can be launched."""

    def __init__(self, calls: LowLatencyCalls, launch: Any, tensors: Sequence[Any], *, received: bool):
        # A call that has been received keeps nothing: `calls` remembers it, and a caller that has both in a circle has
        # them freed at any moment, while a CUDA graph is captured for one.
        self._rest = None if received else (calls, launch, tensors, calls.backend.current_stream())

    @property
    def received(self) -> bool:
        return self._rest is None

    def receive(self) -> None:
        """Launches the receiving half. Raises ValueError the second time."""
        if self._rest is None:
            raise ValueError("the hook of a low-latency call was called twice, must be called once")
        calls, launch, tensors, made_on = self._rest
        with calls.group.abort_peers_on_error():
            calls.group.check_usable()
            calls.backend.keep_for_launch(tensors, made_on)
            launch(_C.LowLatencyLaunches.receive)
            self._rest = None
            calls.log_masks()
            calls.group.raise_if_aborted()


class LowLatencyCalls:
    """Launches low-latency calls on a buffer's ranks of this process. Arguments were checked before."""

    def __init__(self, group: RankGroup, heap: _C.LowLatencyHeap, ranks: LowLatencyRanks, masks: Masks | None):
        self.group = group
        self.heap = heap
        self.masks = masks
        self.ranks = ranks
        self._offsets: dict[int, dict[str, int]] = {}
        self.handles: WeakSet[LowLatencyHandle] = WeakSet()
        self.in_flight = {"dispatch": InFlight("dispatch"), "combine": InFlight("combine")}
        self.backend.attach(self)

    def offsets(self, topk: int) -> dict[str, int]:
        if topk not in self._offsets:
            self._offsets[topk] = self.heap.layout(topk=topk, warps=self.ranks.warps)
        return self._offsets[topk]

    def new_part(self, topk: int, num_tokens: int, rows: int) -> RankPart:
        layout = torch.empty(self.offsets(topk)["size"], dtype=torch.int32, device=self.group.device)
        return RankPart(num_tokens, layout, rows, self.backend.current_stream())

    def check_received(self) -> None:
        """Raises ValueError if a call is under way."""
        for calls in self.in_flight.values():
            calls.check_received()

    def log_masks(self) -> None:
        """A warning for each rank that calls have masked, which on a GPU may be some calls ago."""
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

    def let_go(self) -> None:
        self.ranks.let_go()

    def reset(self) -> None:
        for handle in self.handles:
            handle.note_reset()
        self.ranks.reset()
        if self.masks is not None:
            self.masks.reset()
        for calls in self.in_flight.values():
            calls.clear()

    def launch_dispatch(
        self,
        handle: LowLatencyHandle,
        ids: Sequence[torch.Tensor],
        x: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor] | None,
        fp8: Float8 | None = None,
        counters: Counters | None = None,
        *,
        zero: bool,
        at_once: bool = False,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], Pending]:
        """x [T, H] and weights [T, K] to [*rows, H] and [*rows], and to scales: no tensors where there are none.

        rows: as `shape_of`.
        zero: whether rows without a token hold zeros. at_once: whether the receiving half is launched, too.
        """
        out: list[torch.Tensor] = []
        out_weights: list[torch.Tensor] = []
        out_scales: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        tensors = []
        hidden, backend = x[0].shape[1], self.backend
        rows = self.shape_of(handle.ranks[0], handle)
        for i, rank in enumerate(handle.ranks):
            t, call = self._tensors(handle, i)
            out.append(new_tensor((*rows, hidden), torch.float8_e4m3fn if fp8 else x[i].dtype, backend, zero=zero))
            t.topk_idx, t.x, t.out = ids[i].data_ptr(), x[i].data_ptr(), out[i].data_ptr()
            kept += [rank.layout, call, ids[i], x[i], out[i]]
            if weights is not None:
                out_weights.append(new_tensor(rows, weights[i].dtype, backend, zero=zero))
                t.weights, t.out_weights = weights[i].data_ptr(), out_weights[i].data_ptr()
                kept += [weights[i], out_weights[i]]
            if fp8 is not None:
                out_scales.append(fp8.new_scales(rows, hidden, backend, zero=zero))
                t.out_scales = out_scales[i].data_ptr()
                kept.append(out_scales[i])
                if fp8.scales is not None:
                    t.scales = fp8.scales[i].data_ptr()
                    kept.append(fp8.scales[i])
            tensors.append(t)
        kept += self._count(counters, tensors)
        options = self._options()
        options.index_bytes = ids[0].element_size()
        options.expert_alignment = handle.expert_alignment
        options.expert_rows = rows[-1] if handle.masked else 0
        if fp8 is not None:
            options.quantize = getattr(_C.ScaleFormat, fp8.scale_format or "none")
            options.scale_column = aligned_column(rows[-1]) if fp8.column else 0
        row = self.format_of(handle.topk, x[0], weights, fp8)

        def launch(launches: _C.LowLatencyLaunches) -> None:
            self.ranks.enqueue_dispatch(tensors, row, options, launches=launches)

        handle.call = self._send("dispatch", launch, kept, at_once)
        return out, out_weights, out_scales, handle.call

    def launch_combine(
        self,
        handle: LowLatencyHandle,
        x: Sequence[torch.Tensor],
        *,
        values: Sequence[torch.Tensor] | None = None,
        row_weights: Sequence[torch.Tensor] | None = None,
        token_weights: Sequence[torch.Tensor] | None = None,
        sum_at_expert: bool = False,
        renormalize: bool = False,
        out: Sequence[torch.Tensor] | None = None,
        counters: Counters | None = None,
        at_once: bool = False,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, Pending]:
        """x [*rows, H] and values [*rows] to sums [T, H] and single values [T, K]."""
        handle.check()
        handle.check_received()
        y, y_values, tensors = [], [], []
        kept: list[torch.Tensor] = []
        for i, rank in enumerate(handle.ranks):
            t, call = self._tensors(handle, i)
            shape = (rank.num_tokens, x[i].shape[-1])
            y.append(self.backend.new_output(shape, x[i].dtype) if out is None else out[i])
            t.x, t.out = x[i].data_ptr(), y[i].data_ptr()
            kept += [rank.layout, call, x[i], y[i]]
            if values is not None:
                y_values.append(torch.empty(rank.num_tokens, handle.topk, dtype=values[i].dtype, device=x[i].device))
                t.weights, t.out_weights = values[i].data_ptr(), y_values[i].data_ptr()
                kept += [values[i], y_values[i]]
            for name, weights in (("row_weights", row_weights), ("token_weights", token_weights)):
                if weights is not None:
                    setattr(t, name, weights[i].data_ptr())
                    kept.append(weights[i])
            tensors.append(t)
        kept += self._count(counters, tensors)
        options = self._options()
        options.sum_at_expert, options.renormalize = sum_at_expert, renormalize
        row, dtype = self.format_of(handle.topk, x[0], values), PAYLOAD_TYPES[x[0].dtype]

        def launch(launches: _C.LowLatencyLaunches) -> None:
            self.ranks.enqueue_combine(tensors, row, options, launches=launches, dtype=dtype)

        return y, y_values if values is not None else None, self._send("combine", launch, kept, at_once)

    @staticmethod
    def _count(counters: Counters | None, of_ranks: Sequence[Any]) -> list[torch.Tensor]:
        kept = []
        for name, tensors in (counters or {}).items():
            for t, tensor in zip(of_ranks, tensors, strict=True):
                setattr(t, name, tensor.data_ptr())
                kept.append(tensor)
        return kept

    def shape_of(self, rank: RankPart, handle: LowLatencyHandle) -> tuple[int, ...]:
        """Of a rank's rows."""
        local_experts = self.group.num_local_experts
        return (local_experts, rank.rows // local_experts) if handle.masked else (rank.rows,)

    def format_of(
        self, topk: int, x: torch.Tensor, weights: Sequence[torch.Tensor] | None, fp8: Float8 | None = None
    ) -> _C.RowFormat:
        """How rows of these tensors travel."""
        return row_format(
            topk,
            x.shape[-1],
            torch.float8_e4m3fn if fp8 else x.dtype,
            fp8.scale_dtype if fp8 else None,
            weight_bytes=weights[0].element_size() if weights is not None else 0,
        )

    def _options(self) -> Any:
        options = _C.LowLatencyOptions()
        if self.masks is not None:
            self.masks.fill_options(options)
        return options

    def _tensors(self, handle: LowLatencyHandle, i: int) -> tuple[Any, torch.Tensor]:
        rank = handle.ranks[i]
        self.backend.keep_for_launch([rank.layout], rank.made_on)
        call = torch.empty(1, dtype=torch.int64, device=self.group.device)
        t = _C.LowLatencyTensors()
        t.layout, t.call = rank.layout.data_ptr(), call.data_ptr()
        t.num_tokens, t.max_rows = rank.num_tokens, rank.rows
        if self.masks is not None:
            self.masks.fill(t, i)
            if handle.forward is not None:
                forward = handle.forward.ranks[i]
                self.backend.keep_for_launch([forward.layout], forward.made_on)
                t.required = handle.active(forward).data_ptr()
        return t, call

    def _send(self, kind: str, launch: Any, tensors: list[torch.Tensor], at_once: bool) -> Pending:
        self.in_flight[kind].check()
        call = Pending(self, launch, tensors, received=at_once)
        launch(_C.LowLatencyLaunches.both if at_once else _C.LowLatencyLaunches.send)
        self.log_masks()
        self.group.raise_if_aborted()
        self.in_flight[kind].add(call)
        return call

"""The CUDA backend's side of a buffer: launches on torch's streams.

A launch goes to torch's current stream, as any operator does, and returns at once. What goes wrong on the GPU
afterwards is raised by the next call, or by `synchronize`. The host waits in one place only: for the counts of a
dispatch whose number of rows is not given.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_ep import _C
from megatron_ep.config import Config, Topology
from megatron_ep.handle import Handle, RankHandle, most_arrivals

if TYPE_CHECKING:
    from megatron_ep.rank_group import RankGroup

# What one rank needs to fill its NVLink: 450 GB/s each way (H100 and H200 data sheets) at about 20 GB/s of rows an SM.
DEFAULT_SMS = 24
# Where csrc/core/layout.h keeps the totals of a layout.
RECEIVED_ROWS, EXPERT_ROWS, RAIL_ROWS, BAD_TOKEN = range(4)
SPIN_S = 500e-6  # the counts are usually there by then
POLL_S = 50e-6


def check_device(device: str | torch.device) -> torch.device:
    """The device with its index. Raises ValueError unless it is the CPU or a GPU that this build can use."""
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return wanted
    if wanted.type != "cuda":
        raise ValueError(f"device is {device!r}, must be 'cpu' or 'cuda'")
    if not hasattr(_C, "CudaGroup"):
        raise ValueError(f"device is {device!r}, but megatron_ep was built without the CUDA backend (it needs nvcc)")
    if not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch {torch.__version__} finds no GPU")
    if wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, must be one of the {torch.cuda.device_count()} GPUs that torch finds")
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


def num_sms(config: Config, device: torch.device, local_ranks: int) -> int:
    """SMs that a launch uses for each of the ranks that this process has on its GPU."""
    if config.num_sms is not None:
        return config.num_sms
    return max(1, min(DEFAULT_SMS, torch.cuda.get_device_properties(device).multi_processor_count // local_ranks))


def num_channels(topology: Topology, config: Config, sms: int, local_ranks: int) -> int:
    """The channels of a buffer on a GPU."""
    if config.channels is not None:
        return config.channels
    nodes, ranks_per_node = topology.nodes, topology.ranks_per_node
    return _C.cuda_channels(nodes=nodes, ranks_per_node=ranks_per_node, num_sms=sms, local_ranks=local_ranks)


class CudaRanks:
    """The ranks of a buffer that live in this process, on one GPU, with the methods of the host's group."""

    def __init__(self, group: Any, device: torch.device, nvl_ring_bytes: int):
        self._group = group
        self._nvl_ring_bytes = nvl_ring_bytes
        self._device = device
        self._busy = threading.Lock()
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def notify(self, tensors: list[Any], **settings: int) -> None:
        self._launch(lambda stream: self._group.notify(tensors, **settings, stream=stream))

    def dispatch(self, tensors: list[Any], row: Any, *, nvl_batch: int, **settings: int) -> None:
        batch = min(nvl_batch, self._batch(row))
        self._launch(lambda stream: self._group.dispatch(tensors, row, nvl_batch=batch, **settings, stream=stream))

    def combine(self, tensors: list[Any], row: Any, *, nvl_batch: int, **settings: int) -> None:
        batch = min(nvl_batch, self._batch(row))
        self._launch(lambda stream: self._group.combine(tensors, row, nvl_batch=batch, **settings, stream=stream))

    def _batch(self, row: Any) -> int:
        """Rows after which a ring's other end hears of them: half a ring, so that both ends can work at once."""
        slots = self._nvl_ring_bytes // row.slot_bytes
        return 1 << max(0, slots.bit_length() - 2)

    def aborted(self) -> tuple[str, int] | None:
        return self._group.aborted()

    def incidents(self) -> list[dict[str, Any]]:
        return self._group.incidents()

    def abort(self, *, interrupted: bool, failed: bool) -> None:
        self._group.abort(interrupted=interrupted, failed=failed)

    def drain(self) -> None:
        """Until all launches are done and what they sent is there. Raises RuntimeError when that takes too long."""
        self.synchronize()
        self._group.drain()

    def reset(self) -> None:
        self._group.reset()

    @property
    def seconds(self) -> float:
        """Seconds that launches took on the GPU, as far as they have finished; captured graphs are not counted."""
        while self._timed and self._timed[0][1].query():
            start, end = self._timed.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
        return self._seconds

    def wait(self, event: torch.cuda.Event) -> None:
        """Until the event is reached; Ctrl-C ends the waits on the GPU too."""
        started = time.perf_counter()
        try:
            while not event.query():
                if time.perf_counter() - started > SPIN_S:
                    time.sleep(POLL_S)
        except BaseException:
            self._group.abort(interrupted=True, failed=False)
            raise

    def synchronize(self) -> None:
        """Until all launches are done, those of captured graphs too."""
        if self._last is not None:
            self.wait(self._last[1])
        torch.cuda.synchronize(self._device)

    def _launch(self, launch: Callable[[int], None]) -> None:
        stream = torch.cuda.current_stream(self._device)
        if torch.cuda.is_current_stream_capturing():
            launch(stream.cuda_stream)  # a graph orders what it holds itself, and torch synchronizes before it captures
            return
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the buffer is in use by another thread")
        try:
            if self._last is not None and self._last[0] != stream:
                stream.wait_event(self._last[1])  # two launches at once would share the rings
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            launch(stream.cuda_stream)
            end.record(stream)
            self._last = stream, end
        finally:
            self._busy.release()
        self._timed.append((start, end))
        if len(self._timed) > 1000:
            _ = self.seconds


def make_handle(
    group: RankGroup,
    topk_idx: Sequence[torch.Tensor],
    expert_alignment: int,
    expert_capacity: int,
    max_recv_tokens: int | None,
) -> Handle:
    """Exchanges counts. With max_recv_tokens the host does not wait for them: tables then have room for the most."""
    topk, local_experts = topk_idx[0].shape[1], group.num_local_experts
    layouts, tensors = [], []
    for idx in topk_idx:
        layout = torch.empty(group._heap.layout_size(idx.shape[0], topk), dtype=torch.int32, device=group.device)
        t = _C.RankTensors()
        t.layout, t.num_tokens, t.topk_idx = layout.data_ptr(), idx.shape[0], idx.data_ptr()
        tensors.append(t)
        layouts.append(layout)
    group._live_group().notify(
        tensors,
        topk=topk,
        index_bytes=topk_idx[0].element_size(),
        expert_alignment=expert_alignment,
        expert_capacity=expert_capacity,
    )
    starts = [group._heap.expert_start_offset(idx.shape[0], topk) for idx in topk_idx]
    ends = [layout[start : start + local_experts + 1] for layout, start in zip(layouts, starts, strict=True)]
    if max_recv_tokens is not None:
        other_nodes = group.topology.nodes - 1
        ranks = [
            _rank_handle(
                idx,
                layout,
                rows=max_recv_tokens,
                ends=end,
                received=most_arrivals(max_recv_tokens, expert_capacity, idx.shape[0], group.topology.world_size),
                rail=other_nodes * max(idx.shape[0], max_recv_tokens),
            )
            for idx, layout, end in zip(topk_idx, layouts, ends, strict=True)
        ]
        return Handle(group, topk, ranks)
    totals = _to_host(group, [layout[: BAD_TOKEN + 1] for layout in layouts] + ends)
    totals, host_ends = totals[: len(layouts)], totals[len(layouts) :]
    for rank, idx, total in zip(group.ranks, topk_idx, totals, strict=True):
        if total[BAD_TOKEN]:
            group._refuse_ids(rank, idx, int(total[BAD_TOKEN]) - 1)
    group._raise_if_aborted()
    ranks = [
        _rank_handle(
            idx,
            layout,
            rows=int(total[EXPERT_ROWS]),
            ends=end,
            received=int(total[RECEIVED_ROWS]),
            rail=int(total[RAIL_ROWS]),
        )
        for idx, layout, total, end in zip(topk_idx, layouts, totals, host_ends, strict=True)
    ]
    return Handle(group, topk, ranks)


def _rank_handle(
    idx: torch.Tensor, layout: torch.Tensor, *, rows: int, ends: torch.Tensor, received: int, rail: int
) -> RankHandle:
    topk = idx.shape[1]
    return RankHandle(
        num_tokens=idx.shape[0],
        layout=layout,
        rows=rows,
        tokens_per_expert=ends.to(torch.int64).diff(),
        positions=torch.empty(received, topk, dtype=torch.int32, device=idx.device),
        rail_experts=torch.empty(rail, topk, dtype=torch.int32, device=idx.device),
    )


def _to_host(group: RankGroup, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in pinned memory, once they are there."""
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(group.device))
    group._live_group().wait(event)
    return copies

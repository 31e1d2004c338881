"""The CUDA backend: launches on torch's streams.

A launch goes to torch's current stream, as any operator does, and returns at once. What goes wrong on the GPU
afterwards is raised by the next call, or by `synchronize`. The host waits in one place only: for the counts of a
dispatch whose number of rows is not given.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.backends.interface import Counts, Resettable
from megatron_ep.config import Config, Topology

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


class CudaBackend:
    """See `interface.Backend`: the ranks of this process are on one GPU.

    group: the compiled group over one of the fabrics.
    """

    def __init__(self, group: Any, heap: Any, device: torch.device):
        self._group = group
        self._heap = heap
        self._device = device
        self._busy = threading.Lock()
        self._parts: weakref.WeakSet[Resettable] = weakref.WeakSet()
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def notify(
        self, tensors: Sequence[Any], layouts: Sequence[torch.Tensor], *, wait: bool, topk: int, **settings: int
    ) -> list[Counts] | None:
        self._launch(lambda stream: self._group.notify(list(tensors), topk=topk, **settings, stream=stream))
        if not wait:
            return None
        starts = [self._heap.expert_start_offset(t.num_tokens, topk) for t in tensors]
        size = self._heap.local_experts + 1
        ends = [layout[start : start + size] for layout, start in zip(layouts, starts, strict=True)]
        copies = self._to_host([layout[: BAD_TOKEN + 1] for layout in layouts] + ends)
        return [
            Counts(
                rows=int(total[EXPERT_ROWS]),
                received=int(total[RECEIVED_ROWS]),
                rail=int(total[RAIL_ROWS]),
                bad_token=int(total[BAD_TOKEN]) - 1,
                ends=end,
            )
            for total, end in zip(copies[: len(layouts)], copies[len(layouts) :], strict=True)
        ]

    def dispatch(self, tensors: Sequence[Any], row: Any, *, nvl_batch: int, rdma_chunk: int) -> None:
        batch = min(nvl_batch, self._batch(row))
        self._launch(
            lambda stream: self._group.dispatch(
                list(tensors), row, nvl_batch=batch, rdma_chunk=rdma_chunk, stream=stream
            )
        )

    def combine(self, tensors: Sequence[Any], row: Any, *, nvl_batch: int, rdma_chunk: int, dtype: int) -> None:
        batch = min(nvl_batch, self._batch(row))
        self._launch(
            lambda stream: self._group.combine(
                list(tensors), row, nvl_batch=batch, rdma_chunk=rdma_chunk, dtype=dtype, stream=stream
            )
        )

    def new_output(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=self._device)  # torch keeps the memory of a GPU

    def keep_for_launch(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def _batch(self, row: Any) -> int:
        """Rows after which a ring's other end hears of them: half a ring, so that both ends can work at once."""
        slots = self._heap.nvl_ring_bytes // row.slot_bytes
        return 1 << max(0, slots.bit_length() - 2)

    def aborted(self) -> tuple[str, int] | None:
        return self._group.aborted()

    def finished(self) -> bool:
        return False  # a launch that was enqueued tells nothing yet

    def incidents(self) -> list[dict[str, Any]]:
        return self._group.incidents()

    def abort(self, *, interrupted: bool, failed: bool) -> None:
        self._group.abort(interrupted=interrupted, failed=failed)

    def drain(self) -> None:
        self.synchronize()
        self._group.drain()

    def attach(self, part: Resettable) -> None:
        self._parts.add(part)

    def reset(self) -> None:
        self._group.reset()
        for part in self._parts:
            part.reset()

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

    def _to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in pinned memory, once they are there."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self.wait(event)
        return copies

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

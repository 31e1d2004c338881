"""The CUDA backend: launches on torch's streams.

A launch is enqueued on torch's current stream and returns immediately. The next call or `synchronize` raises later
failures on the GPU. The host waits only for the counts of a dispatch whose number of rows is not given.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import Backend, Values
from megatron_ep.buffer.launch_events import LaunchEvents
from megatron_ep.errors import BusyError, EPStuckError
from megatron_ep.fabrics import gpu
from megatron_ep.fabrics.connection import Connection
from megatron_ep.meeting.stores import in_thread

T = TypeVar("T")

SPIN_S = 500e-6  # seconds that the host polls without sleeping; counts usually arrive within this time
POLL_S = 50e-6  # seconds between two polls after that
LISTEN_S = 50e-3  # seconds between two checks, while the host waits, for a failure of another rank
GRAPHS_S = 1.0  # seconds that CUDA may need until it no longer counts a deleted graph


# Dispatch leaves second and further output rows to the intra-rank pass if n SMs cannot store all copies of a row in the
# time in which NVLink moves it: if its stores (one in the ring, one for each output row) are at least
#     n * (bytes/s that an SM stores) / (bytes/s of a GPU's links) = n * 50 GB/s / 330 GB/s = 0.15 * n   (H200).
# With n = 24 that is 3.6 stores. Uniform routing with K = 8 needs 3.2 on four GPUs, and 5.0, and thus the pass, on two.
MIN_STORES_PER_SM = 0.15

# CUDA queues about 1,000 launches of all kinds. A host thread that waits for space in that queue holds a lock of the
# driver, so that no thread of its process can make the GPU stop. This limit leaves room for 40 kernels of a model
# between two launches of this library.
MAX_LAUNCHES_AHEAD = 16

# Closed backends whose launches a CUDA graph may still replay.
_replayable: list[CudaBackend] = []


class CudaBackend(Backend):
    """The backend of ranks of this process on one GPU.

    If a library carries the puts, it may wait forever inside a launch; a call that waits for such a launch raises
    EPStuckError.

    connection: connection over one of the fabrics.
    sms: number of SMs of an exchange.
    rank: the first rank of this process.
    """

    # Bytes that the intra-rank pass must save. At 32 MiB (T = 450, H = 7168, K = 8 on two H200) dispatch and combine
    # together take the same time with and without it.
    min_local_bytes = 32 << 20
    host_knows_counts = False
    speculates = True

    def __init__(self, connection: Connection, heap: Any, device: torch.device, sms: int, rank: int = 0):
        _forget_graphs_that_are_gone()
        network, timeout = connection.network, connection.library_timeout
        super().__init__(connection.launcher, None if network is None else network.nic)
        self.connection = connection
        self._launches = LaunchEvents(timeout, self._under_way)
        if timeout is not None:
            self.launcher.watch = self._launches.check
        self._rank = rank
        self.min_stores = MIN_STORES_PER_SM * sms
        self.memories = connection.memories
        self.network_memory = connection.network_memory
        self._heap = heap
        self._device = device
        self._busy = threading.Lock()
        self._last: torch.cuda.Stream | None = None  # stream of the last launch
        self._last_stream: int | None = None
        self._since_mark = 0  # launches since the mark
        self._listened = 0.0  # time of the last check for another rank's failure
        self._mark: torch.cuda.Event | None = None  # event _since_mark launches ago
        self._counts: list[torch.Tensor] = []  # pinned counts for which the host waits, per rank of this process
        self._is_counting = False  # whether a queued kernel may write to _counts
        self._captured_parts: list[object] = []  # parts whose launches graphs may replay

    def new_counts(self, experts: int, *, wait: bool, index: int = 0) -> torch.Tensor:
        if not wait:
            return torch.empty(2, experts, dtype=torch.int64, device=self._device)
        while len(self._counts) <= index:  # pinned host memory, which the GPU can write
            self._counts.append(torch.empty(2, experts, dtype=torch.int64, device="cpu", pin_memory=True))
        self._is_counting = True
        return self._counts[index]

    def taken_counts(self, counts: torch.Tensor) -> torch.Tensor:
        self._is_counting = False
        return counts.clone()

    def new_output(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # torch's caching allocator reuses memory, and torch parses separate sizes faster than a sequence.
        return torch.empty(*shape, dtype=dtype, device=self._device)

    def keep_for_launch(self, tensors: Sequence[torch.Tensor], made_on: int) -> None:
        if self.current_stream() != made_on:
            stream = torch.cuda.current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(stream)

    def may_wait_on_side_stream(self) -> bool:
        # Other processes may use all SMs, and a graph's branches may run in any order unless an event orders them.
        return not self.shares_gpu and (not self.is_capturing() or self.launcher.orders_graphs())

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def current_stream(self) -> int:
        # torch.cuda.current_stream wraps this, and is slower. Each call needs the stream several times.
        return torch._C._cuda_getCurrentRawStream(self._device.index)

    def finish_launches(self) -> None:
        gpu.run_deferred()
        # Replays of CUDA graphs are not recorded, but later work on the current stream depends on them.
        current = torch.cuda.current_stream(self._device) if self._launches.are_captured else None
        for stream in (self._last, current):
            if stream is not None:
                self._wait_until(functools.partial(self._is_reached_or_failed, stream.record_event()))
        self.launcher.listen()

    def _is_reached_or_failed(self, event: torch.cuda.Event) -> bool:
        """Returns whether the event is reached, or may never be: work after a failed launch, such as a reduction of
        gradients, may wait for the rank that the launch gave up on."""
        if event.query() or self.aborted() is not None:
            return True
        now = time.monotonic()
        if now - self._listened > LISTEN_S:
            self._listened = now
            self.launcher.listen()
        return False

    def drain(self) -> None:
        self.synchronize()
        self.launcher.drain()

    def reset(self) -> None:
        gpu.run_deferred()
        super().reset()
        self._is_counting = False

    def defer(self, work: Callable[[], None]) -> None:
        gpu.defer(work)

    @staticmethod
    def give_back() -> None:
        gpu.run_deferred()

    def needs_memory(self) -> str:
        if self.is_capturing():
            return "a CUDA graph is being captured"
        deadline = time.monotonic() + GRAPHS_S  # CUDA still counts a deleted graph for a short time
        while self.launcher.graphs() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        graphs = self.launcher.graphs()
        return f"{graphs} CUDA graphs may replay its launches, must be deleted before" if graphs else ""

    def close(self) -> None:
        """Closes the backend. Launches that CUDA graphs may replay are kept as long as the graphs, but then only fill
        their outputs with NaN, because other ranks and their memory may be gone."""
        if self.is_capturing():
            self.defer(self.close)
            return
        _forget_graphs_that_are_gone()
        self.launcher.watch = None  # breaks a reference cycle through the extension, which the collector does not see
        if self._is_counting and not gpu.is_stuck(self.launcher):
            torch.cuda.synchronize(self._device)
            self._is_counting = False
        if not gpu.is_stuck(self.launcher) and self.launcher.graphs():
            self.launcher.retire()
            _replayable.append(self)

    @property
    def seconds(self) -> float:
        """Seconds of finished launches on the GPU since the first read of this, which starts the recording of events.
        Excludes captured graphs."""
        return self._launches.measured()

    def wait(self, event: torch.cuda.Event) -> None:
        """Waits until the event is reached. Ctrl-C also ends the waits on the GPU."""
        self._wait_until(event.query)

    def _wait_until(self, is_over: Callable[[], bool]) -> None:
        started = time.perf_counter()
        try:
            with self._watched():
                while not is_over():
                    if time.perf_counter() - started > SPIN_S:
                        self._launches.check()
                        time.sleep(POLL_S)
        except EPStuckError:
            raise
        except BaseException:
            self.abort(interrupted=True, failed=False)
            raise

    def synchronize(self) -> None:
        """Waits until all launches are done, including those of captured graphs."""
        gpu.run_deferred()
        if self._last is not None:
            self.wait(self._last.record_event())
        if self._launches.are_watched and self._launches.are_captured:
            self._wait_until(in_thread(functools.partial(torch.cuda.synchronize, self._device)).done)
        torch.cuda.synchronize(self._device)

    def _under_way(self) -> tuple[str, bool] | None:
        """Returns the call that the GPU has entered and not finished, see `LaunchEvents`."""
        own = next(status for status in self.rank_statuses() if status.rank == self._rank)
        return None if own.call is None else (own.call, self.aborted() is not None)

    def launch(
        self, launcher: _C.Launcher, call: _C.Call, phase: int, stream: int, values: Values, part: Any = None
    ) -> Any:
        """Launches a phase of a call on the current stream. part: the part of the buffer that it uses, if any."""
        if torch.cuda.is_current_stream_capturing():
            self._launches.are_captured = True
            if not self.launcher.graphs():
                self._captured_parts.clear()
            if part is not None and part not in self._captured_parts:
                self._captured_parts.append(part)
            self.launcher.note_capture(stream)
            # A graph orders its own launches, and torch synchronizes before it captures.
            return launcher.launch(call, phase, stream, values)
        if not self._busy.acquire(False):
            raise BusyError
        try:
            if stream != self._last_stream:
                current = torch.cuda.current_stream(self._device)
                if self._last is not None:
                    current.wait_event(self._last.record_event())  # launches share rings, and must not run in parallel
                self._last, self._last_stream = current, stream
            self._since_mark += 1
            if self._since_mark > MAX_LAUNCHES_AHEAD // 2:
                self._wait_for_earlier_launches()
            if not self._launches.are_recorded:
                return launcher.launch(call, phase, stream, values)
            assert self._last is not None
            with self._watched(), self._launches.record(self._last):
                return launcher.launch(call, phase, stream, values)
        finally:
            self._busy.release()

    def _wait_for_earlier_launches(self) -> None:
        """Waits until the GPU has at most MAX_LAUNCHES_AHEAD unfinished launches."""
        assert self._last is not None
        if self._mark is not None:
            self.wait(self._mark)
        self._mark, self._since_mark = self._last.record_event(), 1

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Aborts the group after an EPStuckError, and keeps its memory forever, because its launch still runs."""
        try:
            yield
        except EPStuckError as error:
            gpu.keep_for_ever(self.launcher)
            with contextlib.suppress(RuntimeError):
                self.abort(interrupted=False, failed=True, reason=str(error))
            raise


def _forget_graphs_that_are_gone() -> None:
    _replayable[:] = [backend for backend in _replayable if backend.launcher.graphs()]

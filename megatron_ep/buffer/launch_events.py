"""Start and end of the launches of a buffer on a GPU."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from megatron_ep.errors import EPStuckError

# A launch has a few consecutive waits, each of which ends after a timeout. Together they take less than this.
MAX_TIMEOUTS = 3
CHECKS_PER_TIMEOUT = 10  # reads of the GPU's counts of calls per timeout, each of which costs a copy

WAITS_INSIDE = (
    "a call of NVSHMEM's or NCCL's inside it waits for a network or rank that does not answer, and nothing can end it"
)


class LaunchEvents:
    """Events around launches, in order, except those that a CUDA graph captures.

    timeout: seconds after which each wait of a launch ends, except those inside a library that carries its puts. None:
        there is no such library.
    under_way: returns the name of the call that the GPU has entered and not finished, by the counts of its kernels, and
        whether it was given up, after which they no longer count; None if there is none. Captured launches can only be
        seen by these counts.
    """

    def __init__(self, timeout: float | None = None, under_way: Callable[[], tuple[str, bool] | None] = lambda: None):
        self._timeout = timeout
        self._under_way = under_way
        self._call: tuple[str, bool] | None = None
        self._call_seen = self._next_check = 0.0
        self.are_captured = False  # whether CUDA graphs may replay launches
        self.are_watched = timeout is not None
        self.are_recorded = self.are_watched  # events are recorded only if they are needed, because they take time
        self._measures = False
        self._seconds = 0.0
        self._pending: deque[list[torch.cuda.Event]] = deque()  # start and, once it is enqueued, end of each launch
        self._begun: torch.cuda.Event | None = None  # start of the oldest launch, once it was seen to run
        self._seen = 0.0  # time at which it was first seen to run

    @contextlib.contextmanager
    def record(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Records the events of a launch that is enqueued in this context."""
        events = [_recorded(stream)]
        self._pending.append(events)
        try:
            yield
        finally:
            events.append(_recorded(stream))
            if len(self._pending) > 1000:
                self._take_finished()

    def measured(self) -> float:
        """Returns the seconds on the GPU of finished launches since the first call of this."""
        self._take_finished()
        self._measures = self.are_recorded = True
        return self._seconds

    def _take_finished(self) -> None:
        while self._pending and len(self._pending[0]) == 2 and self._pending[0][1].query():
            start, end = self._pending.popleft()
            if self._measures:
                self._seconds += start.elapsed_time(end) / 1e3

    def check(self) -> None:
        """Raises EPStuckError if the oldest launch, or a call of a captured one, has run for too long. Called while the
        host waits."""
        if self._timeout is None:
            return
        if self.are_captured:
            self._check_call(self._timeout)
        self._take_finished()
        if not self._pending or not self._pending[0][0].query():
            return
        begun = self._pending[0][0]
        if begun is not self._begun:
            self._begun, self._seen = begun, time.monotonic()
        self._check_time("a launch", self._seen, self._timeout, WAITS_INSIDE)

    def _check_call(self, timeout: float) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + timeout / CHECKS_PER_TIMEOUT
        call = self._under_way()
        if call is None or self._call is None or call[0] != self._call[0]:
            self._call, self._call_seen = call, now
            return
        name, given_up = call
        why = f"{WAITS_INSIDE}, or other work behind it does not end" if given_up else WAITS_INSIDE
        self._check_time(name, self._call_seen, timeout, why)

    @staticmethod
    def _check_time(what: str, seen: float, timeout: float, why: str) -> None:
        seconds = time.monotonic() - seen
        if seconds > MAX_TIMEOUTS * timeout:
            raise EPStuckError(
                f"{what} has been on the GPU for {seconds:.1f} s, though each of its own waits ends after "
                f"{timeout:g} s: {why}; this process has to end"
            )


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import megatron_ep as ep


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether it comes true in so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def come_last(buffer: ep.Buffer, seconds: float) -> None:
    """Returns so many seconds after all other ranks have come to this rank's next call."""
    backend, rank = buffer._group.live_backend(), buffer._group.ranks[0]
    own = backend.rank_statuses()[rank].launches
    assert within(60, lambda: all(s.launches > own for s in backend.rank_statuses() if s.rank != rank))
    time.sleep(seconds)


def patience(seconds: float) -> float:
    """So many seconds, or more where the machine has other work: healthy ranks are then late as well."""
    return round(seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 2)

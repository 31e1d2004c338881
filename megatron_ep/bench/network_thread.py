"""How much of a core the thread takes that carries out send queues: see `_C.SoftwareNic`."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_ep import _C


class NetworkThread:
    """That of this process, or those of all its buffers, from now on."""

    def __init__(self) -> None:
        self._began, self._before = time.perf_counter(), _seconds()

    def share(self) -> float:
        """Returns the share of a core used until now."""
        return (_seconds() - self._before) / (time.perf_counter() - self._began)


def _seconds() -> float:
    tasks = [task for task in Path("/proc/self/task").iterdir() if _name_of(task) == _C.SoftwareNic.thread_name]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def _name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return ""

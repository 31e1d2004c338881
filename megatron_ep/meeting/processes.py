"""Processes of this machine: which machine that is, what has become of them, and what belongs to one of them."""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_ep.diagnosis.blame import ENDED

BOOT = Path("/proc/sys/kernel/random/boot_id")
# Processes in different ones do not reach each other's memory: /proc/PID is another process there, or CUDA IPC fails.
NAMESPACES = ("pid", "ipc")

Own = TypeVar("Own", bound="OfOneProcess")


class OfOneProcess:
    """What copies of its owner share, such as those of a module whose weights are averaged, and no pickle holds."""

    def __copy__(self: Own) -> Own:
        return self

    def __deepcopy__(self: Own, _: Any) -> Own:
        return self

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} belongs to its process and cannot be pickled: keep it out of what is saved or sent "
            "(a module's state_dict is without it), and make another one there"
        )


def machine() -> str:
    """What tells this machine from others, also from one of the same name: two processes that are told the same can
    share memory, as far as their users may. A container with its own processes is a machine of its own."""
    parts = [socket.gethostname()]
    try:
        parts.append(f"boot {BOOT.read_text().strip()}")
        parts += [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    except OSError:  # a sandbox without them
        pass
    return ", ".join(parts)


def started() -> float:
    """When this process was, by `time.time()`; infinity where that cannot be told."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def process_fate(pid: int) -> str | None:
    """What has become of a process of this machine: "has ended", "is stopped"; None while it runs."""
    return _fate(Path(f"/proc/{pid}"))


def has_ended(pid: int) -> bool:
    """Whether nothing of a process of this machine runs any more: one that was killed may be a zombie before the last
    of its threads is."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    return all(_fate(thread) == ENDED for thread in threads)


def _fate(task: Path) -> str | None:
    try:
        # its name is cut to 15 bytes, perhaps inside a character
        state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ENDED
    return {"Z": ENDED, "X": ENDED, "T": "is stopped", "t": "is stopped"}.get(state)

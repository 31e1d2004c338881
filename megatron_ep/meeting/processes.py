"""The identity of this machine, the state of its processes, and objects that belong to one process."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megatron_ep.diagnosis.blame import CLOSED, ENDED

BOOT = Path("/proc/sys/kernel/random/boot_id")
# Processes in different namespaces cannot map each other's memory: /proc/PID is another process, or CUDA IPC fails.
NAMESPACES = ("pid", "ipc")

Own = TypeVar("Own", bound="OfOneProcess")


class OfOneProcess:
    """An object that copies of its owner share, such as copies of a module for averaged weights; it refuses pickle."""

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
    """Returns the identity of this machine, which differs from that of another machine with the same name. Processes
    with equal identities can share memory if their users may. A container with its own PID or IPC namespace is a
    separate machine."""
    parts = [socket.gethostname()]
    try:
        parts.append(f"boot {BOOT.read_text().strip()}")
        parts += [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    except OSError:  # a sandbox may lack these files
        pass
    return ", ".join(parts)


def started() -> float:
    """Returns the start of this process in the time of `time.time()`; infinity if it is unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return math.inf
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def process_fate(pid: int) -> str | None:
    """Returns "has ended" or "is stopped" for a process of this machine; None while it runs."""
    return _fate(Path(f"/proc/{pid}"))


@dataclass(frozen=True)
class Owner:
    """A process of this machine that has a buffer, as others see it: the pipe is open as long as the buffer."""

    pid: int
    descriptor: int
    inode: int

    @classmethod
    def here(cls) -> Owner:
        """Opens the pipe of this process."""
        descriptor, other_end = os.pipe()
        os.close(other_end)
        return cls(os.getpid(), descriptor, os.fstat(descriptor).st_ino)

    def fate(self) -> str | None:
        """Returns `process_fate`, or that the buffer is closed."""
        is_open = True
        with contextlib.suppress(PermissionError):
            try:
                is_open = os.stat(f"/proc/{self.pid}/fd/{self.descriptor}").st_ino == self.inode
            except FileNotFoundError:
                is_open = False
        return process_fate(self.pid) or (None if is_open else CLOSED)


def has_ended(pid: int) -> bool:
    """Returns whether no thread of a process of this machine runs. A killed process may be a zombie before the last of
    its threads is."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    return all(_fate(thread) == ENDED for thread in threads)


def _fate(task: Path) -> str | None:
    try:
        # The name in it is cut to 15 bytes, perhaps inside a character.
        state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ENDED
    return {"Z": ENDED, "X": ENDED, "T": "is stopped", "t": "is stopped"}.get(state)

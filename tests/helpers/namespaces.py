"""Linux namespaces for processes that have started already."""

import ctypes
import os
import signal
from pathlib import Path

CLONE = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "mount": 0x00020000}  # sched.h
PR_SET_PDEATHSIG = 1


def unshare(*kinds: str) -> None:
    """Gives this process namespaces of these kinds. That of processes begins with its next child."""
    _call("unshare", sum(CLONE[kind] for kind in kinds))


def enter(network: Path) -> None:
    """Takes this process into a network namespace."""
    with network.open() as file:
        _call("setns", file.fileno(), CLONE["net"])


def become_child() -> None:
    """Returns in a new process, which ends with this one; this one waits for it and ends as it does."""
    child = os.fork()
    if not child:
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _call(function: str, *arguments: int) -> None:
    """Calls a function of libc. Python has the first two from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), function)

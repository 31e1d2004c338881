"""Tests on a GPU run beside each other in many processes, but for those that measure its free memory."""

import contextlib
import fcntl
import tempfile
from pathlib import Path


@contextlib.contextmanager
def turn(alone):
    """While nobody else's lasts, if `alone` or that one is. Whoever waits lets nobody begin after it."""
    place = Path(tempfile.gettempdir())
    with open(place / "megatron_ep_gpu_queue", "w") as queue, open(place / "megatron_ep_gpu_turn", "w") as lock:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield

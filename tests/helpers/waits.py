import time
from collections.abc import Callable


def within(seconds: float, condition: Callable[[], object]) -> bool:
    """Whether it comes true in so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

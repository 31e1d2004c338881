import os
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


def patience(seconds: float) -> float:
    """So many seconds, or more where the machine has other work: healthy ranks are then late as well."""
    return round(seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 2)

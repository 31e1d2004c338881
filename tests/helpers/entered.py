"""What of the package a call enters: each function costs the host about 0.1 us."""

import sys
from collections.abc import Callable, Mapping
from typing import Any


def files_and_functions(call: Callable[[], Any]) -> tuple[int, int]:
    """Returns the number of files of the package, and of its functions, that a call enters."""
    entered = []

    def enter(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "megatron_ep/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_filename)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(set(entered)), len(entered)


def check_entered(calls: Mapping[str, Callable[[], Any]], allowed: Mapping[str, tuple[int, int]]) -> None:
    """Asserts that no call that was made before enters more files and functions than allowed."""
    entered = {}
    for name, call in calls.items():
        call()
        entered[name] = files_and_functions(call)
    for name, found in entered.items():
        assert all(n <= most for n, most in zip(found, allowed[name], strict=True)), entered

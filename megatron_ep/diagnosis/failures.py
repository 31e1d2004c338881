"""Failures that no call has raised yet.

A launch on a GPU returns before it has run, so it can fail after the program has continued. Its outputs are then NaN
(-1 in integer tensors), and so is everything computed from them. A program therefore checks before it keeps results.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol


class Watched(Protocol):
    """The methods of `rank_group.RankGroup` that this module calls."""

    @property
    def is_open(self) -> bool: ...

    @property
    def has_unseen_failure(self) -> bool: ...

    def raise_if_failed(self) -> None: ...

    def raise_if_known_to_have_failed(self) -> None: ...

    def abort(self, reason: str) -> None: ...

    def report_unseen(self) -> None: ...

    def leave_to_parent(self) -> None: ...


log = logging.getLogger(__name__)

_numbers = itertools.count()
_groups: weakref.WeakValueDictionary[int, Watched] = weakref.WeakValueDictionary()

# The monitor thread of a buffer calls each of these with the first line of a failure once it is known in this process,
# because the thread that should raise it may be waiting inside another library.
watchers: list[Callable[[str], None]] = []


def watch(group: Watched) -> int:
    """Registers a buffer of this process until it is closed or garbage-collected. Returns its number."""
    number = next(_numbers)
    _groups[number] = group
    return number


def group_of(number: int) -> Watched | None:
    """Returns the buffer with that number, or None if it has been garbage-collected."""
    return _groups.get(number)


def open_groups() -> list[Watched]:
    """Returns this process's open buffers, in the order in which they were created."""
    groups = [reference() for reference in _groups.valuerefs()]
    return [group for group in groups if group is not None and group.is_open]


def raise_if_failed() -> None:
    """Raises the failure of any dispatch, combine or backward pass of any buffer of this process.

    Call it after the backward pass and before you keep its results: before `optimizer.step()` and before a checkpoint.
    On a GPU it waits for launches that are not known to be done, and for the current stream if a CUDA graph has
    captured launches; on the host it does not wait. Also raises if another rank gave up in a call in which this rank
    took no part; a failure of a rank whose memory is not shared arrives within a second or two, through the store of
    torch.distributed.

    Raises EPTimeoutError, EPAbortError or another EPError.
    """
    for group in open_groups():
        group.raise_if_failed()


def raise_if_known_to_have_failed() -> None:
    """Raises as `raise_if_failed` if a failure is already known in this process. Waits for no launch."""
    for group in open_groups():
        group.raise_if_known_to_have_failed()


def has_unseen() -> bool:
    """Returns whether this process knows of a failure that no call has raised yet."""
    return any(group.has_unseen_failure for group in open_groups())


def abort_all(reason: str) -> None:
    """Calls `Buffer.abort` on every open buffer of this process, from any thread. Logs errors; raises nothing."""
    for group in open_groups():
        try:
            group.abort(reason)
        except Exception as error:
            log.error("a buffer of megatron_ep could not be stopped: %s", error)


@atexit.register
def report_unseen() -> None:
    """Logs, as errors, the failures of open buffers that no call has raised."""
    for group in open_groups():
        group.report_unseen()


def _leave_to_parent() -> None:
    for group in open_groups():
        group.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)

"""Failures that nobody has been told of.

A launch on a GPU returns before it has run, so it can fail behind the back of a program that goes on. What it should
have written is then NaN (-1 in tensors of integers), and so is all that is computed from it; before a program keeps
what it has computed, it asks.
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
    """What is asked of a buffer: see `rank_group.RankGroup`."""

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

# Each is called with the first line of a failure, from a thread that looks after a buffer of several processes, once
# the failure is known in this process: the thread that will raise it may be inside a wait for another library.
watchers: list[Callable[[str], None]] = []


def watch(group: Watched) -> int:
    """Counts a buffer among those of this process, until it is closed or nobody has it any more. Returns its number."""
    number = next(_numbers)
    _groups[number] = group
    return number


def group_of(number: int) -> Watched | None:
    """The buffer of that number, if somebody still has it."""
    return _groups.get(number)


def open_groups() -> list[Watched]:
    """This process's buffers that are not closed, in the order in which they were made."""
    groups = [reference() for reference in _groups.valuerefs()]
    return [group for group in groups if group is not None and group.is_open]


def raise_if_failed() -> None:
    """Raises what failed in any dispatch, combine or backward pass of any buffer of this process.

    Call it after the backward pass and before whatever keeps its results: `optimizer.step()`, a checkpoint. On a GPU it
    waits for those launches that are not known to be done, and for the current stream if a CUDA graph has captured
    launches; on the host there is nothing to wait for. Also raises when another rank gave up in a call that this rank
    had no part in; of a rank whose memory it does not share it hears within a second or two, through the store of
    torch.distributed.

    Raises EPTimeoutError, EPAbortError or another EPError.
    """
    for group in open_groups():
        group.raise_if_failed()


def raise_if_known_to_have_failed() -> None:
    """Raises as `raise_if_failed` what this process has heard of so far. Waits for no launch."""
    for group in open_groups():
        group.raise_if_known_to_have_failed()


def has_unseen() -> bool:
    """Whether a failure is known in this process that no call has raised yet."""
    return any(group.has_unseen_failure for group in open_groups())


def abort_all(reason: str) -> None:
    """`Buffer.abort` on every open buffer of this process, from any thread. Logs what goes wrong; raises nothing."""
    for group in open_groups():
        try:
            group.abort(reason)
        except Exception as error:
            log.error("a buffer of megatron_ep could not be told to stop: %s", error)


@atexit.register
def report_unseen() -> None:
    """Logs, as errors, the failures of open buffers that nobody has been told of."""
    for group in open_groups():
        group.report_unseen()


def _leave_to_parent() -> None:
    for group in open_groups():
        group.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)

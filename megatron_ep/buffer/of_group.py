"""The part of backends that is equal on the host and on a GPU."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any

from megatron_ep import _C
from megatron_ep.buffer.interface import Part
from megatron_ep.diagnosis.blame import RankStatus


class OfGroup:
    """Implements a part of `interface.Backend`.

    group: compiled group of the ranks of this process.
    nic: sends failures to ranks of other machines; None: all ranks share memory.
    """

    def __init__(self, group: _C.Group, nic: _C.SoftwareNic | None = None):
        self.group = group
        self._nic = nic
        self.masks = False
        self.launches_ahead = False
        self.shares_gpu = False  # with other processes of the buffer
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._attached = itertools.count()

    def aborted(self) -> tuple[str, int] | None:
        return self.group.aborted()

    def incidents(self) -> list[dict[str, Any]]:
        return self.group.incidents()

    def rank_statuses(self) -> list[RankStatus]:
        return [RankStatus(**status) for status in self.group.rank_statuses()]

    def ranks_that_left(self) -> list[int]:
        return self._nic.ranks_that_left() if self._nic is not None else []

    def waited(self) -> list[tuple[list[int], list[int]]]:
        return self.group.waited()

    def abort(self, *, interrupted: bool, failed: bool, reason: str = "") -> None:
        aborted = self.group.aborted()
        if aborted is not None and aborted[0] == "cut_off":
            return  # the other ranks have masked this one and do not need to know
        self.group.abort(interrupted=interrupted, failed=failed, reason=reason)
        self.tell_others()

    def refuse(self, reason: str) -> bool:
        return False

    def settle_refusal(self, gone: Collection[int] = (), wait: float | None = None) -> None: ...

    def tell_others(self) -> None:
        if self._nic is not None:
            self._nic.tell_now()

    def attach(self, part: Part) -> None:
        self._parts[next(self._attached)] = part

    @property
    def parts(self) -> Collection[Part]:
        return list(self._parts.values())

    def reset(self) -> None:
        self.group.reset()
        for part in self.parts:  # the order is equal on all ranks, because a reset may be collective
            part.reset()

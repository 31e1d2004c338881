"""What a compiled group answers in the same way on the host and on a GPU."""

from __future__ import annotations

import weakref
from typing import Any

from megatron_ep.backends.interface import Resettable
from megatron_ep.blame import Standing


class OfGroup:
    """A part of `interface.Backend`. group: the compiled group, which has the ranks of this process."""

    def __init__(self, group: Any):
        self.group = group
        self.parts: weakref.WeakSet[Resettable] = weakref.WeakSet()  # that are reset with it

    def aborted(self) -> tuple[str, int] | None:
        return self.group.aborted()

    def incidents(self) -> list[dict[str, Any]]:
        return self.group.incidents()

    def standings(self) -> list[Standing]:
        return [Standing(**standing) for standing in self.group.standings()]

    def waited(self) -> list[tuple[list[int], list[int]]]:
        return self.group.waited()

    def abort(self, *, interrupted: bool, failed: bool, reason: str = "") -> None:
        self.group.abort(interrupted=interrupted, failed=failed, reason=reason)

    def attach(self, part: Resettable) -> None:
        self.parts.add(part)

    def reset(self) -> None:
        self.group.reset()
        for part in self.parts:
            part.reset()

"""Which of a buffer's calls a failure belongs to: a launch on a GPU, or in a compiled graph, fails far from the line
that asked for it, and its incident names a number alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_CALLS = 1000  # a layer makes four


class _Call(NamedTuple):
    number: int
    kind: str  # dispatch, combine
    layout: int  # address of the handle's layout
    backward_of: str  # the kind of call whose backward pass it is, if any


class CallLog:
    """The last dispatches and combines of a buffer, numbered as in incidents.

    backward_of: the kind of call whose backward pass is under way in this process, if any.
    """

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=MAX_CALLS)
        self._count = 0
        self.backward_of = ""

    def note(self, kind: str, layout: int) -> None:
        """Notes the next dispatch or combine."""
        self._count += 1
        self._calls.append(_Call(self._count, kind, layout, self.backward_of))

    def clear(self) -> None:
        """Begins again with call 1, as a reset does."""
        self._calls.clear()
        self._count = 0

    def backward_pass(self, incidents: Sequence[dict[str, Any]], low_latency: bool) -> str:
        """Returns the backward pass that the first of these incidents belongs to, as a clause; "" for a forward pass.

        low_latency: whether incidents of that mode are those of the call under way; it counts its calls on the GPU.
        """
        for incident in incidents:
            if incident["role"].startswith("low_latency"):
                return f"in the backward pass of {self.backward_of}" if low_latency and self.backward_of else ""
            if incident["role"] != "notify":
                return self._backward_pass(incident["call"])
        return ""

    def _backward_pass(self, number: int) -> str:
        before = [call for call in self._calls if call.number <= number]
        if not before or before[-1].number != number or not (kind := before[-1].backward_of):
            return ""
        own = (before[-1].layout, kind, "")
        forward = [call.number for call in before if (call.layout, call.kind, call.backward_of) == own]
        return f"in the backward pass of {kind}" + (f", call {forward[-1]}" if forward else "")

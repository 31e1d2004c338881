"""What the last dispatches and combines of a buffer were: an incident names its call by a number alone, and on a GPU it
is found long after the call."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

MAX_CALLS = 1000  # that are remembered; a layer makes four


class CallLog:
    """Number (as in incidents), kind, address of the handle's layout, and of which kind the call is the backward pass.

    backward_of: that kind ("dispatch", "combine") while such a call is made, otherwise "".
    """

    def __init__(self) -> None:
        self._calls = deque[tuple[int, str, int, str]](maxlen=MAX_CALLS)
        self._count = 0
        self.backward_of = ""

    def note(self, kind: str, layout: int) -> None:
        self._count += 1
        self._calls.append((self._count, kind, layout, self.backward_of))

    def clear(self) -> None:
        """Begins with call 1 again, as after a reset."""
        self._calls.clear()
        self._count = 0

    def backward_pass(self, incidents: Sequence[dict[str, Any]]) -> str:
        """Returns the backward pass that the first of these incidents was in, as a clause; "" if it was in none."""
        incident = next((i for i in incidents if i["role"] != "notify"), None)
        if incident is None:
            return ""
        if incident["role"].startswith("low_latency"):  # whose calls have numbers of their own
            return f"in the backward pass of {self.backward_of}" if self.backward_of else ""
        number = incident["call"]
        kind, layout = next(((of, layout) for call, _, layout, of in self._calls if call == number), ("", 0))
        forward = [call for call, *what in self._calls if call < number and what == [kind, layout, ""]]
        return f"in the backward pass of {kind}" + (f", call {forward[-1]}" if forward else "") if kind else ""

"""A log of the last dispatches and combines of a buffer. An incident has only the number of its call, and on a GPU it
is found long after the call."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

MAX_CALLS = 1000  # calls that are kept; a layer makes four


class CallLog:
    """The last calls: number (as in incidents), kind, identity of the handle's layout, and `backward_of` at the call.

    backward_of: "dispatch" or "combine" while the backward pass of such a call runs, otherwise "".
    """

    def __init__(self) -> None:
        self._calls = deque[tuple[int, str, int, str]](maxlen=MAX_CALLS)
        self._count = 0
        self.backward_of = ""

    def note(self, kind: str, layout: int) -> None:
        self._count += 1
        self._calls.append((self._count, kind, layout, self.backward_of))

    def clear(self) -> None:
        """Restarts with call 1, as after a reset."""
        self._calls.clear()
        self._count = 0

    def backward_pass(self, incidents: Sequence[dict[str, Any]]) -> str:
        """Returns the backward pass that the first of these incidents was in, as a clause; "" if it was in none."""
        incident = next((i for i in incidents if i["role"] != "notify"), None)
        if incident is None:
            return ""
        if incident["role"].startswith("low_latency"):  # low-latency calls are numbered separately
            return f"in the backward pass of {self.backward_of}" if self.backward_of else ""
        number = incident["call"]
        kind, layout = next(((of, layout) for call, _, layout, of in self._calls if call == number), ("", 0))
        forward = [call for call, *what in self._calls if call < number and what == [kind, layout, ""]]
        return f"in the backward pass of {kind}" + (f", call {forward[-1]}" if forward else "") if kind else ""

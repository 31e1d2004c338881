"""Plans of low-latency calls with checked arguments, and the halves of these calls.

A plan is everything about a call except tensor addresses. It is cached by shapes, dtypes and options of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.low_latency import RECEIVE
from megatron_ep.low_latency.rows import Float8


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Everything about a dispatch except tensor addresses. See `LowLatencyCalls.plan`.

    num_tokens: tokens of each rank of this process. rows, shape: number and shape of the rows that each rank has room
    for, without H; out_shape: with H. dtype: dtype of received rows. offsets: offsets of the parts of a handle's
    layout, in int32.
    """

    topk: int
    masked: bool
    expert_alignment: int
    num_tokens: tuple[int, ...]
    rows: int
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    float8: Float8 | None
    offsets: Mapping[str, int]
    call: _C.Call


@dataclass(frozen=True)
class CombinePlan:
    """Everything about a combine except tensor addresses."""

    sum_at_expert: bool
    call: _C.Call


class Pending:
    """A call whose receiving half can be launched, or was launched with the sending one.

    calls: the `LowLatencyCalls` that launched it. per_launch: values of the launch, which keep its tensors.
    made_on: the stream on which they were created.
    """

    def __init__(self, *rest: Any):
        # A received call keeps no references, because `calls` keeps the call: a reference cycle would be freed by the
        # collector at any time, for example while a CUDA graph is captured.
        self._rest: tuple[Any, ...] = rest  # calls, call, per_launch, made_on
        self._given_up = False

    @property
    def received(self) -> bool:
        """Whether it was received or given up."""
        return not self._rest

    @property
    def was_received(self) -> bool:
        return not self._rest and not self._given_up

    def receive(self) -> None:
        """Launches the receiving half. Raises ValueError if called twice, or after a reset."""
        if self._given_up:
            raise ValueError(
                "the hook of a low-latency call was called after the buffer's reset, must be called before"
            )
        if not self._rest:
            raise ValueError("the hook of a low-latency call was called twice, must be called once")
        calls, call, per_launch, made_on = self._rest
        try:
            backend = calls.backend
            if backend.aborted() is not None:
                calls.group.check_usable()
            stream = backend.current_stream()
            if made_on != stream:
                backend.keep_for_launch([part for part in per_launch if isinstance(part, torch.Tensor)], made_on)
            backend.launch(calls.ranks.launcher, call, RECEIVE, stream, per_launch, calls.ranks)
            self._rest = ()
            calls.check_launched(backend)
        except BaseException as error:
            calls.group.abort_peers(error)
            raise

    def give_up(self) -> None:
        """Makes it an error to receive the call."""
        if self._rest:
            self._rest, self._given_up = (), True


RECEIVED = Pending()  # a call whose halves were launched together


class InFlight:
    """The last two calls of a kind: a third must not be sent before the first has been received."""

    def __init__(self, kind: str):
        self._kind = kind
        self.first = self.last = RECEIVED

    def check(self) -> None:
        """Raises ValueError if no bank is free for another call."""
        if not self.first.received:
            raise ValueError(
                f"the {self._kind} before the last has not been received, must be before another {self._kind} is sent: "
                "call the hook that it returned (two may be under way)"
            )

    def check_received(self) -> None:
        """Raises ValueError if a call has not been received."""
        if not (self.first.received and self.last.received):
            raise ValueError(f"a {self._kind} is under way, must be received before: call the hook that it returned")

    def give_up(self) -> None:
        self.first.give_up()
        self.last.give_up()
        self.first = self.last = RECEIVED

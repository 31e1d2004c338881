"""DeepEP's events, and calls on a separate stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron_ep import overlap

Result = TypeVar("Result")


class EventHandle:
    """An event after all work on the current stream at its construction; empty on a machine without a GPU.

    recorded: torch's event, if there is one already.
    """

    def __init__(self, recorded: torch.cuda.Event | None = None) -> None:
        if recorded is None and torch.cuda.is_available():
            recorded = torch.cuda.current_stream().record_event()
        self.recorded = recorded

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host does not wait."""
        if self.recorded is not None:
            torch.cuda.current_stream().wait_event(self.recorded)


class EventOverlap:
    """The event of a call, None unless the call is asynchronous. As a context manager it makes the current stream wait
    at the end of the block.

    extra_tensors: tensors that are kept as long as this object.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors
        self._after_wait: Callable[[], None] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait for the event. Raises ValueError if there is none."""
        if self.event is None:
            raise ValueError("event is None, must be of a call with async_finish=True")
        self.event.current_stream_wait()
        after, self._after_wait = self._after_wait, None
        if after is not None:
            after()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Registers a function that is called once, after the next wait. Raises ValueError if there is one already."""
        if self._after_wait is not None:
            raise ValueError("hook_after_wait is the second one, must be registered after a wait for the first")
        self._after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(releases)


Event = EventHandle | EventOverlap | None  # an argument; users of V1 wrap the handle


def wait_for(event: Event) -> None:
    """Makes the current stream wait for an event, if there is one."""
    if handle := _handle_of(event):
        handle.current_stream_wait()


def _handle_of(event: Event) -> EventHandle | None:
    return event.event if isinstance(event, EventOverlap) else event


def run(
    call: Callable[[], Result], read: tuple[Any, ...], previous_event: Event = None, is_async: bool = False
) -> tuple[Result, EventOverlap]:
    """Runs call() on the current stream, or on the communication stream if it is asynchronous.

    read: the arguments that it reads, x among them. The current stream will use the result, which may be a tuple.
    previous_event: event that it waits for. None: all work on the current stream so far.
    """
    if not is_async:
        wait_for(previous_event)
        return call(), EventOverlap()
    before = _handle_of(previous_event)
    pending = overlap.start(lambda *_: call(), *read, previous_event=before.recorded if before else None)
    return pending.unwaited(), EventOverlap(EventHandle(pending.event))


def refuse(name: str, value: Any, instead: str) -> None:
    """Raises NotImplementedError for an argument that DeepEP has and this library does not support."""
    raise NotImplementedError(f"{name} is {value!r}, which megatron_ep.deep_ep does not do: {instead}")

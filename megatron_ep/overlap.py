"""Runs dispatch and combine on a separate stream, in parallel with what the current stream computes.

    pending = overlap.start(ep.dispatch, x, topk_idx, topk_weights, buffer=buffer)
    ...                                   # work that does not need the rows
    received = pending.wait()

The backward pass runs on that stream too: autograd records where a function ran and orders the streams itself.

On the host, which has no streams, `start` runs the whole call, so that a program runs there as on GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep.buffer.rank_group import RankGroup

_streams: dict[torch.device, torch.cuda.Stream] = {}


def communication_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream that `start` uses on this GPU. It has high priority: its kernels get free SMs first."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device, priority=-1)
    return _streams[device]


@dataclass
class Pending:
    """A call under way. `event` is recorded after it on the GPU; None on the host, where the call is complete."""

    event: torch.cuda.Event | None
    _device: torch.device
    _result: Any

    def wait(self) -> Any:
        """Returns the call's result. The current stream waits until the GPU has finished the call; the host does
        not."""
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)
        return self.unwaited()

    def unwaited(self) -> Any:
        """Returns the call's result, which the current stream may use once it waits for `event`."""
        for tensor in _tensors(self._result):
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self._result


def start(
    function: Callable[..., Any], *args: Any, previous_event: torch.cuda.Event | None = None, **kwargs: Any
) -> Pending:
    """Calls megatron_ep.dispatch or combine, or those of a `SequenceDispatcher`, on the communication stream.

    function, args, kwargs: the call.
    previous_event: an event that the call waits for. None: all work on the current stream so far.

    Raises what the call itself raises.
    """
    tensors = [tensor for tensor in _tensors((args, kwargs)) if tensor.is_cuda]
    if not tensors:
        return Pending(None, torch.device("cpu"), function(*args, **kwargs))
    device = tensors[0].device
    stream = communication_stream(device)
    if previous_event is None:
        previous_event = torch.cuda.current_stream(device).record_event()
    stream.wait_event(previous_event)
    with torch.cuda.stream(stream):
        result = function(*args, **kwargs)
        event = stream.record_event()
    for tensor in tensors:
        tensor.record_stream(stream)  # keeps the allocator from reusing its memory before this stream has used it
    return Pending(event, device, result)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields all tensors on a GPU in a result or in arguments, without those of a handle: its launches keep these."""
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, RankGroup)):
        yield from _tensors([getattr(value, field.name) for field in dataclasses.fields(value)])

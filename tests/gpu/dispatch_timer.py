"""How much of a step its token dispatchers take, for any of Megatron's dispatchers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

STEPS = (
    "dispatch_preprocess",
    "token_dispatch",
    "dispatch_postprocess",
    "combine_preprocess",
    "token_combine",
    "combine_postprocess",
)


class DispatchTimer:
    """Sums seconds inside the six dispatcher steps of every MoE layer, forward and backward.

    Time that a rank waits for the others inside a step counts. A step's backward runs from the arrival of its outputs'
    gradients to the departure of its inputs'.

    Args:
        model: every layer of it that has a token_dispatcher is timed.
        device: cpu: by the wall clock; cuda: by events on the stream that the steps are given to.
    """

    def __init__(self, model: torch.nn.Module, device: str) -> None:
        self._clock = _StreamClock() if device == "cuda" else _WallClock()
        for layer in model.modules():
            dispatcher = getattr(layer, "token_dispatcher", None)
            for name in STEPS if dispatcher is not None else ():
                setattr(dispatcher, name, self._timed(getattr(dispatcher, name)))

    @property
    def seconds(self) -> float:
        """The sum so far. On a GPU it waits until the last step is done."""
        return self._clock.seconds

    def _timed(self, step: Callable) -> Callable:
        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            clock = self._clock
            args = self._mark(args, clock.stop)
            clock.start()
            try:
                result = step(*args, **kwargs)
            finally:
                clock.stop()
            if isinstance(result, tuple):
                return self._mark(result, clock.start)
            return self._mark((result,), clock.start)[0]

        return timed

    @staticmethod
    def _mark(values: tuple, on_backward: Callable[[], None]) -> tuple:
        """Returns the values; calls `on_backward` when the backward pass has the gradients of all of them."""
        places = [i for i, value in enumerate(values) if torch.is_tensor(value) and value.requires_grad]
        if not places:
            return values
        marked = list(values)
        for place, tensor in zip(places, _Mark.apply(on_backward, *(values[i] for i in places)), strict=True):
            marked[place] = tensor
        return tuple(marked)


class _WallClock:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._started


class _StreamClock:
    """Time between two places in the current stream; the host waits for neither."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._started = self._now()

    @property
    def seconds(self) -> float:
        for started, stopped in self._spans:
            stopped.synchronize()
            self._sum += started.elapsed_time(stopped) / 1e3
        self._spans.clear()
        return self._sum

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        self._spans.append((self._started, self._now()))

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Mark(torch.autograd.Function):
    """Identity on tensors that calls back in the backward pass."""

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.on_backward = on_backward
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.on_backward()
        return (None, *grads)

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
    """Sums wall-clock seconds inside the six dispatcher steps of every MoE layer, forward and backward.

    Time that a rank waits for the others inside a step counts. A step's backward runs from the arrival of its outputs'
    gradients to the departure of its inputs'.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Attaches to every layer of `model` that has a token_dispatcher."""
        self.seconds = 0.0
        self._started = 0.0
        for layer in model.modules():
            dispatcher = getattr(layer, "token_dispatcher", None)
            for name in STEPS if dispatcher is not None else ():
                setattr(dispatcher, name, self._timed(getattr(dispatcher, name)))

    def _timed(self, step: Callable) -> Callable:
        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            args = self._mark(args, self._leave)
            self._enter()
            try:
                result = step(*args, **kwargs)
            finally:
                self._leave()
            if isinstance(result, tuple):
                return self._mark(result, self._enter)
            return self._mark((result,), self._enter)[0]

        return timed

    def _enter(self) -> None:
        self._started = time.perf_counter()

    def _leave(self) -> None:
        self.seconds += time.perf_counter() - self._started

    @staticmethod
    def _mark(values: tuple, on_backward: Callable[[], None]) -> tuple:
        """The same values; `on_backward` is called when the backward pass has the gradients of all of them."""
        places = [i for i, value in enumerate(values) if torch.is_tensor(value) and value.requires_grad]
        if not places:
            return values
        marked = list(values)
        for place, tensor in zip(places, _Mark.apply(on_backward, *(values[i] for i in places)), strict=True):
            marked[place] = tensor
        return tuple(marked)


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

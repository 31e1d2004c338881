"""Which arguments were right before: a model makes the same calls again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

MAX_KNOWN = 256


def looks_of(settings: tuple[Any, ...], *tensors: Any) -> tuple[Hashable, ...]:
    """Calls that look the same are right or wrong for the same reason, but for the values of ids.

    settings: their types are looks, too, for True is 1. tensors: with lists of them, and what is wrong in their place.
    """
    looks: list[Hashable] = [settings, *map(type, settings)]
    for value in tensors:
        if value is None:  # to ask it whether it is a tensor takes as long as one's looks
            looks.append(None)
        elif isinstance(value, torch.Tensor):
            # one that is conjugated is complex
            looks += (value.dtype, value.shape, value.device, value.is_contiguous(), value.is_neg())
        elif isinstance(value, (list, tuple)):
            looks.append(looks_of((), *value))
        else:
            looks.append(value.__class__)
    return tuple(looks)


class KnownCalls:
    """The looks of calls that were right, and what follows from them."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def get(self, looks: Hashable) -> Any:
        """None: of others."""
        try:
            return self._known.get(looks)
        except TypeError:  # of something that has no hash, which is wrong
            return None

    def add(self, looks: Hashable, what: Any) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[looks] = what

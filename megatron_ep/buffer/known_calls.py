"""A cache of checked arguments, because a model repeats its calls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

MAX_KNOWN = 256


def key_of(settings: tuple[Any, ...], *tensors: Any) -> tuple[Hashable, ...]:
    """Returns the cache key of arguments: calls with equal keys pass or fail the same checks, except those of values.

    settings: arguments other than tensors; their types are part of the key, because True == 1. tensors: tensors, lists
        of tensors, None, or invalid values in their place.
    """
    key: list[Hashable] = [settings, *map(type, settings)]
    for value in tensors:
        if value is None:  # isinstance of torch.Tensor takes as long as a tensor's key
            key.append(None)
        elif isinstance(value, torch.Tensor):
            # There is no is_conj: only complex tensors can be conjugated.
            key += (value.dtype, value.shape, value.device, value.is_contiguous(), value.is_neg())
        elif isinstance(value, (list, tuple)):
            key.append(key_of((), *value))
        else:
            key.append(value.__class__)
    return tuple(key)


class KnownCalls:
    """The keys of calls that passed their checks, and what was derived from their arguments."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}

    def get(self, key: Hashable) -> Any:
        """Returns what was added for these arguments; None if nothing was."""
        try:
            return self.known.get(key)
        except TypeError:  # an argument without a hash is invalid
            return None

    def add(self, key: Hashable, what: Any) -> None:
        if len(self.known) >= MAX_KNOWN:
            self.known.clear()
        self.known[key] = what

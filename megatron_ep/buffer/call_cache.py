"""A cache of checked arguments, because a model repeats its calls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.autograd import forward_ad

MAX_CALLS = 256

Signature = tuple[Any, ...]


def signature(settings: tuple[Any, ...], x: Any, ids: Any, weights: Any, *others: Any) -> Signature | None:
    """Returns the cache key of arguments: calls with equal keys pass or fail the same checks, except those of values.

    Its first item is whether x or weights require a gradient. None if a tensor must be converted before it is used, or
    an argument is no tensor, such as a list of them. ids, weights and others may be None.

    settings: arguments other than tensors, with the types of numbers, because True == 1.
    """
    try:  # no loop over the tensors, because each call does this
        # There is no is_conj: only complex tensors can be conjugated.
        if not x.is_contiguous() or x.is_neg() or forward_ad._current_level >= 0:
            return None
        of_x = needs_gradient = x.requires_grad
        of_ids = of_weights = None
        if ids is not None:
            if not ids.is_contiguous():  # a view of integers is never negated
                return None
            of_ids = (ids.__class__, ids.dtype, ids.shape, ids.device)
        if weights is not None:
            if not weights.is_contiguous() or weights.is_neg():
                return None
            needs_gradient = of_x or weights.requires_grad
            of_weights = (weights.__class__, weights.dtype, weights.shape, weights.device)
        of_others: tuple[Any, ...] = ()
        for i, tensor in enumerate(others):
            if tensor is not None:
                if not tensor.is_contiguous() or tensor.is_neg():
                    return None
                of_others += (i, tensor.__class__, tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad)
        needs_gradient = needs_gradient and torch.is_grad_enabled()
        return (needs_gradient, settings, x.__class__, x.dtype, x.shape, x.device, of_x, of_ids, of_weights, of_others)
    except (AttributeError, RuntimeError):  # a sparse or nested tensor has no strides
        return None


class CallCache:
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
        """Keeps what was derived from arguments, unless their key is None."""
        if key is None:
            return
        if len(self.known) >= MAX_CALLS:
            self.known.clear()
        self.known[key] = what

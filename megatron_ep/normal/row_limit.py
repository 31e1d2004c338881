"""Overflow of a fixed number of received rows: no counts are exchanged with the host, so an overflow is detected on the
device and raised by the check before results are kept (`megatron_ep.raise_if_failed`).

R rows, L local experts.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator

import torch

from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.diagnosis import failures
from megatron_ep.errors import EPError, EPOverflowError
from megatron_ep.normal.api import Received

_limits: weakref.WeakValueDictionary[int, RowLimit] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class RowLimit:
    """The fixed number of rows of a layer or a buffer, and whether it overflowed.

    reason: message of an overflow.
    poisons: whether probabilities of rows are NaN after an overflow, so that the loss is NaN, and a trainer that only
        checks the loss takes no step. Otherwise tokens lose experts, and the caller has to check.
    """

    def __init__(self, reason: str, poisons: bool = True) -> None:
        self.reason = f"{reason}: nothing of this step is to be kept"
        self._poisons = poisons
        self.group: RankGroup | None = None  # group of the last dispatch
        self.over_budget: torch.Tensor | None = None  # bool [1], None before the first dispatch
        self.required: torch.Tensor | None = None  # int64 [1], most rows of a dispatch, unless overflows poison
        _limits[next(_numbers)] = self

    def note(self, group: RankGroup, overflow: torch.Tensor) -> torch.Tensor:
        """Notes the overflow [1] of a dispatch, not 0 if rows are missing. Returns bool [1], whether rows are missing.

        Raises RuntimeError if a CUDA graph captures the first dispatch.
        """
        over = overflow != 0
        if self.over_budget is None:
            if over.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("dispatch once before a CUDA graph captures it: what counts overflows is new")
            with torch.inference_mode(False):  # `reset` also writes to it outside of inference mode
                self.over_budget = torch.zeros_like(over)
        self.group = group
        self.over_budget.logical_or_(over)
        return over

    def admit(self, received: Received) -> torch.Tensor:
        """Notes whether rows are missing, and raises, as `note` does. Returns the probs [R]."""
        over = self.note(received.handle.group, received.overflow)
        if not self._poisons:
            rows = received.tokens_per_expert.sum(0, keepdim=True)
            if self.required is None:
                with torch.inference_mode(False):
                    self.required = torch.zeros_like(rows)
            torch.maximum(self.required, rows, out=self.required)
            return received.probs
        nothing = torch.zeros_like(over, dtype=received.probs.dtype)
        return received.probs + nothing.masked_fill_(over, float("nan"))

    def reset(self) -> None:
        """Forgets the overflow."""
        for noted in (self.over_budget, self.required):
            if noted is not None:
                noted.zero_()

    def report_unseen(self) -> None:
        """Logs an overflow that no call has raised."""
        if self.over_budget is not None and self in _running() and bool(self.over_budget):
            _log(self)


def _log(limit: RowLimit) -> None:
    failures.log.error("a call of megatron_ep overflowed and no call has raised it: %s", limit.reason)


def _running() -> dict[RowLimit, RankGroup]:
    """Returns the limits with dispatches on open buffers, and these buffers."""
    return {limit: limit.group for limit in _limits.values() if limit.group is not None and limit.group.is_open}


def _overflowed() -> dict[RowLimit, RankGroup]:
    """Returns the limits with an overflow since their reset, as far as the current streams have run. The host waits
    once per device, regardless of the number of layers."""
    of_device: dict[torch.device, list[tuple[RowLimit, RankGroup, torch.Tensor]]] = {}
    for limit, group in _running().items():
        assert limit.over_budget is not None, "it has run"
        of_device.setdefault(limit.over_budget.device, []).append((limit, group, limit.over_budget))
    over = {}
    for limits in of_device.values():
        flags = torch.cat([flag for _, _, flag in limits]).tolist()
        over.update({limit: group for (limit, group, _), is_over in zip(limits, flags, strict=True) if is_over})
    return over


class _AllLimits:
    """The limits of all layers, registered for `megatron_ep.raise_if_failed` and the exit of the process."""

    has_unseen_failure = False  # the host does not know overflows without waiting for the GPU

    @property
    def is_open(self) -> bool:
        return bool(_running())

    def raise_if_known_to_have_failed(self) -> None:
        """Does nothing: see `has_unseen_failure`."""

    def raise_if_failed(self) -> None:
        """Raises EPOverflowError once for an overflow; other ranks then get EPAbortError."""
        for group in set(_running().values()):
            group.synchronize()  # dispatches may have run on other streams
        over = _overflowed()
        if over:
            reason = "; ".join(dict.fromkeys(limit.reason for limit in over))
            for limit in over:
                limit.reset()
            for group in set(over.values()):
                group.refuse(failed=True, reason=reason, is_raised=True)
            raise EPOverflowError(reason)

    def abort(self, reason: str) -> None:
        """Does nothing: the buffers are aborted themselves."""

    def leave_to_parent(self) -> None:
        """Does nothing: limits of closed buffers are ignored."""

    def report_unseen(self) -> None:
        for limit in _overflowed():
            _log(limit)


_all_limits = _AllLimits()
failures.watch(_all_limits)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raises EPOverflowError for an error inside if the rows of a layer were too few, because NaN then caused it."""
    try:
        yield
    except EPError:
        raise
    except Exception as error:
        over = None
        with contextlib.suppress(RuntimeError):  # if the GPU no longer works, the error itself says more
            over = next(iter(_overflowed()), None)
        if over is None:
            raise
        raise EPOverflowError(over.reason) from error


def clear_behind(rows: torch.Tensor, counts: torch.Tensor) -> None:
    """Zeros the rows [R, H] after the last expert's, which are undefined after a dispatch without gradients."""
    place = torch.arange(rows.shape[0], device=rows.device)
    rows.masked_fill_((place >= counts.sum()).unsqueeze(1), 0)


def counts_within(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the rows of each expert, int64 [L], among the first R: dispatch also counts rows that did not fit."""
    ends = counts.cumsum(0).clamp_(max=rows)
    return ends.diff(prepend=ends.new_zeros(1))

"""A fixed number of rows for what a rank receives: the host asks nobody how many there are, and an overflow is found
on the device, without a wait, and raised by the check before results are kept.

R rows in all, L local experts.
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
    """A fixed number of rows, of a layer or a buffer, and whether it has been too few.

    Args:
        reason: what is said of an overflow.
        poisons: whether the rows' probabilities are NaN after an overflow, so that the loss is, and no step is taken by
            a trainer that only looks at that. Otherwise tokens lose experts, and somebody must ask.
    """

    def __init__(self, reason: str, poisons: bool = True) -> None:
        self.reason = f"{reason}: nothing of this step is to be kept"
        self._poisons = poisons
        self.group: RankGroup | None = None  # of the last run
        self.over_budget: torch.Tensor | None = None  # bool [1], once there was a dispatch
        self.required: torch.Tensor | None = None  # int64 [1], the most rows that one had, unless it poisons
        _limits[next(_numbers)] = self

    def note(self, group: RankGroup, overflow: torch.Tensor) -> torch.Tensor:
        """Notes the overflow [1] of a dispatch, not 0 if rows are missing. Returns bool [1], whether rows are missing.

        Raises:
            RuntimeError: a CUDA graph captures the first one.
        """
        over = overflow != 0
        if self.over_budget is None:
            if over.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("dispatch once before a CUDA graph captures it: what counts overflows is new")
            with torch.inference_mode(False):  # it is reset outside, too
                self.over_budget = torch.zeros_like(over)
        self.group = group
        self.over_budget.logical_or_(over)
        return over

    def admit(self, received: Received) -> torch.Tensor:
        """Notes whether rows are missing, and raises, as `note` does; the probs [R]."""
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
        """Into the log, if there is an overflow that nobody has asked for."""
        if self.over_budget is not None and self in _running() and bool(self.over_budget):
            _log(self)


def _log(limit: RowLimit) -> None:
    failures.log.error("a call of megatron_ep overflowed and no call has raised it: %s", limit.reason)


def _running() -> dict[RowLimit, RankGroup]:
    """The limits that rows may have gone beyond, with their buffers."""
    return {limit: limit.group for limit in _limits.values() if limit.group is not None and limit.group.is_open}


def _overflowed() -> dict[RowLimit, RankGroup]:
    """Returns the limits with an overflow since their reset, as far as the current streams have run. The host waits
    once per device, however many layers there are."""
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
    """What `megatron_ep.raise_if_failed` and the end of the process ask, for the limits of all layers at once."""

    has_unseen_failure = False  # the GPU alone knows

    @property
    def is_open(self) -> bool:
        return bool(_running())

    def raise_if_known_to_have_failed(self) -> None:
        """The GPU alone knows."""

    def raise_if_failed(self) -> None:
        """Raises EPOverflowError, once for an overflow; the other ranks then get EPAbortError."""
        for group in set(_running().values()):
            group.synchronize()  # whatever stream a dispatch was on
        over = _overflowed()
        if over:
            reason = "; ".join(dict.fromkeys(limit.reason for limit in over))
            for limit in over:
                limit.reset()
            for group in set(over.values()):
                group.refuse(failed=True, reason=reason, is_told=True)
            raise EPOverflowError(reason)

    def abort(self, reason: str) -> None:
        """Nothing waits here: the buffers are told by themselves."""

    def leave_to_parent(self) -> None:
        """Limits of buffers that are closed count for nothing."""

    def report_unseen(self) -> None:
        for limit in _overflowed():
            _log(limit)


_all_limits = _AllLimits()
failures.watch(_all_limits)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """An error inside is an EPOverflowError if the rows of a layer were too few: it is NaN that somebody has found."""
    try:
        yield
    except EPError:
        raise
    except Exception as error:
        over = None
        with contextlib.suppress(RuntimeError):  # of a GPU that no longer answers: the error itself says more
            over = next(iter(_overflowed()), None)
        if over is None:
            raise
        raise EPOverflowError(over.reason) from error


def clear_behind(rows: torch.Tensor, counts: torch.Tensor) -> None:
    """Makes zeros of the rows [R, H] behind the last expert's, where a dispatch without gradients leaves anything."""
    place = torch.arange(rows.shape[0], device=rows.device)
    rows.masked_fill_((place >= counts.sum()).unsqueeze(1), 0)


def counts_within(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows of each expert, int64 [L], that lie within the first R: dispatch counts those that did not fit, too."""
    ends = counts.cumsum(0).clamp_(max=rows)
    return ends.diff(prepend=ends.new_zeros(1))

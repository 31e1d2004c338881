"""A fixed number of rows for what a rank receives: the host asks nobody how many there are, and an overflow is found
on the device, without a wait, and told to whoever asks before results are kept.

R rows in all, L local experts.
"""

from __future__ import annotations

import torch

import megatron_ep as ep
from megatron_ep import failures
from megatron_ep.rank_group import RankGroup

MESSAGE = (
    "a rank was sent more rows than moe_expert_rank_capacity_factor makes room for, and tokens lost experts: nothing "
    "of this step is to be kept; raise the factor"
)


class RankCapacity:
    """One layer's rows, and whether they have been too few.

    Args:
        poisons: whether the rows' probabilities are NaN after an overflow, so that the loss is, and no step is taken by
            a trainer that only looks at that. Otherwise tokens lose experts, and somebody must ask.
    """

    def __init__(self, poisons: bool) -> None:
        self._poisons = poisons
        self._buffer: RankGroup | None = None
        self.over_budget: torch.Tensor | None = None  # bool [1], once the layer has run
        failures.watch(self)

    def admit(self, received: ep.Received) -> tuple[torch.Tensor, torch.Tensor]:
        """Notes whether rows are missing; counts int64 [L] that end within the rows, and probs [R].

        Raises:
            RuntimeError: a CUDA graph captures the layer's first run.
        """
        over = received.overflow != 0
        if self.over_budget is None:
            if over.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("run the layer once before a CUDA graph captures it: what counts overflows is new")
            self.over_budget = torch.zeros_like(over)
        self._buffer = received.handle.buffer
        self.over_budget.logical_or_(over)
        counts = received.tokens_per_expert
        ends = counts.cumsum(0).clamp_(max=received.x.shape[0])  # dispatch counts those without a place too
        counts = ends.diff(prepend=ends.new_zeros(1))
        if not self._poisons:
            return counts, received.probs
        nothing = torch.zeros_like(over, dtype=received.probs.dtype)
        return counts, received.probs + nothing.masked_fill_(over, float("nan"))

    def reset(self) -> None:
        """Forgets the overflow."""
        if self.over_budget is not None:
            self.over_budget.zero_()

    # ---- what `megatron_ep.raise_if_failed` and the end of the process ask

    @property
    def is_open(self) -> bool:
        return self._buffer is not None and self._buffer.is_open

    def raise_if_failed(self) -> None:
        """Raises EPOverflowError, once for an overflow; the other ranks then get EPAbortError."""
        assert self._buffer is not None and self.over_budget is not None, "asked of what is not open"
        self._buffer.synchronize()  # whatever stream a dispatch was on
        if bool(self.over_budget):
            self.reset()
            self._buffer.refuse(failed=True, reason=MESSAGE)
            raise ep.EPOverflowError(MESSAGE)

    def abort(self, reason: str) -> None:
        """Nothing waits here: the buffer is told by itself."""

    def report_unseen(self) -> None:
        if self.is_open and self.over_budget is not None and bool(self.over_budget):
            failures.log.error("a call of megatron_ep overflowed and nobody has asked for it: %s", MESSAGE)

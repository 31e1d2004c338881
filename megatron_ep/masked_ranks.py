"""The ranks that the low-latency mode goes on without."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ep.backends.low_latency_mask import Masks
from megatron_ep.buffer import LocalCluster
from megatron_ep.errors import EPError
from megatron_ep.low_latency_calls import LowLatencyCalls
from megatron_ep.rank_group import RankGroup

ON_DEAD_RANK = ("raise", "mask")


class MaskedRanks:
    """What `LowLatency` shows of them."""

    buffer: RankGroup
    _calls: LowLatencyCalls

    @property
    def active_ranks(self) -> Any:
        """int32 [W] on the buffer's device, a list of them with a LocalCluster: 1, or 0 for a masked rank.

        Calls write 0 when they mask a rank. Writing 0 masks a rank from the next call on, and this rank for that one; a
        rank's own entry counts for nothing. Writing 1 brings nobody back, the next call writes 0 again: `Buffer.reset`
        does, for ranks that live, and for others a new buffer. On a GPU to be written on the stream of the calls.

        Ranks may see different ones: two ranks go on together as long as neither has masked the other. Raises
        ValueError with on_dead_rank="raise".
        """
        return self._of_ranks(self._masks.active)

    @property
    def dropped_picks(self) -> Any:
        """int64 [2] on the buffer's device, a list of them with a LocalCluster: how many picks of this rank's tokens
        dispatches have not sent, and combines gone without (those of their dispatches among them), since the beginning
        or the last reset, because the expert's rank was masked. Raises ValueError with on_dead_rank="raise"."""
        return self._of_ranks(self._masks.dropped)

    def masked_ranks(self) -> Any:
        """The ranks that calls have masked, a list of lists with a LocalCluster; at once, without waiting for what runs
        on a GPU. Raises ValueError with on_dead_rank="raise"."""
        masks = self._masks
        return self._of_ranks([masks.masked(i) for i in range(len(self.buffer.ranks))])

    def readmit(self, rank: int) -> None:
        """Not possible: raises EPError, which says what is."""
        raise EPError(
            f"rank {rank} cannot be taken back by itself: if its process lives, reset() of the buffer on every rank "
            "brings back all masked ranks; else build a new buffer"
        )

    @property
    def _masks(self) -> Masks:
        if self._calls.masks is None:
            raise ValueError("on_dead_rank is 'raise', must be 'mask' for this")
        return self._calls.masks

    def _of_ranks(self, values: list[Any]) -> Any:
        return list(values) if isinstance(self.buffer, LocalCluster) else values[0]

    def _check_renormalize(self, xs: list[torch.Tensor], factors: list[torch.Tensor] | None, sum_at: str) -> None:
        if self._calls.masks is None or factors is None or sum_at != "token":
            raise ValueError(
                "renormalize is True, must be False unless on_dead_rank is 'mask' and weights are given at the token"
            )
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*xs, *factors)):
            raise ValueError("renormalize is True, must be False where a gradient is needed")


def check_policy(on_dead_rank: object, mask_timeout: object, timeout: float) -> None:
    """Raises ValueError unless LowLatency can be made with these. timeout: `Config.timeout_seconds`."""
    if on_dead_rank not in ON_DEAD_RANK:
        raise ValueError(f"on_dead_rank is {on_dead_rank!r}, must be one of {', '.join(map(repr, ON_DEAD_RANK))}")
    if mask_timeout is None:
        return
    ok = isinstance(mask_timeout, (int, float)) and not isinstance(mask_timeout, bool) and 0 < mask_timeout <= timeout
    if not ok or on_dead_rank != "mask":
        raise ValueError(
            f"mask_timeout is {mask_timeout!r}, must be a number of seconds in (0, {timeout:g}], Config.timeout, with "
            "on_dead_rank 'mask', else None"
        )

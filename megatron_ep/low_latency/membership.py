"""Masked ranks, without which the low-latency mode continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron_ep.buffer.distributed import DistributedRankGroup
from megatron_ep.buffer.low_latency_mask import Masks
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import Config, is_number, require_int, require_one_of
from megatron_ep.errors import EPError
from megatron_ep.low_latency.calls import LowLatencyCalls
from megatron_ep.meeting.processes import OfOneProcess

ON_DEAD_RANK = ("raise", "mask")


class MaskedRanks(OfOneProcess):
    """The methods of `LowLatency` for masked ranks."""

    _group: RankGroup
    _calls: LowLatencyCalls
    _settings: dict[str, Any]  # arguments that are equal on all ranks

    @property
    def active_ranks(self) -> Any:
        """int32 [W] on the buffer's device, a list of them with a LocalCluster: 1, or 0 for a masked rank.

        Calls write 0 when they mask a rank. Writing 0 masks a rank from the next call on, and that rank then masks this
        one; a rank's own entry has no effect. Writing 1 does not bring a rank back, because the next call writes 0
        again: use `Buffer.reset` for ranks that live, `readmit` or a new buffer for others. On a GPU write on the
        stream of the calls.

        Values may differ between ranks if callers have written different ones: two ranks continue together as long as
        neither has masked the other. A rank that is masked because it was late gets an EPMaskedError instead.
        Raises ValueError with on_dead_rank="raise".
        """
        return self._group.for_caller(list(self._masks.active))

    @property
    def dropped_choices(self) -> Any:
        """int64 [2] on the buffer's device, a list of them with a LocalCluster: choices of this rank's tokens that
        dispatches did not send, and that combines lacked (including those of their dispatches), because the expert's
        rank was masked. Counted since creation or the last reset. Raises ValueError with on_dead_rank="raise"."""
        return self._group.for_caller(list(self._masks.dropped))

    def masked_ranks(self) -> Any:
        """Returns the ranks that calls have masked, a list of lists with a LocalCluster, without waiting for the GPU.

        Logs a warning for each new one. Raises ValueError with on_dead_rank="raise".
        """
        masks = self._masks
        masks.log_news()
        return self._group.for_caller([masks.masked(i) for i in range(len(self._group.ranks))])

    def readmit(self, ranks: int | Sequence[int], store: dist.Store) -> None:
        """Readmits ranks whose processes have ended, also because of an EPMaskedError, and were started again.

        Collective over all ranks: ranks that stayed call this, with no low-latency call in flight; ranks that came back
        call `megatron_ep.rejoin`. Only the memory of the latter is mapped again, at its former addresses, so that CUDA
        graphs with low-latency calls stay valid. The state is then that after `Buffer.reset`: no rank is masked, and
        the buffer's normal mode works too. Former processes are known to have ended, so they write nothing any more.

        ranks: all ranks that have come back; no other rank may be missing.
        store: an empty store that all ranks reach: use a new one, or a PrefixStore with a new prefix, each time.

        Raises ValueError with on_dead_rank="raise", for ranks that did not come back or are not in another process, if
        a call is in flight, for a buffer with another LowLatency or `Config.max_tokens`, and for a LocalCluster. Raises
        EPError if a rank's former process lives, or if a rank does not come within Config.timeout: this rank can then
        continue without them as before. Also raises EPError if a GPU's driver maps the memory at other addresses, and
        over NVSHMEM, NCCL and TCP: then create a new buffer.
        """
        self._check_policy()
        returned = list(ranks) if isinstance(ranks, Sequence) else [ranks]
        group = self._group
        for rank in returned:
            require_int("ranks", rank, 0, group.topology.world_size - 1)
        if not isinstance(group, DistributedRankGroup):
            raise ValueError("the ranks of a LocalCluster are in one process: its reset() brings back all masked ranks")
        if not self._calls.ranks.memories or not group.can_take_back:
            raise EPError(
                "readmit maps the memory of processes anew, which this buffer's fabric, "
                f"{group.fabric}, does not: make a new buffer"
            )

        def check() -> None:
            check_restorable(group.config)
            self._calls.check_received()
            if (parts := len(self._calls.backend.parts)) > 1:
                raise ValueError(f"the buffer has {parts} LowLatency, must have this one alone")
            self._calls.backend.drain()

        # These steps match those of `megatron_ep.rejoin`, which runs at the same time.
        with group.rendezvous_again(store):
            group.take_back(returned, check)
            group.agree_on(lambda: None, self._settings)
            group.renew(self._calls.ranks.memories, returned)
            group.restart()

    def _check_policy(self) -> None:
        if self._calls.masks is None:
            raise ValueError("on_dead_rank is 'raise', must be 'mask' for this")

    @property
    def _masks(self) -> Masks:
        self._check_policy()
        assert self._calls.masks is not None
        return self._calls.masks


def check_restorable(config: Config) -> None:
    """Raises ValueError for a buffer with calls in one hop, which `LowLatency.readmit` does not restore."""
    if config.max_tokens is not None:
        raise ValueError(f"Config.max_tokens is {config.max_tokens}, must be None where ranks rejoin")


def check_policy(on_dead_rank: object, mask_timeout: object, timeout: float) -> None:
    """Raises ValueError for invalid values of LowLatency's arguments. timeout: `Config.timeout_seconds`."""
    require_one_of("on_dead_rank", on_dead_rank, ON_DEAD_RANK)
    if mask_timeout is None:
        return
    ok = is_number(mask_timeout) and 0 < mask_timeout <= timeout
    if not ok or on_dead_rank != "mask":
        raise ValueError(
            f"mask_timeout is {mask_timeout!r}, must be a number of seconds in (0, {timeout:g}], Config.timeout, with "
            "on_dead_rank 'mask', else None"
        )

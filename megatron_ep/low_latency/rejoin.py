"""Rejoins a rank whose process has ended and was started again."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep.buffer.buffer import buffer_of
from megatron_ep.buffer.distributed import DistributedRankGroup, patience
from megatron_ep.config import MAX_RANKS, Config, Topology, require_int
from megatron_ep.fabrics import choice
from megatron_ep.low_latency.api import LowLatency
from megatron_ep.low_latency.membership import check_restorable
from megatron_ep.meeting.rendezvous import StoreRendezvous


def rejoin(
    store: dist.Store,
    rank: int,
    world_size: int,
    config: Config,
    topology: Topology | None = None,
    *,
    device: str | torch.device = "cpu",
    **settings: Any,
) -> LowLatency:
    """Returns the low-latency mode, with its buffer, for a rank that others have masked and that was started again.

    Collective: the others call `LowLatency.readmit`. No process group is needed.

    store: the store that the others pass to `LowLatency.readmit`.
    rank, world_size: this rank, and the number of ranks of the buffer.
    config, topology, device: see `Buffer`; settings: see `LowLatency`. All must equal the values on other ranks.

    Raises ValueError for values that differ between ranks, and as `LowLatency.readmit`.
    """
    inspect.signature(LowLatency).bind(None, **settings)  # raises before the others wait
    require_int("world_size", world_size, 1, MAX_RANKS)
    require_int("rank", rank, 0, world_size - 1)
    if isinstance(config, Config):
        check_restorable(config)
    rendezvous = StoreRendezvous.over(store, rank, world_size, timedelta(seconds=patience(config)))
    # On GPUs only ranks of one machine can rejoin.
    group = DistributedRankGroup(rendezvous, config, topology, device, choice.Choice("p2p", "as it was"))
    low_latency = LowLatency(buffer_of(group), **settings)
    group.restart()
    return low_latency

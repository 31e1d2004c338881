"""Return of a rank whose process has ended."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep.buffer.buffer import buffer_of
from megatron_ep.buffer.distributed import DistributedRankGroup, patience
from megatron_ep.config import Config, Topology
from megatron_ep.fabrics import choice
from megatron_ep.low_latency.api import LowLatency
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
    """Returns the low-latency mode, with its buffer, of a rank that the others have masked and that was started again.

    Collective: the others call `LowLatency.readmit`. No process group is needed.

    store: the store that the others pass to `LowLatency.readmit`.
    rank, world_size: of the buffer.
    config, topology, device: as for `Buffer`; settings: as for `LowLatency`. All must equal the others' values.

    Raises ValueError for values that differ from the others', and as `LowLatency.readmit`.
    """
    inspect.signature(LowLatency).bind(None, **settings)  # before the others wait
    rendezvous = StoreRendezvous.over(store, rank, world_size, timedelta(seconds=patience(config)))
    # on GPUs rejoin is for the ranks of one machine
    group = DistributedRankGroup(rendezvous, config, topology, device, choice.Choice("p2p", "as it was"))
    low_latency = LowLatency(buffer_of(group), **settings)
    group.restart()
    return low_latency

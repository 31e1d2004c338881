"""How a rank comes back whose process has ended."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep.backends.rendezvous import StoreRendezvous
from megatron_ep.buffer import Buffer, patience
from megatron_ep.config import Config, Topology
from megatron_ep.low_latency.api import LowLatency


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
    """The low-latency mode, and its buffer, of a rank that the others have masked and whose process was started again.
    Collective: the others call `LowLatency.readmit`. No process group is needed.

    store: which all ranks reach, the same as theirs, see there.
    rank, world_size: of the buffer.
    config, topology, device: as for `Buffer`, and settings as for `LowLatency`: what the others gave.

    Raises ValueError for what differs from theirs, and as `LowLatency.readmit`.
    """
    rendezvous = StoreRendezvous.over(store, rank, world_size, timedelta(seconds=patience(config)))
    low_latency = LowLatency(Buffer.over(rendezvous, config, topology, device), **settings)
    assert isinstance(low_latency.buffer, Buffer)
    low_latency.buffer.restart()
    return low_latency

"""What a fabric needs to connect the ranks of a buffer on GPUs, and what it returns.

Each fabric is a module of this package with two functions. Both are collective: what goes wrong on one rank is raised
on all of them, and no wait for a rank that does not come is without a bound.

    connect(rank, heap, begin) -> Connection
    low_latency(rank, heap, connection) -> LowLatencyConnection
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ep.config import Config
from megatron_ep.fabrics.tcp import Network
from megatron_ep.meeting.rendezvous import StoreRendezvous


@dataclass(frozen=True)
class GpuRank:
    """This process's rank, which is to be connected with the others.

    machines: of all ranks, as users may read them.
    pids, pcis: of all ranks, their processes and the PCI addresses of their GPUs.
    device: the GPU of this rank.
    blocks: of each launch on it, one an SM.
    """

    rendezvous: StoreRendezvous
    config: Config
    machines: Sequence[str]
    pids: Sequence[int]
    pcis: Sequence[str | None]
    device: torch.device
    blocks: int

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def processes(self) -> str:
        """Names the processes that may map each other's memory."""
        return " ".join(map(str, self.pids))


@dataclass
class Connection:
    """What launches of the normal mode go through, and what lives as long as they do.

    group: the compiled group.
    memories: what this process maps, by rank; None for a rank that it does not map.
    network_memory: of this rank, where a library has it.
    library_timeout: seconds after which each wait of a launch ends, where a library carries the puts and may wait
        longer inside of it.
    network, report: the thread that carries what goes to other nodes, and what the GPU reports to it.
    reason: what to say of the connection.
    """

    group: Any
    memories: list[Any] = field(default_factory=list)
    network_memory: Any = None
    library_timeout: float | None = None
    network: Network | None = None
    report: Any = None
    reason: str = ""


@dataclass
class LowLatencyConnection:
    """What launches of the low-latency mode go through: see `Connection`."""

    group: Any
    memories: list[Any] = field(default_factory=list)
    network_memory: Any = None

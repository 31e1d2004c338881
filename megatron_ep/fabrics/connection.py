"""Defines what a fabric needs to connect the ranks of a buffer on GPUs, and what it returns.

Each fabric is a module of this package with two functions. Both are collective: an error on one rank is raised on all
of them, and every wait for another rank has a bound.

    connect(rank, heap, begin) -> Connection
    low_latency(rank, heap, connection) -> LowLatencyConnection
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megatron_ep import _C
from megatron_ep.config import Config
from megatron_ep.fabrics.rank_info import RankInfo, machines
from megatron_ep.meeting.rendezvous import StoreRendezvous

if TYPE_CHECKING:
    from megatron_ep.fabrics.tcp import Network


@dataclass(frozen=True)
class GpuRank:
    """The rank of this process, and what a fabric needs to know about all ranks.

    infos: what each rank has told about itself.
    device: GPU of this rank.
    blocks: thread blocks of each launch on it, one per SM.
    memory: how ranks that p2p connects map each other's memory, see `peer_memory.py`.
    """

    rendezvous: StoreRendezvous
    config: Config
    infos: Sequence[RankInfo]
    device: torch.device
    blocks: int
    memory: str

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def machines(self) -> list[str]:
        """The machine of each rank, as shown to users."""
        return machines(self.infos)

    @property
    def gpus(self) -> list[str | None]:
        """The UUID of each rank's GPU."""
        return [info.gpu for info in self.infos]

    @property
    def processes(self) -> str:
        """Names the processes that may map each other's memory."""
        return " ".join(str(info.pid) for info in self.infos)


@dataclass
class LowLatencyConnection:
    """What launches of the low-latency mode use, and what must live as long as they run.

    launcher: compiled launcher of the ranks of this process.
    memories: mapped memory of each rank; None for a rank that is not mapped.
    network_memory: symmetric memory of this rank, if a library allocates it.
    """

    launcher: Any
    memories: list[Any] = field(default_factory=list)
    network_memory: Any = None


@dataclass
class Connection(LowLatencyConnection):
    """What launches of the normal mode use.

    library_timeout: seconds after which each wait of a launch ends, if a library carries the puts and may itself wait
        longer.
    network, report: thread that carries what goes to other nodes, and what the GPU reports to it.
    reason: description of the connection.
    """

    library_timeout: float | None = None
    network: Network | None = None
    report: Any = None
    reason: str = ""

    @property
    def maps_all_ranks(self) -> bool:
        return self.network is None and self.network_memory is None


def over_library(rank: GpuRank, heap: _C.Heap, group: Callable[..., Any], memory: Any, reason: str) -> Connection:
    """Returns the connection over a library's symmetric memory. group: constructor of the compiled group."""
    made = group(
        heap=heap,
        rank=rank.rank,
        memory=memory,
        device=rank.device.index,
        num_sms=rank.blocks,
        timeout=rank.config.timeout_seconds,
    )
    return Connection(made, network_memory=memory, library_timeout=rank.config.timeout_seconds, reason=reason)

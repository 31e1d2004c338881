"""The ranks of a DeepEP buffer: a process group of torch, or a communicator of mpi4py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_ep.buffer.buffer import Buffer, buffer_of
from megatron_ep.buffer.distributed import DistributedRankGroup, patience
from megatron_ep.config import Config
from megatron_ep.meeting.place import is_known, opened_place, place_of
from megatron_ep.meeting.rendezvous import StoreRendezvous


class Communicator(Protocol):
    """The methods of mpi4py's communicators that this module calls."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...

    def bcast(self, obj: Any, root: int = 0) -> Any: ...


@dataclass(frozen=True)
class BufferRanks:
    """The ranks of a DeepEP buffer, and this one among them. buffer: creates a buffer of all ranks; collective."""

    rank: int
    size: int
    buffer: Callable[[Config, torch.device], Buffer]


def ranks_of(group: dist.ProcessGroup | None, comm: Communicator | None = None) -> BufferRanks:
    """Returns the ranks of a group of any backend, or else of comm. Raises ValueError without either.

    With comm torch.distributed need not be initialised. It is collective then: rank 0 opens a TCPStore and broadcasts
    its address.
    """
    if group is not None:
        if is_known(group) is not None:
            place_of(group).publish()
        return BufferRanks(group.rank(), group.size(), lambda config, device: Buffer(group, config, device=device))
    if comm is None:
        raise ValueError("group is None, must be a process group, or comm a communicator of mpi4py")
    rank, size = comm.Get_rank(), comm.Get_size()
    place = opened_place(rank, size, comm.bcast)

    def buffer(config: Config, device: torch.device) -> Buffer:
        rendezvous = StoreRendezvous.at(place, timedelta(seconds=patience(config)))
        return buffer_of(DistributedRankGroup(rendezvous, config, None, device))

    return BufferRanks(rank, size, buffer)

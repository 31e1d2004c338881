"""The ranks of a DeepEP buffer: a process group of torch, or a communicator of mpi4py."""

from __future__ import annotations

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


class BufferRanks(Protocol):
    rank: int
    size: int

    def buffer(self, config: Config, device: torch.device) -> Buffer:
        """Creates a buffer of all ranks. Collective."""


class GroupRanks:
    """The ranks of a process group of any backend."""

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size = group.rank(), group.size()
        self._group = group
        if is_known(group) is not None:
            place_of(group).tell()

    def buffer(self, config: Config, device: torch.device) -> Buffer:
        return Buffer(self._group, config, device=device)


class CommunicatorRanks:
    """The ranks of a communicator; torch.distributed need not be initialised. Construction is collective: rank 0 opens
    a TCPStore and broadcasts its address."""

    def __init__(self, comm: Communicator):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._place = opened_place(self.rank, self.size, comm.bcast)

    def buffer(self, config: Config, device: torch.device) -> Buffer:
        rendezvous = StoreRendezvous.at(self._place, timedelta(seconds=patience(config)))
        return buffer_of(DistributedRankGroup(rendezvous, config, None, device))


def ranks_of(group: dist.ProcessGroup | None, comm: Communicator | None) -> BufferRanks:
    """Returns the ranks of group, or else of comm. Raises ValueError without either."""
    if group is not None:
        return GroupRanks(group)
    if comm is None:
        raise ValueError("group is None, must be a process group, or comm a communicator of mpi4py")
    return CommunicatorRanks(comm)

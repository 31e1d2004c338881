"""The ranks of a DeepEP buffer: of a process group of torch, or of a communicator of MPI."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_ep.backends.addresses import VARIABLE, address_in
from megatron_ep.backends.rendezvous import StoreRendezvous
from megatron_ep.buffer import Buffer, buffer_of
from megatron_ep.config import Config
from megatron_ep.group.distributed import RENDEZVOUS_S, DistributedRankGroup, patience

# Opened by this process: its buffers, and those of other ranks, may outlive who asked for them.
_stores: list[dist.Store] = []


class Communicator(Protocol):
    """What is asked of one of mpi4py."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...

    def bcast(self, obj: Any, root: int = 0) -> Any: ...


class BufferRanks(Protocol):
    rank: int
    size: int

    def buffer(self, config: Config, device: torch.device) -> Buffer:
        """Creates a buffer of all ranks. Collective."""


class GroupRanks:
    """A group of any backend."""

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size = group.rank(), group.size()
        self._group = group

    def buffer(self, config: Config, device: torch.device) -> Buffer:
        return Buffer(self._group, config, device=device)


class CommunicatorRanks:
    """A communicator, without torch.distributed being initialised. Construction is collective: rank 0 opens a store of
    torch, and tells the others where."""

    def __init__(self, comm: Communicator):
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._made = 0
        timeout = timedelta(seconds=RENDEZVOUS_S)
        opened = None
        if self.rank == 0:
            wanted = os.environ.get(VARIABLE)
            host = address_in(wanted) if wanted else socket.gethostname()
            opened = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        host, port = comm.bcast(None if opened is None else (opened.host, opened.port), root=0)
        self._store = opened or dist.TCPStore(host, port, is_master=False, timeout=timeout)
        _stores.append(self._store)

    def buffer(self, config: Config, device: torch.device) -> Buffer:
        self._made += 1
        store = dist.PrefixStore(str(self._made), self._store)
        rendezvous = StoreRendezvous.over(store, self.rank, self.size, timedelta(seconds=patience(config)))
        return buffer_of(DistributedRankGroup(rendezvous, config, None, device))


def ranks_of(group: dist.ProcessGroup | None, comm: Communicator | None) -> BufferRanks:
    """group, or else comm. Raises ValueError without either."""
    if group is not None:
        return GroupRanks(group)
    if comm is None:
        raise ValueError("group is None, must be a process group, or comm a communicator of mpi4py")
    return CommunicatorRanks(comm)

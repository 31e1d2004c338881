"""Buffers: what holds the symmetric heaps of all ranks, in one process or in many."""

from __future__ import annotations

import socket
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep import _C
from megatron_ep.backends import connect, cuda
from megatron_ep.backends.host import HostBackend
from megatron_ep.backends.meeting import Meeting
from megatron_ep.config import Config, Topology, require_int, require_type
from megatron_ep.errors import EPError
from megatron_ep.rank_group import RankGroup

# Construction and reset wait this long for the other ranks, or Config.timeout if that is longer: they may still be in a
# wait of their own.
MEETING_S = 60.0


class LocalCluster(RankGroup):
    """All ranks in this process. `dispatch` and `combine` take and return lists of W tensors, one per rank.

    nodes, ranks_per_node: the topology, N x G.
    config: as for Buffer.
    device: "cpu", or "cuda" for a GPU that all ranks share: torch's current one, unless the index is given. A launch
        runs the kernels of all ranks together, so W * Config.num_sms SMs must be there.
    threads: OS threads that share the ranks' work.
    seed: runs all roles on one thread in a random order, with a network between nodes that delays and reorders. The
        same seed gives the same interleaving; a wait expires when no role can run any more, whatever Config.timeout
        says.
    lost_signal: with a seed, the number (from 1) of the network signal that is lost, to see what happens then. 0: none.
    Raises ValueError for arguments that are out of range.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        config: Config,
        *,
        device: str | torch.device = "cpu",
        threads: int = 1,
        seed: int | None = None,
        lost_signal: int = 0,
    ):
        self.topology = Topology(nodes, ranks_per_node)
        require_type("config", config, Config)
        self.config = config
        config.check_ranks(self.topology)
        require_int("threads", threads, 1, 1 << 10)
        require_int("lost_signal", lost_signal, 0, 2**63)
        if lost_signal and seed is None:
            raise ValueError(f"lost_signal is {lost_signal}, must be 0 without a seed")
        if seed is not None:
            require_int("seed", seed, 0, 2**63)
            if threads != 1:
                raise ValueError(f"threads is {threads}, must be 1 with a seed")
        self.ranks = list(range(self.topology.world_size))
        self._seed = seed
        self.device = cuda.check_device(device)
        if self.device.type == "cuda":
            if threads != 1 or seed is not None:
                raise ValueError(f"threads is {threads} and seed is {seed}, must not be given with device {device!r}")
            sms = cuda.num_sms(config, self.device, len(self.ranks))
            channels = cuda.num_channels(self.topology, config, sms, len(self.ranks))
            # no network to keep busy, and one cache for all rings
            self._heap = self._make_heap(channels, rdma_ring_bytes=64 << 10)
            self._backend = connect.local_ranks(self.topology, config, self._heap, self.device, sms)
            return
        self._heap = self._make_heap(config.num_channels)
        self._backend = HostBackend(
            self._heap,
            self.ranks,
            [_C.Segment.anonymous(self._heap.bytes) for _ in self.ranks],
            timeout=config.timeout_seconds,
            threads=threads,
            seed=seed,
            lost_signal=lost_signal,
        )

    def reset(self) -> None:
        """Makes the buffer usable again after an error. Handles of dispatches that succeeded stay valid."""
        self._live_backend().reset()

    def _when_waits_expire(self) -> str:
        return super()._when_waits_expire() if self._seed is None else "when no role could run any more"


class Buffer(RankGroup):
    """This process's rank of an expert-parallel group whose processes share memory. Construction, reset and all
    launches are collective.

    group: the expert-parallel process group; None: the default group.
    config: must be equal on all ranks.
    topology: how the group's ranks form nodes. None: all ranks of a machine are one node. On the host several nodes of
        one machine take the same path as several machines: puts and signals along the rail. On GPUs that share memory
        rows need no puts.
    device: "cpu" or "cuda", the same on all ranks: where the tensors are. On a GPU (torch's current one, unless the
        index is given) launches go to torch's current stream and return at once; what fails later is raised by the next
        call or by `synchronize`. Calls on several streams wait for each other. Those that a CUDA graph has captured do
        not: they must be captured on one stream, and a replay must be ordered with the buffer's other calls.
    Raises ValueError on every rank alike when configs differ or do not fit the group, EPError when the ranks cannot
    share memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: Config,
        topology: Topology | None = None,
        *,
        device: str | torch.device = "cpu",
    ):
        self._meeting = Meeting(group if group is not None else dist.group.WORLD, timedelta(seconds=MEETING_S))
        self._meeting.barrier()
        self.rank = self._meeting.rank
        self.topology = topology if topology is not None else Topology(1, self._meeting.world_size)
        self.config = config
        self.ranks = [self.rank]
        self._meeting.agree(lambda: self._check_own(device))
        self._meeting.timeout = timedelta(seconds=max(MEETING_S, config.timeout_seconds))
        settings = asdict(config) | {"timeout": config.timeout_seconds}
        everyone = self._meeting.gather((socket.gethostname(), settings, asdict(self.topology), self.device.type))
        self._meeting.agree(lambda: self._check_members(everyone))
        if self.device.type == "cuda":
            sms = self._meeting.agree(lambda: cuda.num_sms(config, self.device, 1))
            self._heap = self._make_heap(cuda.num_channels(self.topology, config, sms, 1))
            hosts = [host for host, *_ in everyone]
            self._backend = connect.processes(self._meeting, self.topology, config, self._heap, self.device, sms, hosts)
            return

        self._heap = self._make_heap(config.num_channels)
        own = self._meeting.agree(lambda: _C.Segment.shared(self._heap.bytes))
        addresses = self._meeting.gather(own.address())
        segments = self._meeting.agree(lambda: self._open_others(own, addresses, self._heap.bytes))
        own.close_to_others()
        self._backend = HostBackend(self._heap, self.ranks, segments, timeout=config.timeout_seconds)

    def reset(self) -> None:
        """Makes the buffer usable again after an error. Collective: returns when all ranks have called it.

        Handles of dispatches that succeeded stay valid.

        Raises RuntimeError when a rank does not come within a minute or Config.timeout (from torch.distributed), and
        when what was sent to other machines does not arrive in time.
        """
        self._live_backend().drain()  # nothing of this rank reaches others after the barrier
        self._meeting.barrier()
        self._live_backend().reset()
        self._meeting.barrier()

    def _check_own(self, device: str | torch.device) -> None:
        require_type("config", self.config, Config)
        require_type("topology", self.topology, Topology)
        assert self.config.timeout_seconds > 0  # raises if the environment has a bad one
        self.device = cuda.check_device(device)

    def _check_members(self, everyone: list[Any]) -> None:
        host, *own = everyone[self.rank]
        for rank, (other_host, *others) in enumerate(everyone):
            for name, mine, theirs in zip(("config", "topology", "device"), own, others, strict=True):
                if mine != theirs:
                    raise ValueError(f"{name} is {mine} on rank {self.rank} and {theirs} on rank {rank}, must be equal")
            if other_host != host and self.device.type == "cpu":
                raise EPError(
                    f"rank {self.rank} runs on {host} and rank {rank} on {other_host}: "
                    "the host backend connects the processes of one machine only"
                )
        if self.topology.world_size != len(everyone):
            raise ValueError(f"topology is {self.topology}, must have the {len(everyone)} ranks of the group")
        self.config.check_ranks(self.topology)

    def _open_others(self, own: Any, addresses: list[Any], size: int) -> list[Any]:
        others = enumerate(addresses)
        return [own if rank == self.rank else _C.Segment.open(address, size) for rank, address in others]

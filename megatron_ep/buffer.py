"""Buffers: what holds the symmetric heaps of all ranks, in one process or in many."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep import _C
from megatron_ep.backends import connect, cuda, fabrics, peer_memory, release, sizes, tcp
from megatron_ep.backends.codec import Plain
from megatron_ep.backends.host import HostBackend
from megatron_ep.backends.interface import HasMemory
from megatron_ep.backends.monitor import Monitor
from megatron_ep.backends.news import News
from megatron_ep.backends.processes import has_ended, process_fate
from megatron_ep.backends.rank_info import RankInfo, agreed_topology, introduce, machines
from megatron_ep.backends.rendezvous import StoreRendezvous
from megatron_ep.backends.torch_group import timeout_of
from megatron_ep.config import TIMEOUT_VARIABLE, Config, Topology, require_int, require_type
from megatron_ep.diagnosis import failures
from megatron_ep.errors import EPError
from megatron_ep.normal.rank_group import RankGroup

# Construction and reset wait this long for the other ranks, or Config.timeout if that is longer: they may still be in a
# wait of their own.
RENDEZVOUS_S = 60.0

# Of a segment: `_C.Segment.address`.
ADDRESS = tuple[int, int, int, int]

log = logging.getLogger(__name__)


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
    stalled: with a seed, a rank and the number (from 1) of the wait at which that rank stops for ever, to see which
        rank the others blame.
    Raises ValueError for arguments that are out of range.
    """

    takes_lists = True

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
        stalled: tuple[int, int] | None = None,
    ):
        self.number = failures.watch(self)
        self.topology = Topology(nodes, ranks_per_node)
        require_type("config", config, Config)
        self.config = config
        config.check_ranks(self.topology)
        require_int("threads", threads, 1, 1 << 10)
        require_int("lost_signal", lost_signal, 0, 2**63)
        if lost_signal and seed is None:
            raise ValueError(f"lost_signal is {lost_signal}, must be 0 without a seed")
        if stalled is not None:
            if seed is None:
                raise ValueError(f"stalled is {stalled}, must be None without a seed")
            require_int("stalled's rank", stalled[0], 0, self.topology.world_size - 1)
            require_int("stalled's wait", stalled[1], 1, 2**63)
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
            self.heap = sizes.gpu_heap(self.topology, config, sms, len(self.ranks))
            self._backend = connect.local_ranks(self.topology, config, self.heap, self.device, sms)
            _log_set_up(self, "p2p (one GPU)", self.heap, sms)
            return
        self.heap = sizes.host_heap(self.topology, config)
        self._backend = HostBackend(
            self.heap,
            self.ranks,
            [_C.Segment.anonymous(self.heap.bytes) for _ in self.ranks],
            timeout=config.timeout_seconds,
            threads=threads,
            seed=seed,
            lost_signal=lost_signal,
            stalled=stalled or (0, 0),
        )
        network = "" if seed is None else f", a simulated network of seed {seed}"
        _log_set_up(self, f"memory of this process{network}", self.heap)

    def reset(self) -> None:
        """Makes the buffer usable again after an error: see `Buffer.reset`, but there is nobody to wait for."""
        self._start_anew()

    def _when_waits_expire(self) -> str:
        return super()._when_waits_expire() if self._seed is None else "when no role could run any more"


class Buffer(RankGroup):
    """This process's rank of an expert-parallel group. The processes of a machine share memory; between machines there
    is a network. Construction, reset and all launches are collective.

    group: the expert-parallel process group; None: the default group.
    config: must be equal on all ranks. Its timeout, if neither it nor MEGATRON_EP_TIMEOUT says one, becomes that of the
        group's collectives.
    topology: how the group's ranks form nodes. None: those of the variable MEGATRON_EP_RANKS_PER_NODE, if it is set;
        else the ranks of a host are one node, and so are those of an NVLink domain that spans hosts, as NVML tells.
        Nodes need equally many ranks, one after the other. Rows between several nodes of one machine take the same
        path as between several machines, without the puts, which shared memory does not need.
    device: "cpu" or "cuda", the same on all ranks: where the tensors are. On a GPU (torch's current one, unless the
        index is given) launches go to torch's current stream and return at once; what fails later is raised by the next
        call or by `synchronize`. Calls on several streams wait for each other. Those that a CUDA graph has captured do
        not: they must be captured on one stream, and a replay must be ordered with the buffer's other calls.

    The attribute `fabric` says what carries the bytes: "shared memory" on the host, "tcp" between machines without
    GPUs; "p2p", "nvshmem" or "nccl" between GPUs.

    The ranks meet through the store of torch.distributed: no collective of the group runs. Rank 0 logs one line about
    the set-up (logger megatron_ep.buffer, level INFO).

    Raises ValueError on every rank alike when configs differ or do not fit the group, or no topology can be told;
    EPError when the ranks cannot share memory or be connected, or one does not come within a minute or Config.timeout.
    """

    _network: tcp.Network | None = None  # between nodes, where the host carries it

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: Config,
        topology: Topology | None = None,
        *,
        device: str | torch.device = "cpu",
    ):
        config = with_timeout_of(group, config, device)
        self._set_up(StoreRendezvous(group, timedelta(seconds=patience(config))), config, topology, device)

    @classmethod
    def over(
        cls, rendezvous: StoreRendezvous, config: Config, topology: Topology | None, device: str | torch.device
    ) -> Buffer:
        """The same between ranks that meet without a process group; on GPUs, those of a machine."""
        buffer = cls.__new__(cls)
        buffer._set_up(rendezvous, config, topology, device, fabrics.Choice("p2p", "as it was"))
        return buffer

    def _set_up(
        self,
        rendezvous: StoreRendezvous,
        config: Config,
        topology: Topology | None,
        device: str | torch.device,
        fabric: fabrics.Choice | None = None,
    ) -> None:
        self.number = failures.watch(self)
        self._rendezvous = rendezvous
        self.rank = self._rendezvous.rank
        self.config = config
        self.ranks = [self.rank]
        _, infos = self._rendezvous.exchange(lambda: (None, self._introduce(topology, device)))
        self.topology = agreed_topology(infos, config)
        own = self._rank_info = infos[self.rank]
        self._neighbours = {rank: other.pid for rank, other in enumerate(infos) if other.machine == own.machine}
        if self.device.type == "cuda":
            sms = cuda.num_sms(config, self.device, 1)
            self.heap = sizes.gpu_heap(self.topology, config, sms)
            backend, fabric = connect.processes(
                self._rendezvous, self.topology, config, self.heap, self.device, sms, infos, fabric
            )
            self._network = backend.network
            backend.shares_gpu = sum(info.gpu == own.gpu for info in infos) > 1
            self._backend = backend
        else:
            sms = None
            self.heap = sizes.host_heap(self.topology, config)
            self._machines = machines(infos)
            segments = self.shared_segments(self.heap.bytes)
            fabric = fabrics.Choice("shared memory", "host backend")
            if len(set(self._machines)) > 1:
                nic = _C.SoftwareNic(rank=self.rank, segments=segments)
                self._network = tcp.Network(self.rank, self._machines, nic)
                fabric = fabrics.Choice("tcp", f"host backend on {len(set(self._machines))} machines")
            self._backend = HostBackend(
                self.heap,
                self.ranks,
                segments,
                timeout=config.timeout_seconds,
                nic=None if self._network is None else self._network.nic,
            )
            if self._network is not None:
                self._network.connect(self._rendezvous)
        self.fabric = fabric.name
        if self.topology.world_size > 1:
            self._monitor = Monitor(self._backend, self.rank, self._neighbours, self._news(), self.describe)
        if self.rank == 0:
            _log_set_up(self, f"{fabric.name} ({fabric.reason})", self.heap, sms)

    @property
    def spans_machines(self) -> bool:
        return self._network is not None

    def _news(self) -> News | None:
        """Where some ranks' memory is out of reach."""
        if len(self._neighbours) == self.topology.world_size and self.fabric not in fabrics.NETWORKS:
            return None
        store = self._rendezvous.connection()
        return None if store is None else News(store, self.topology.world_size)

    def reset(self) -> None:
        """Makes the buffer usable again after an error. Collective: returns when all ranks have called it.

        Handles of dispatches that succeeded stay valid.

        After a failure in a backward pass the parameters are those of the last step, provided that `raise_if_failed`
        was asked before the optimizer's next one. The gradients are not to be used: some hold NaN, and what earlier
        microbatches have added to them is still there (in Megatron's main_grad as well). Random states have moved on,
        and a router may have updated its expert bias. So every rank zeroes all gradients and repeats the whole step; or
        goes back to a checkpoint, where the steps have to be the same bit for bit.

        Raises EPError when a rank does not come within a minute or Config.timeout, and RuntimeError when what was sent
        to other machines does not arrive in time.
        """
        self.live_backend().drain()  # nothing of this rank reaches others after the barrier
        self._rendezvous.barrier()
        self.restart()

    def restart(self) -> None:
        """To the state of a new buffer, on all ranks, of which none has a call under way."""
        if self._network is not None:
            self._network.disconnect()
            self._rendezvous.barrier()  # nothing comes any more from anybody
        self._start_anew()
        if self._network is not None:
            self._network.connect(self._rendezvous)
        self._rendezvous.barrier()

    def release(self) -> None:
        """Closes the buffer and gives the memory of it, and of its low-latency modes, back at once. Collective: returns
        when this rank's is free, for which all ranks must have called it.

        `close` leaves on a GPU what others may still use, for a later buffer; this is for a GPU that others use next,
        as where training and inference take turns. With the last buffer of its ranks goes what closed ones have left.
        Another buffer can be made afterwards. What torch has for tensors is `torch.cuda.empty_cache`'s.

        Over NVSHMEM the memory goes back to its symmetric heap, for later buffers of whatever size: that heap and the
        library stay as long as the process lives. Over NCCL the buffer's communicators end.

        Raises ValueError on every rank alike, and the buffer stays open, while a rank captures a CUDA graph or has some
            that may replay the buffer's launches. EPError when a rank does not come within a minute or Config.timeout,
            ends, or lets go of nothing: then the buffer is closed, this rank uses nobody's memory any more, and its own
            is free if nobody can use it. And as `close`, of a launch that failed.
        """
        backend = self.live_backend()
        try:
            lost = release.finish(self._rendezvous, backend)
            failure = self._unseen_failure()
        except ValueError:
            raise
        except BaseException:
            self._let_go()
            raise
        parts, give_back = backend.parts, backend.give_back
        self._let_go()
        try:
            self._give_back([backend, *parts], all_came=lost is None)
        except EPError as error:
            raise lost or error from failure
        finally:
            for part in parts:
                part.let_go()
            del backend  # it may have been the last to have it
            give_back()
            _C.release_pooled_memory()
        if lost is not None:
            raise lost from failure
        if failure is not None:
            raise failure

    def _give_back(self, holders: Sequence[HasMemory], *, all_came: bool) -> None:
        network = [holder.network_memory for holder in holders if holder.network_memory is not None]
        if not network:
            memories = [holder.memories for holder in holders]
            left = memories[0][self.rank].release_left if self.device.type == "cuda" else lambda: None
            release.of_machine(self._rendezvous, memories, self._has_ended, left, all_came=all_came)
        elif all_came:
            with torch.cuda.device(self.device):
                release.of_network(self._rendezvous, fabrics.NETWORKS[self.fabric](), network)

    def _has_ended(self, rank: int) -> bool:
        return rank in self._neighbours and has_ended(self._neighbours[rank])

    def _let_go(self) -> None:
        if self._network is not None:
            self._network.close()
        super()._let_go()

    @contextlib.contextmanager
    def rendezvous_again(self, store: dist.Store) -> Iterator[None]:
        """The ranks meet in this store, and will from now on, if all goes well."""
        before = self._rendezvous
        self._rendezvous = StoreRendezvous.over(store, self.rank, self.topology.world_size, before.timeout)
        try:
            yield
        except BaseException:
            self._rendezvous = before
            raise

    def take_back(self, ranks: Sequence[int], check: Callable[[], None]) -> None:
        """What the ranks that stayed do while others, in new processes, build this buffer anew.

        check: may fail on some ranks only, and fails on all then.

        Raises ValueError and EPError if it fails, if these are not the ranks that have new processes, or if one of
        their former processes lives.
        """

        def tell() -> tuple[None, RankInfo]:
            check()
            return None, self._rank_info

        _, infos = self._rendezvous.exchange(tell)
        agreed_topology(infos, self.config)

        def check_processes() -> None:
            for rank, info in enumerate(infos):
                former = self._neighbours[rank]
                if rank in ranks and info.pid == former:
                    raise ValueError(f"ranks names {rank}, which has the process that it had")
                if rank not in ranks and info.pid != former:
                    raise ValueError(f"ranks does not name {rank}, which has a new process")
                if rank in ranks and not has_ended(former):
                    raise EPError(f"rank {rank} came back in process {info.pid}, but its former one, {former}, lives")

        self._renew(self.live_backend().memories, ranks, check_processes)
        if self.device.type == "cuda":
            self._rendezvous.agree(lambda: None)  # on the others: connect.p2p
        self._neighbours.update(enumerate(info.pid for info in infos))

    def renew(self, memories: Sequence[Any], ranks: Sequence[int]) -> None:
        """While others, in new processes, make `shared_segments` or `device_memories`: maps theirs in the place of what
        these ranks had there before."""
        if self.device.type == "cuda":
            self._rendezvous.gather(os.getpid())
        self._renew(memories, ranks, lambda: None)

    def _renew(self, memories: Sequence[Any], ranks: Sequence[int], check: Callable[[], None]) -> None:
        own = memories[self.rank]

        def tell() -> tuple[None, Any]:
            check()
            return None, own.address() if isinstance(own, _C.Segment) else own.handle()

        _, addresses = self._rendezvous.exchange(tell, kind=ADDRESS if isinstance(own, _C.Segment) else bytes)

        def replace() -> None:
            for rank in ranks:
                memories[rank].replace(addresses[rank])

        self._rendezvous.agree(replace)

    def _fate_of(self, rank: int) -> str | None:
        return process_fate(self._neighbours[rank]) if rank in self._neighbours else None

    def open_on_network(self, tolerates_loss: bool) -> None:
        if self._network is not None:
            if tolerates_loss:
                self._network.nic.tolerate_loss()
            self._rendezvous.barrier()

    def agree_on(self, check: Callable[[], None], settings: dict[str, Any]) -> None:
        """Runs a check that may fail on some ranks only, and on all then. Raises ValueError unless settings are equal.

        Collective.
        """

        plain = {name: value if isinstance(value, Plain) else str(value) for name, value in settings.items()}

        def tell() -> tuple[None, dict[str, Plain]]:
            check()
            return None, plain

        _, everyone = self._rendezvous.exchange(tell, kind=dict[str, Plain])
        for rank, others in enumerate(everyone):
            for name, mine in plain.items():
                if (other := others.get(name)) != mine:
                    raise ValueError(f"{name} is {mine} on rank {self.rank} and {other} on rank {rank}, must be equal")

    def _introduce(self, topology: Topology | None, device: str | torch.device) -> RankInfo:
        require_type("config", self.config, Config)
        if topology is not None:
            require_type("topology", topology, Topology)
        self.device = cuda.check_device(device)
        return introduce(self.config, topology, self.device)

    def device_memories(self, size: int) -> list[Any]:
        """Memory of so many bytes on the GPU of each rank, mapped by all of this machine. Collective."""
        pids = self._rendezvous.gather(os.getpid())
        with torch.cuda.device(self.device):
            return peer_memory.peer_memories(
                self._rendezvous, cuda.prepare_to_allocate, self.device, size, " ".join(map(str, pids))
            )

    def low_latency_over_network(self, heap: _C.LowLatencyHeap, blocks: int) -> tuple[Any, list[Any], Any]:
        """Launches of so many blocks, and the memory with such a heap on each rank: what is mapped, and the network's.
        Collective."""
        backend = self.live_backend()
        assert isinstance(backend, cuda.CudaBackend)
        return connect.low_latency(self._rendezvous, self.config, backend, self.fabric, heap, self.device, blocks)

    def shared_segments(self, size: int) -> list[Any]:
        """Memory of the host of so many bytes for each rank, mapped by all of its machine; for those of other machines
        a mirror of their control block. Collective."""

        def create() -> tuple[_C.Segment, tuple[int, int, int, int]]:
            own = _C.Segment.shared(size)
            return own, own.address()

        own, addresses = self._rendezvous.exchange(create, kind=ADDRESS)

        def place(rank: int) -> _C.Segment:
            if rank == self.rank:
                return own
            if self._machines[rank] != self._machines[self.rank]:
                return _C.Segment.anonymous(_C.SoftwareNic.mirror_bytes)
            return _C.Segment.open(addresses[rank], size)

        return self._rendezvous.agree(lambda: [place(rank) for rank in range(len(addresses))])


def _log_set_up(group: RankGroup, fabric: str, heap: _C.Heap, sms: int | None = None) -> None:
    topology = group.topology
    log.info(
        "%d ranks, %d nodes x %d; fabric: %s; %d channels%s, %.1f MiB of heap a rank; a wait ends after %g s",
        topology.world_size,
        topology.nodes,
        topology.ranks_per_node,
        fabric,
        heap.channels,
        "" if sms is None else f", {sms} SMs a rank",
        heap.bytes / 2**20,
        group.config.timeout_seconds,
    )


def with_timeout_of(group: dist.ProcessGroup | None, config: Config, device: str | torch.device) -> Config:
    """A config whose user leaves the limit of waits open takes that of the group's own collectives."""
    if not isinstance(config, Config) or config.timeout is not None or os.environ.get(TIMEOUT_VARIABLE):
        return config
    with contextlib.suppress(RuntimeError):  # no device: refused later, on all ranks alike
        return dataclasses.replace(config, timeout=timeout_of(group, torch.device(device)))
    return config


def patience(config: Config) -> float:
    """Seconds to wait for the other ranks of a buffer with this config, which may be none: then all ranks refuse it."""
    try:
        return max(RENDEZVOUS_S, config.timeout_seconds)
    except (AttributeError, ValueError):
        return RENDEZVOUS_S

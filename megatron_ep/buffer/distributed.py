"""The rank of a buffer in this process, and its rendezvous with those of other processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep import _C
from megatron_ep.buffer import connect, cuda, host, low_latency, release, sizes
from megatron_ep.buffer.interface import Backend, Part
from megatron_ep.buffer.monitor import Monitor
from megatron_ep.buffer.rank_group import RankGroup, log_set_up
from megatron_ep.config import TIMEOUT_VARIABLE, Config, Topology, require_equal, require_type
from megatron_ep.diagnosis import blame
from megatron_ep.errors import HOW_TO_GO_ON, EPAbortError, EPError
from megatron_ep.fabrics import atomics, choice, gpu, peer_memory
from megatron_ep.fabrics.connection import GpuRank, LowLatencyConnection
from megatron_ep.fabrics.rank_info import RankInfo, agreed_topology, introduce, machines
from megatron_ep.meeting.codec import Plain
from megatron_ep.meeting.failure_broadcast import FailureBroadcast
from megatron_ep.meeting.processes import Owner, has_ended, process_fate
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.meeting.torch_group import timeout_of

# Construction, reset and release wait for the other ranks for Config.timeout, but at least this long, because ranks do
# not begin at the same time.
RENDEZVOUS_S = 5.0

# The type of `_C.Segment.address`.
ADDRESS = tuple[int, int, int, int]


class DistributedRankGroup(RankGroup):
    """See `megatron_ep.Buffer`.

    rendezvous: rendezvous of all ranks.
    fabric: fabric between GPUs; None: the one that fits the machines.
    """

    fabric: str
    _memory_kind: str  # how ranks over p2p map each other's memory
    _failed_reset = ""  # why the last reset failed, if it did

    def __init__(
        self,
        rendezvous: StoreRendezvous,
        config: Config,
        topology: Topology | None,
        device: str | torch.device,
        fabric: choice.Choice | None = None,
    ):
        super().__init__()
        self._rendezvous = rendezvous
        self.rank = rendezvous.rank
        self.config = config
        self.ranks = [self.rank]
        _, self._infos = rendezvous.exchange(lambda: (None, self._introduce(topology, device)))
        self.topology = agreed_topology(self._infos, config)
        self._machines = machines(self._infos)
        own = self._infos[self.rank].machine
        near = {rank: info.owner for rank, info in enumerate(self._infos) if info.machine == own}
        self._neighbours = neighbours = {rank: owner for rank, owner in near.items() if owner is not None}
        rendezvous.watch = lambda: {rank: process_fate(owner.pid) for rank, owner in neighbours.items()}
        default_sms = sizes.default_sms(self.topology)
        sms = gpu.num_sms(config, self.device, 1, default_sms) if self.device.type == "cuda" else None
        fabric = self._connect_on_host() if sms is None else self._connect_gpus(sms, fabric)
        self.fabric = fabric.name
        if self.topology.world_size > 1:
            self._monitor = Monitor(self.live_backend(), self.rank, neighbours, self._broadcast(), self.describe)
        if self.rank == 0:
            log_set_up(self, f"{fabric.name} ({fabric.reason})", sms)
        self.one_hop = low_latency.connect_one_hop(self)

    def _connect_gpus(self, sms: int, fabric: choice.Choice | None) -> choice.Choice:
        """Makes the backend on this rank's GPU. Returns the fabric, which is chosen if it is None."""
        self.heap = sizes.gpu_heap(self.topology, self.config, sms)
        wanted, gpus = [info.fabric for info in self._infos], [info.gpu for info in self._infos]
        domains = {info.domain for info in self._infos}
        memory = self._infos[0].memory
        connected = next((info.memory_in_use for info in self._infos if info.memory_in_use), None)
        self._memory_kind = peer_memory.kind_for(self._machines, memory, connected)
        lacks = functools.partial(peer_memory.lacks, self._rendezvous, self.device, self._memory_kind)
        lacks_memory = lacks if len(domains) == 1 and None not in domains else None
        fabric = fabric or choice.choose(self._machines, wanted, self._rendezvous.gather, lacks_memory)
        if fabric.name == "p2p":
            if memory is None and connected is None and self._is_one_machine and (lacking := lacks()):
                self._memory_kind = peer_memory.IPC
                fabric = dataclasses.replace(fabric, reason=f"{fabric.reason}; by CUDA IPC, because {lacking}")
            own = self._infos[self.rank]
            self._infos[self.rank] = dataclasses.replace(own, memory_in_use=self._memory_kind)
        connection, fabric = connect.connect(self._gpu_rank(sms), self.topology, self.heap, fabric)
        self._network = connection.network
        self._backend = cuda.CudaBackend(connection, self.heap, self.device, sms, self.rank)
        self._backend.shares_gpu = gpus.count(gpus[self.rank]) > 1
        return fabric

    def _connect_on_host(self) -> choice.Choice:
        """Makes the backend on the host. Returns the fabric."""
        self.heap = sizes.host_heap(self.topology, self.config)
        segments, timeout = self.shared_segments(self.heap.bytes), self.config.timeout_seconds
        wanted, near = [info.fabric for info in self._infos], [info.near_cards for info in self._infos]
        machine_count = len(set(self._machines))
        fabric = choice.choose_for_host(machine_count, wanted, self._rendezvous.gather)
        if machine_count == 1:
            self._backend = host.HostBackend(self.heap, self.ranks, segments, timeout=timeout)
            return fabric
        from megatron_ep.fabrics import tcp  # not before ranks are on several machines

        def make() -> tuple[host.HostBackend, tcp.Network]:
            cards = choice.cards_for(fabric.name, self.rank, self._machines, near=near)
            nic = _C.SoftwareNic(rank=self.rank, segments=segments, cards=cards)
            network = tcp.Network(self.rank, self._machines, nic, cards=cards)
            return host.HostBackend(self.heap, self.ranks, segments, timeout=timeout, nic=nic), network

        self._backend, self._network = self._rendezvous.agree(make)
        self._network.connect(self._rendezvous)
        return choice.Choice(fabric.name, "; ".join([fabric.reason, *self._network.cards()]))

    @property
    def _is_one_machine(self) -> bool:
        return len(self._neighbours) == self.topology.world_size

    @property
    def can_take_back(self) -> bool:
        """Whether all ranks are on this machine, without a network: then `take_back` can map those in new processes."""
        return self._is_one_machine and self._network is None

    def _broadcast(self) -> FailureBroadcast | None:
        """Returns what carries failures between ranks; None if all ranks share memory, or the store is unavailable."""
        if self._is_one_machine and self.fabric not in choice.NETWORKS:
            return None
        store = self._rendezvous.connection()
        return None if store is None else FailureBroadcast(store, self.topology.world_size)

    def reset(self) -> None:
        backend = self._meet_for("the buffer's reset", "reset the buffer")
        with contextlib.ExitStack() as stack:

            def drain() -> None:
                backend.drain()  # afterwards nothing that this rank has sent is in flight
                # The monitor runs until here, because it ends launches that wait for a rank that has died.
                stack.enter_context(self._resetting())

            def fates() -> dict[int, str | None]:
                closed = [rank for rank, owner in self._neighbours.items() if owner.fate() == blame.CLOSED]
                return dict(watch()) | dict.fromkeys([*backend.ranks_that_left(), *closed], blame.LEFT)

            watch, self._rendezvous.watch = self._rendezvous.watch, fates
            try:
                self._rendezvous.agree(drain)
            finally:
                self._rendezvous.watch = watch  # later steps close the network, which every rank then leaves
            self._restart()

    def restart(self) -> None:
        """Restores the state of a new buffer. Collective; no rank may have a call in progress."""
        with self._resetting():
            self._restart()

    def _restart(self) -> None:
        try:
            if self._network is not None:
                self._rendezvous.agree(self._network.disconnect)  # afterwards nothing arrives from any rank
            self._rendezvous.agree(self._start_anew)
            if self._network is not None:
                self._network.connect(self._rendezvous)
            self._failed_reset = ""
        except BaseException as error:
            self._failed_reset = str(error) or type(error).__name__
            # Calls that were made before are launched without checks unless the backend is aborted.
            self.live_backend().abort(interrupted=False, failed=True, reason=self._failed_reset)
            raise

    def check_usable(self) -> None:
        if self._failed_reset:
            raise EPAbortError(f"the last reset failed: {self._failed_reset}; {HOW_TO_GO_ON}")
        super().check_usable()

    def _meet_for(self, what: str, to_do: str) -> Backend:
        """Names the next exchanges, for their errors and because all ranks must be in one call. Returns the backend."""
        backend = self.live_backend()
        self._rendezvous.of_what, self._rendezvous.failure = f"of {what}", f"could not {to_do}"
        return backend

    def _resetting(self) -> contextlib.AbstractContextManager[None]:
        """Pauses the monitor, because it would abort ranks that share memory and have already been reset."""
        return self._monitor.resetting() if self._monitor is not None else contextlib.nullcontext()

    def release(self) -> None:
        """See `megatron_ep.Buffer.release`."""
        backend = self._meet_for("the buffer's release", "release the buffer")
        try:
            lost = release.finish(self._rendezvous, backend)
            failure = self._unseen_failure()
        except ValueError:
            raise
        except BaseException:
            self._let_go()
            raise
        parts, give_back, rendezvous = backend.parts, backend.give_back, self._rendezvous
        self._let_go()
        try:
            self._give_back(rendezvous, [backend, *parts], all_came=lost is None)
        except EPError as error:
            raise lost or error from failure
        finally:
            for part in parts:
                part.release()
            del backend  # this may be the last reference, without which its memory can be freed
            give_back()
            _C.release_pooled_memory()
        if lost is not None:
            raise lost from failure
        if failure is not None:
            raise failure

    def _give_back(self, rendezvous: StoreRendezvous, holders: Sequence[Backend | Part], *, all_came: bool) -> None:
        network = [holder.network_memory for holder in holders if holder.network_memory is not None]
        if not network:
            memories = [holder.memories for holder in holders]
            left = memories[0][self.rank].release_left if self.device.type == "cuda" else lambda: None
            release.of_machine(rendezvous, memories, self._has_ended, left, all_came=all_came)
        elif all_came:
            with torch.cuda.device(self.device):
                release.of_network(rendezvous, choice.NETWORKS[self.fabric](), network)

    def _has_ended(self, rank: int) -> bool:
        return rank in self._neighbours and has_ended(self._neighbours[rank].pid)

    def _let_go(self) -> None:
        self._close_pipe()
        self._stop_monitor()  # stops before the network, which it uses
        if self._network is not None:
            self._network.close()
        super()._let_go()
        self.__dict__.pop("_rendezvous", None)  # whose keys rank 0 deletes when it is gone

    @contextlib.contextmanager
    def rendezvous_again(self, store: dist.Store) -> Iterator[None]:
        """Moves the rendezvous to another store; an error inside restores the former one."""
        before = self._rendezvous
        self._rendezvous = StoreRendezvous.over(store, self.rank, self.topology.world_size, before.timeout)
        try:
            yield
        except BaseException:
            self._rendezvous = before
            raise

    def take_back(self, ranks: Sequence[int], check: Callable[[], None]) -> None:
        """Maps the memory of ranks in new processes, on the ranks that stayed, while the others construct the buffer.

        check: an error on one rank is raised on all.

        Raises ValueError or EPError if it fails, if `ranks` are not the ranks with new processes, or if one of their
        former processes lives.
        """

        def step() -> tuple[None, RankInfo]:
            check()
            return None, self._infos[self.rank]

        _, infos = self._rendezvous.exchange(step)
        agreed_topology(infos, self.config)

        def check_processes() -> None:
            for rank, info in enumerate(infos):
                former = self._neighbours[rank].pid
                if rank in ranks and info.pid == former:
                    raise ValueError(f"ranks names {rank}, which has the process that it had")
                if rank not in ranks and info.pid != former:
                    raise ValueError(f"ranks does not name {rank}, which has a new process")
                if rank in ranks and not has_ended(former):
                    raise EPError(f"rank {rank} came back in process {info.pid}, but its former one, {former}, lives")

        self.renew(self.live_backend().memories, ranks, check_processes)
        if self.device.type == "cuda":
            self._rendezvous.agree(lambda: None)  # matches a step of `p2p.connect` on the other ranks
        self._infos = infos
        self._neighbours.update((rank, info.owner) for rank, info in enumerate(infos) if info.owner is not None)

    def renew(self, memories: Sequence[Any], ranks: Sequence[int], check: Callable[[], None] = lambda: None) -> None:
        """Maps the memory of ranks in new processes at its former addresses, while they run `shared_segments` or
        `low_latency_connection`. check: an error on one rank is raised on all."""
        own = memories[self.rank]

        def checked() -> Any:
            check()
            return own

        handles: contextlib.AbstractContextManager[tuple[Any, Any]]
        if isinstance(own, _C.Segment):
            handles = contextlib.nullcontext(
                self._rendezvous.exchange(lambda: (own, checked().address()), kind=ADDRESS)
            )
        else:
            handles = peer_memory.exchanged(self._rendezvous, checked, ranks, self._memory_kind)
        with handles as (_, of_rank):

            def replace() -> None:
                for rank in ranks:
                    memories[rank].replace(of_rank[rank])

            self._rendezvous.agree(replace)

    def _fate_of(self, rank: int) -> str | None:
        if rank in self._neighbours:
            return self._neighbours[rank].fate()
        return self._network.fate_of(rank) if self._network is not None else None

    def _unheard(self, rank: int) -> tuple[str, float] | None:
        return self._network.unheard(rank) if self._network is not None else None

    def open_on_network(self, tolerates_loss: bool) -> None:
        if self._network is not None:
            if tolerates_loss:
                self._network.nic.tolerate_loss()
            self._network.connect_part(self._rendezvous)

    def agree_on(self, check: Callable[[], None], settings: dict[str, Any]) -> None:
        self._meet_for("the low-latency mode's set-up", "set up the low-latency mode")
        plain = {name: value if isinstance(value, Plain) else str(value) for name, value in settings.items()}

        def step() -> tuple[None, dict[str, Plain]]:
            check()
            return None, plain

        require_equal(self._rendezvous.exchange(step, kind=dict[str, Plain])[1])

    def _introduce(self, topology: Topology | None, device: str | torch.device) -> RankInfo:
        require_type("config", self.config, Config)
        if topology is not None:
            require_type("topology", topology, Topology)
        self.device = gpu.check_device(device)
        owner = Owner.here()
        self._close_pipe = weakref.finalize(self, os.close, owner.descriptor)
        return dataclasses.replace(introduce(self.config, topology, self.device), owner=owner)

    def keeps_lines(self) -> bool:
        if self.fabric == "p2p" and not self._is_one_machine:
            return True  # within an NVLink domain, whose atomics were tried when the fabric was chosen
        gpus = [info.gpu for info in self._infos]
        return all(self._rendezvous.gather(atomics.are_native(gpus[self.rank], gpus)))

    def low_latency_connection(self, heap: _C.LowLatencyHeap, blocks: int) -> LowLatencyConnection:
        backend = self.live_backend()
        assert isinstance(backend, cuda.CudaBackend)
        return connect.low_latency(self._gpu_rank(blocks), heap, self.fabric, backend.connection)

    def _gpu_rank(self, blocks: int) -> GpuRank:
        return GpuRank(self._rendezvous, self.config, self._infos, self.device, blocks, self._memory_kind)

    def shared_segments(self, size: int) -> list[Any]:
        """Returns `size` bytes of host memory for each rank of this machine, mapped by all of them, and a mirror of the
        control block for each rank of another machine. Collective."""

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


def group_of(
    group: dist.ProcessGroup | None,
    config: Config,
    topology: Topology | None,
    device: str | torch.device,
    of_what: str = StoreRendezvous.of_what,
) -> DistributedRankGroup:
    """Returns this process's rank of a process group: see `megatron_ep.Buffer`. of_what: its name in errors."""
    config = with_timeout_of(group, config, device)
    rendezvous = StoreRendezvous(group, timedelta(seconds=patience(config)))
    rendezvous.of_what = of_what
    return DistributedRankGroup(rendezvous, config, topology, device)


def with_timeout_of(group: dist.ProcessGroup | None, config: Config, device: str | torch.device) -> Config:
    """Returns the config, with the timeout of the group's collectives if the user has set none."""
    if not isinstance(config, Config) or config.timeout is not None or os.environ.get(TIMEOUT_VARIABLE):
        return config
    with contextlib.suppress(RuntimeError, TypeError):  # an invalid device is refused later, on all ranks alike
        return dataclasses.replace(config, timeout=timeout_of(group, torch.device(device)))
    return config


def patience(config: Config) -> float:
    """Returns the seconds to wait for other ranks. An invalid config is allowed: all ranks refuse it afterwards."""
    try:
        return max(RENDEZVOUS_S, config.timeout_seconds)
    except (AttributeError, ValueError):
        return RENDEZVOUS_S

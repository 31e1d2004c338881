"""How the ranks of a buffer on GPUs find each other's heaps. All of it is collective: what goes wrong on one rank is
raised on all of them, and no wait for a rank that does not come is without a bound.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from megatron_ep import _C
from megatron_ep.backends import atomics, cuda, fabrics, ibgda, over_host
from megatron_ep.backends.cuda import CudaBackend
from megatron_ep.backends.peer_memory import peer_memories
from megatron_ep.backends.rank_info import RankInfo, machines
from megatron_ep.backends.rendezvous import StoreRendezvous
from megatron_ep.config import Config, Topology
from megatron_ep.errors import EPError

T = TypeVar("T")

NVSHMEM_SETUP_S = 300.0  # at least: with many ranks it takes long, and one that is given up cannot be tried again


def local_ranks(topology: Topology, config: Config, heap: _C.Heap, device: torch.device, sms: int) -> CudaBackend:
    """All ranks in this process, on one GPU."""
    ranks = list(range(topology.world_size))
    with torch.cuda.device(device):
        cuda.prepare_to_allocate()
        memories = [_C.DeviceMemory.create(device.index, heap.bytes) for _ in ranks]
        return p2p(heap, ranks, memories, device, sms, config)


def processes(
    rendezvous: StoreRendezvous,
    topology: Topology,
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    infos: Sequence[RankInfo],
    fabric: fabrics.Choice | None = None,
) -> tuple[CudaBackend, fabrics.Choice]:
    """This process's rank, with a fabric; None: that which fits the hosts of all ranks."""
    connectors: dict[str, Callable[..., tuple[CudaBackend, str]]]
    connectors = {"p2p": _connect_p2p, "nvshmem": _connect_nvshmem, "nccl": _connect_nccl}
    connectors |= {name: functools.partial(over_host.connect, fabric=name) for name in fabrics.OF_HOST}
    hosts, wanted = machines(infos), [info.fabric for info in infos]
    fabric = fabric or fabrics.choose(hosts, wanted, rendezvous.gather)
    size = topology.world_size if fabric.name == "p2p" else topology.ranks_per_node
    first = rendezvous.rank // size * size
    mapped = range(first, first + size)
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            atomics.check(rendezvous.rank, [info.gpu for info in infos], mapped)
            stack.enter_context(torch.cuda.device(device))
            cuda.prepare_to_allocate()

        connect = connectors[fabric.name]
        backend, found = connect(rendezvous, begin, config, heap, device, sms, infos)
        return backend, dataclasses.replace(fabric, reason="; ".join(filter(None, (fabric.reason, found))))


def queue_pairs(heap: _C.Heap, sms: int) -> int:
    """Returns the queue pairs per rank of another machine: one for each block that has a channel's coordinators."""
    return min(heap.channels, sms)


def _connect_p2p(
    rendezvous: StoreRendezvous,
    begin: Callable[[], None],
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    infos: Sequence[RankInfo],
) -> tuple[CudaBackend, str]:
    """The processes of the machine map each other's heaps through CUDA IPC."""
    group = " ".join(str(info.pid) for info in infos)
    memories = peer_memories(rendezvous, begin, device, heap.bytes, group)
    return rendezvous.agree(lambda: p2p(heap, [rendezvous.rank], memories, device, sms, config)), ""


def p2p(
    heap: _C.Heap, ranks: list[int], memories: list[_C.DeviceMemory], device: torch.device, sms: int, config: Config
) -> CudaBackend:
    group = _C.CudaGroup(
        heap=heap,
        ranks=ranks,
        memories=memories,
        device=device.index,
        num_sms=sms,
        timeout=config.timeout_seconds,
    )
    backend = CudaBackend(group, heap, device, sms)
    backend.memories = memories
    return backend


def _connect_nvshmem(
    rendezvous: StoreRendezvous,
    begin: Callable[[], None],
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    infos: Sequence[RankInfo],
) -> tuple[CudaBackend, str]:
    nvshmem = fabrics.load_nvshmem()
    seconds = rendezvous.timeout.total_seconds()
    between_machines = len(set(machines(infos))) > 1
    pairs = queue_pairs(heap, sms)

    def prepare() -> tuple[None, tuple[Any, list[int], bytes, dict[str, str]]]:
        begin()
        served = nvshmem.initialised_for()
        given = ibgda.given() if served is None else {}
        if served is None and between_machines:
            ibgda.check()
        nvshmem.prepare(device=device.index, timeout=seconds)
        unique_id = _new_id(rendezvous, nvshmem) if served is None else b""
        return None, (served, nvshmem.spare(bytes=heap.bytes), unique_id, given)

    kind = tuple[tuple[bytes, int, int] | None, list[int], bytes, dict[str, str]]
    _, prepared = rendezvous.exchange(prepare, seconds, kind=kind)
    served, spares, ids, given = zip(*prepared, strict=True)
    unique_id = _nvshmem_id(served) or ids[0]
    ibgda.check_alike(given, pairs)
    if between_machines and not any(served):
        ibgda.prepare(pairs)

    def take() -> tuple[CudaBackend, str]:
        memory = _nvshmem_memory(rendezvous, spares, unique_id, device, heap.bytes)
        fence, found = ibgda.judge(memory.transport(heap=heap))
        group = functools.partial(nvshmem.NvshmemGroup, fence=fence)
        return _over_network(rendezvous, config, group, memory, heap, device, sms), found

    return rendezvous.agree(take, _nvshmem_limit(rendezvous))


def _nvshmem_limit(rendezvous: StoreRendezvous) -> float:
    return max(rendezvous.timeout.total_seconds(), NVSHMEM_SETUP_S)


def _nvshmem_memory(
    rendezvous: StoreRendezvous, spares: Sequence[list[int]], unique_id: bytes, device: torch.device, size: int
) -> Any:
    """Symmetric memory of so many bytes. spares: the numbers of those that each rank has."""
    nvshmem = fabrics.load_nvshmem()
    common = set.intersection(*map(set, spares))
    if common:
        return nvshmem.NvshmemHeap.reuse(number=min(common), device=device.index)

    def allocate() -> Any:
        return nvshmem.NvshmemHeap.allocate(
            unique_id=unique_id, rank=rendezvous.rank, world=rendezvous.world_size, device=device.index, bytes=size
        )

    return within(_nvshmem_limit(rendezvous), "the set-up of NVSHMEM", allocate)


def _nvshmem_id(served: Sequence[tuple[bytes, int, int] | None]) -> bytes | None:
    """That of the ranks that NVSHMEM serves already, None if there are none yet. Raises EPError if they are not
    these."""
    world = len(served)
    unique_id = next((ranks[0] for ranks in served if ranks), None)
    if unique_id is None or list(served) == [(unique_id, rank, world) for rank in range(world)]:
        return unique_id
    taken = ", ".join(str(rank) for rank, ranks in enumerate(served) if ranks)
    raise EPError(
        "NVSHMEM connects one group of ranks for as long as their processes live, and another one than this on rank "
        f"{taken} already: {fabrics.VARIABLE}=nccl connects any number"
    )


def within(seconds: float, what: str, collective: Callable[[], T]) -> T:
    """Runs what waits for other ranks without a bound of its own. When the time is over it is left to itself."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(collective())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=what, daemon=True).start()
    if not concurrent.futures.wait([done], seconds).done:
        raise EPError(f"{what} was not done after {seconds:g} s: other ranks did not come, or cannot be reached")
    return done.result()


def _connect_nccl(
    rendezvous: StoreRendezvous,
    begin: Callable[[], None],
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    infos: Sequence[RankInfo],
) -> tuple[CudaBackend, str]:
    memory, found = _nccl_memory(rendezvous, begin, heap, device)
    group = fabrics.load_nccl().NcclGroup
    # clears the signals of an earlier buffer, for which it waits as a launch does
    backend = rendezvous.agree(
        lambda: _over_network(rendezvous, config, group, memory, heap, device, sms), config.timeout_seconds
    )
    return backend, found


def _nccl_memory(
    rendezvous: StoreRendezvous, begin: Callable[[], None], heap: Any, device: torch.device
) -> tuple[Any, str]:
    """Symmetric memory for a heap of either mode, and what to say of it."""
    nccl = fabrics.load_nccl()
    seconds = rendezvous.timeout.total_seconds()

    def prepare() -> tuple[None, list[bytes]]:
        begin()
        return None, nccl.kept(heap=heap, rank=rendezvous.rank, device=device.index)

    _, kept = rendezvous.exchange(prepare, kind=list[bytes])
    common = set.intersection(*map(set, kept))
    unique_id = min(common) if common else rendezvous.exchange(lambda: (None, _new_id(rendezvous, nccl)))[1][0]

    def take() -> tuple[Any, int]:
        free, _ = torch.cuda.mem_get_info(device)
        memory = nccl.NcclHeap(
            unique_id=unique_id, heap=heap, rank=rendezvous.rank, device=device.index, timeout=seconds
        )
        return memory, free - torch.cuda.mem_get_info(device)[0] - heap.bytes

    memory, besides = rendezvous.agree(take, seconds)
    if common:
        return memory, "the communicator of an earlier buffer"
    return memory, f"a separate communicator, {besides / 2**20:.1f} MiB in addition to the heap"


def _new_id(rendezvous: StoreRendezvous, library: Any) -> bytes:
    """What the ranks of a new connection know each other by: rank 0 makes it."""
    return library.unique_id() if rendezvous.rank == 0 else b""


def _over_network(
    rendezvous: StoreRendezvous,
    config: Config,
    group: Callable[..., _C.CudaGroup],
    memory: Any,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
) -> CudaBackend:
    ranks = group(
        heap=heap,
        rank=rendezvous.rank,
        memory=memory,
        device=device.index,
        num_sms=sms,
        timeout=config.timeout_seconds,
    )
    backend = CudaBackend(ranks, heap, device, sms, config.timeout_seconds, rendezvous.rank)
    backend.network_memory = memory
    return backend


def low_latency(
    rendezvous: StoreRendezvous,
    config: Config,
    backend: CudaBackend,
    fabric: str,
    heap: Any,
    device: torch.device,
    blocks: int,
) -> tuple[Any, list[Any], Any]:
    """The low-latency mode's launches over a buffer's network, and their memory: what the processes of a machine map,
    by rank, and that of the network's library. blocks: of each launch."""
    connect = {
        "nvshmem": _low_latency_over_nvshmem,
        "nccl": _low_latency_over_nccl,
        "tcp": over_host.low_latency,
        "verbs": over_host.low_latency,
        "ibgda": over_host.low_latency,
    }[fabric]
    with torch.cuda.device(device):
        return connect(rendezvous, config, backend, heap, device, blocks)


def _low_latency_over_nvshmem(
    rendezvous: StoreRendezvous, config: Config, backend: CudaBackend, heap: Any, device: torch.device, blocks: int
) -> tuple[Any, list[Any], Any]:
    nvshmem = fabrics.load_nvshmem()
    seconds = rendezvous.timeout.total_seconds()

    def prepare() -> tuple[None, list[int]]:
        cuda.prepare_to_allocate()
        nvshmem.prepare(device=device.index, timeout=seconds)
        return None, nvshmem.spare(bytes=heap.bytes)

    _, spares = rendezvous.exchange(prepare, seconds, kind=list[int])

    def take() -> tuple[Any, list[Any], Any]:
        unique_id, _, _ = nvshmem.initialised_for()
        memory = _nvshmem_memory(rendezvous, spares, unique_id, device, heap.bytes)
        return nvshmem.NvshmemLowLatency(group=backend.group, heap=heap, memory=memory, blocks=blocks), [], memory

    return rendezvous.agree(take, _nvshmem_limit(rendezvous))


def _low_latency_over_nccl(
    rendezvous: StoreRendezvous, config: Config, backend: CudaBackend, heap: Any, device: torch.device, blocks: int
) -> tuple[Any, list[Any], Any]:
    memory, _ = _nccl_memory(rendezvous, cuda.prepare_to_allocate, heap, device)
    launches = fabrics.load_nccl().NcclLowLatency
    # clears the signals of an earlier one, as for a buffer
    made = rendezvous.agree(
        lambda: launches(group=backend.group, heap=heap, memory=memory, blocks=blocks), config.timeout_seconds
    )
    return made, [], memory

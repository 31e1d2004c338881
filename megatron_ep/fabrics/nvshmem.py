"""The nvshmem fabric: GPUs of several machines. NVSHMEM connects only one group of ranks in the life of a process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics import choice, gpu, nvshmem_env
from megatron_ep.fabrics.connection import Connection, GpuRank, LowLatencyConnection, over_library
from megatron_ep.meeting.stores import bounded

SETUP_S = 300.0  # least timeout: set-up takes long with many ranks, and cannot be repeated after a timeout


def connect(rank: GpuRank, heap: _C.Heap, begin: Callable[[], None]) -> Connection:
    nvshmem = choice.load_nvshmem()
    rendezvous = rank.rendezvous
    seconds = rendezvous.timeout.total_seconds()
    between_machines = len(set(rank.machines)) > 1
    pairs = queue_pairs(heap, rank.blocks)

    def prepare() -> tuple[None, tuple[Any, list[int], bytes, dict[str, str]]]:
        begin()
        served = nvshmem.initialised_for()
        given = nvshmem_env.given() if served is None else {}
        if served is None and between_machines:
            nvshmem_env.check()
        nvshmem.prepare(device=rank.device.index, timeout=seconds)
        unique_id = nvshmem.unique_id() if served is None and rank.rank == 0 else b""
        return None, (served, nvshmem.spare(bytes=heap.bytes), unique_id, given)

    kind = tuple[tuple[bytes, int, int] | None, list[int], bytes, dict[str, str]]
    _, prepared = rendezvous.exchange(prepare, seconds, kind=kind)
    served, spares, ids, given = zip(*prepared, strict=True)
    unique_id = _id_of(served) or ids[0]
    nvshmem_env.check_alike(given, pairs)
    if between_machines and not any(served):
        nvshmem_env.prepare(pairs)

    def take() -> Connection:
        memory = _memory(rank, spares, unique_id, heap.bytes)
        fence, found = nvshmem_env.judge(memory.transport(heap=heap))
        group = functools.partial(nvshmem.group, fence=fence)
        return over_library(rank, heap, group, memory, found)

    return rendezvous.agree(take, _limit(rank))


def low_latency(rank: GpuRank, heap: Any, connection: Connection) -> LowLatencyConnection:
    nvshmem = choice.load_nvshmem()
    seconds = rank.rendezvous.timeout.total_seconds()

    def prepare() -> tuple[None, list[int]]:
        gpu.prepare_to_allocate()
        nvshmem.prepare(device=rank.device.index, timeout=seconds)
        return None, nvshmem.spare(bytes=heap.bytes)

    _, spares = rank.rendezvous.exchange(prepare, seconds, kind=list[int])

    def take() -> LowLatencyConnection:
        unique_id, _, _ = nvshmem.initialised_for()
        memory = _memory(rank, spares, unique_id, heap.bytes)
        group = nvshmem.low_latency(launcher=connection.launcher, heap=heap, memory=memory, blocks=rank.blocks)
        return LowLatencyConnection(group, network_memory=memory)

    return rank.rendezvous.agree(take, _limit(rank))


def queue_pairs(heap: _C.Heap, sms: int) -> int:
    """Returns the queue pairs per remote rank: one for each block that runs the coordinator warps of a channel."""
    return min(heap.channels, sms)


def _limit(rank: GpuRank) -> float:
    return max(rank.rendezvous.timeout.total_seconds(), SETUP_S)


def _memory(rank: GpuRank, spares: Sequence[list[int]], unique_id: bytes, size: int) -> Any:
    """Returns symmetric memory of `size` bytes. spares: numbers of the free allocations of each rank."""
    nvshmem = choice.load_nvshmem()
    common = set.intersection(*map(set, spares))
    if common:
        return nvshmem.NvshmemHeap.reuse(number=min(common), device=rank.device.index)

    def allocate() -> Any:
        world = rank.rendezvous.world_size
        return nvshmem.NvshmemHeap.allocate(
            unique_id=unique_id, rank=rank.rank, world=world, device=rank.device.index, bytes=size
        )

    return bounded(_limit(rank), allocate, "the ranks did not finish the set-up of NVSHMEM")


def _id_of(served: Sequence[tuple[bytes, int, int] | None]) -> bytes | None:
    """Returns the unique id with which NVSHMEM was initialised; None before that. Raises EPError if it was initialised
    for other ranks than these."""
    world = len(served)
    unique_id = next((ranks[0] for ranks in served if ranks), None)
    if unique_id is None or list(served) == [(unique_id, rank, world) for rank in range(world)]:
        return unique_id
    taken = ", ".join(str(rank) for rank, ranks in enumerate(served) if ranks)
    raise EPError(
        "NVSHMEM connects one group of ranks for as long as their processes live, and another one than this on rank "
        f"{taken} already: {choice.VARIABLE}=nccl connects any number"
    )

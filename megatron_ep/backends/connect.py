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
from megatron_ep.backends import cuda, fabrics, ibgda
from megatron_ep.backends.cuda import CudaBackend
from megatron_ep.backends.meeting import Meeting
from megatron_ep.backends.members import Member
from megatron_ep.config import Config, Topology
from megatron_ep.errors import EPError

T = TypeVar("T")

NVSHMEM_SETUP_S = 300.0  # at least: with many ranks it takes long, and one that is given up cannot be tried again


def local_ranks(topology: Topology, config: Config, heap: _C.Heap, device: torch.device, sms: int) -> CudaBackend:
    """All ranks in this process, on one GPU."""
    ranks = list(range(topology.world_size))
    with torch.cuda.device(device):
        memories = [_C.DeviceMemory.create(device.index, heap.bytes) for _ in ranks]
        return p2p(heap, ranks, memories, device, sms, config)


def processes(
    meeting: Meeting,
    topology: Topology,
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    members: Sequence[Member],
    fabric: fabrics.Choice | None = None,
) -> tuple[CudaBackend, fabrics.Choice]:
    """This process's rank, with a fabric; None: that which fits the hosts of all ranks."""
    connectors = {"p2p": _connect_p2p, "nvshmem": _connect_nvshmem, "nccl": _connect_nccl}
    hosts, wanted = [member.host for member in members], [member.fabric for member in members]
    fabric = fabric or fabrics.choose(hosts, wanted, meeting.gather)
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            cuda.check_not_stuck()
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.synchronize()  # nobody writes to an earlier buffer's memory any more

        connect = connectors[fabric.name]
        backend, found = connect(meeting, begin, config, heap, device, sms, members)
        return backend, dataclasses.replace(fabric, reason="; ".join(filter(None, (fabric.reason, found))))


def queue_pairs(heap: _C.Heap, sms: int) -> int:
    """Those to each rank between machines: one for each block that has a channel's coordinators."""
    return min(heap.channels, sms)


def _connect_p2p(
    meeting: Meeting,
    begin: Callable[[], None],
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    members: Sequence[Member],
) -> tuple[CudaBackend, str]:
    """The processes of the machine map each other's heaps through CUDA IPC."""
    group = " ".join(str(member.pid) for member in members)
    memories = peer_memories(meeting, begin, device, heap.bytes, group)
    return meeting.agree(lambda: p2p(heap, [meeting.rank], memories, device, sms, config)), ""


def peer_memories(
    meeting: Meeting, begin: Callable[[], None], device: torch.device, size: int, group: str
) -> list[Any]:
    """Memory of so many bytes on each rank's GPU, mapped by all processes of the machine."""

    def create() -> tuple[_C.DeviceMemory, bytes]:
        begin()
        memory = _C.DeviceMemory.create(device.index, size, group)
        return memory, memory.handle()

    own, handles = meeting.exchange(create)
    return meeting.agree(
        lambda: [
            own if rank == meeting.rank else _C.DeviceMemory.open(device.index, other, size)
            for rank, other in enumerate(handles)
        ]
    )


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
    meeting: Meeting,
    begin: Callable[[], None],
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    members: Sequence[Member],
) -> tuple[CudaBackend, str]:
    nvshmem = fabrics.load_nvshmem()
    seconds = meeting.timeout.total_seconds()
    between_machines = len({member.host for member in members}) > 1
    pairs = queue_pairs(heap, sms)

    def prepare() -> tuple[None, tuple[Any, list[int], bytes, dict[str, str]]]:
        begin()
        served = nvshmem.initialised_for()
        given = ibgda.given() if served is None else {}
        if served is None and between_machines:
            ibgda.check()
        nvshmem.prepare(device=device.index, timeout=seconds)
        unique_id = _new_id(meeting, nvshmem) if served is None else b""
        return None, (served, nvshmem.spare(bytes=heap.bytes), unique_id, given)

    _, prepared = meeting.exchange(prepare, seconds)
    served, spares, ids, given = zip(*prepared, strict=True)
    unique_id = _nvshmem_id(served) or ids[0]
    ibgda.check_alike(given, pairs)
    if between_machines and not any(served):
        ibgda.prepare(pairs)
    common = set.intersection(*map(set, spares))

    def allocate() -> Any:
        return nvshmem.NvshmemHeap.allocate(
            unique_id=unique_id,
            rank=meeting.rank,
            world=meeting.world_size,
            device=device.index,
            bytes=heap.bytes,
        )

    limit = max(seconds, NVSHMEM_SETUP_S)

    def take() -> tuple[CudaBackend, str]:
        if common:
            memory = nvshmem.NvshmemHeap.reuse(number=min(common), device=device.index)
        else:
            memory = _within(limit, "the set-up of NVSHMEM", allocate)
        fence, found = ibgda.judge(memory.transport(heap=heap))
        group = functools.partial(nvshmem.NvshmemGroup, fence=fence)
        return _over_network(meeting, config, group, memory, heap, device, sms), found

    return meeting.agree(take, limit)


def _nvshmem_id(served: Sequence[tuple[bytes, int, int] | None]) -> bytes | None:
    """That of the ranks whom NVSHMEM serves already, None if nobody yet. Raises EPError if they are not these."""
    world = len(served)
    unique_id = next((ranks[0] for ranks in served if ranks), None)
    if unique_id is None or list(served) == [(unique_id, rank, world) for rank in range(world)]:
        return unique_id
    taken = ", ".join(str(rank) for rank, ranks in enumerate(served) if ranks)
    raise EPError(
        "NVSHMEM connects one group of ranks for as long as their processes live, and another one than this on rank "
        f"{taken} already: {fabrics.VARIABLE}=nccl connects any number"
    )


def _within(seconds: float, what: str, collective: Callable[[], T]) -> T:
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
    meeting: Meeting,
    begin: Callable[[], None],
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    members: Sequence[Member],
) -> tuple[CudaBackend, str]:
    nccl = fabrics.load_nccl()
    seconds = meeting.timeout.total_seconds()

    def prepare() -> tuple[None, list[bytes]]:
        begin()
        return None, nccl.kept(heap=heap, rank=meeting.rank, device=device.index)

    _, kept = meeting.exchange(prepare)
    common = set.intersection(*map(set, kept))
    unique_id = min(common) if common else meeting.exchange(lambda: (None, _new_id(meeting, nccl)))[1][0]

    def take() -> tuple[Any, int]:
        free, _ = torch.cuda.mem_get_info(device)
        memory = nccl.NcclHeap(unique_id=unique_id, heap=heap, rank=meeting.rank, device=device.index, timeout=seconds)
        return memory, free - torch.cuda.mem_get_info(device)[0] - heap.bytes

    memory, besides = meeting.agree(take, seconds)
    # clears the signals of an earlier buffer, for which it waits as a launch does
    backend = meeting.agree(
        lambda: _over_network(meeting, config, nccl.NcclGroup, memory, heap, device, sms), config.timeout_seconds
    )
    if common:
        return backend, "the communicator of an earlier buffer"
    return backend, f"a communicator of its own, {besides / 2**20:.1f} MiB beside the heap"


def _new_id(meeting: Meeting, library: Any) -> bytes:
    """What the ranks of a new connection know each other by: rank 0 makes it."""
    return library.unique_id() if meeting.rank == 0 else b""


def _over_network(
    meeting: Meeting,
    config: Config,
    group: Callable[..., _C.CudaGroup],
    memory: Any,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
) -> CudaBackend:
    ranks = group(
        heap=heap,
        rank=meeting.rank,
        memory=memory,
        device=device.index,
        num_sms=sms,
        timeout=config.timeout_seconds,
    )
    return CudaBackend(ranks, heap, device, sms, config.timeout_seconds, meeting.rank)

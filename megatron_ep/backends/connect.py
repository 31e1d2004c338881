"""How the ranks of a buffer on GPUs find each other's heaps. All of it is collective: what goes wrong on one rank is
raised on all of them, and no wait for a rank that does not come is without a bound.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from megatron_ep import _C
from megatron_ep.backends import fabrics
from megatron_ep.backends.cuda import CudaBackend
from megatron_ep.backends.meeting import Meeting
from megatron_ep.config import Config, Topology
from megatron_ep.errors import EPError

T = TypeVar("T")

NVSHMEM_SETUP_S = 300.0  # at least: with many ranks it takes long, and one that is given up cannot be tried again


def local_ranks(topology: Topology, config: Config, heap: Any, device: torch.device, sms: int) -> CudaBackend:
    """All ranks in this process, on one GPU."""
    ranks = list(range(topology.world_size))
    with torch.cuda.device(device):
        memories = [_C.DeviceMemory.create(device.index, heap.bytes) for _ in ranks]
        return p2p(heap, ranks, memories, device, sms, config)


def processes(
    meeting: Meeting,
    topology: Topology,
    config: Config,
    heap: Any,
    device: torch.device,
    sms: int,
    hosts: Sequence[str],
) -> CudaBackend:
    """This process's rank, with the fabric that fits the hosts of all ranks."""
    connectors = {"p2p": _connect_p2p, "nvshmem": _connect_nvshmem, "nccl": _connect_nccl}
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.synchronize()  # nobody writes to an earlier buffer's memory any more

        meeting.agree(begin)
        return connectors[fabrics.choose(hosts, meeting.gather)](meeting, topology, config, heap, device, sms)


def _connect_p2p(
    meeting: Meeting, topology: Topology, config: Config, heap: Any, device: torch.device, sms: int
) -> CudaBackend:
    """The processes of the machine map each other's heaps through CUDA IPC."""
    members = " ".join(map(str, meeting.gather(os.getpid())))

    def create() -> tuple[Any, bytes]:
        memory = _C.DeviceMemory.create(device.index, heap.bytes, members)
        return memory, memory.handle()

    own, handle = meeting.agree(create)
    handles = meeting.gather(handle)

    def open_all() -> list[Any]:
        return [
            own if rank == meeting.rank else _C.DeviceMemory.open(device.index, other, heap.bytes)
            for rank, other in enumerate(handles)
        ]

    memories = meeting.agree(open_all)
    return meeting.agree(lambda: p2p(heap, [meeting.rank], memories, device, sms, config))


def p2p(
    heap: Any, ranks: list[int], memories: list[Any], device: torch.device, sms: int, config: Config
) -> CudaBackend:
    group = _C.CudaGroup(
        heap=heap,
        ranks=ranks,
        memories=memories,
        device=device.index,
        num_sms=sms,
        timeout=config.timeout_seconds,
    )
    return CudaBackend(group, heap, device)


def _connect_nvshmem(
    meeting: Meeting, topology: Topology, config: Config, heap: Any, device: torch.device, sms: int
) -> CudaBackend:
    nvshmem = fabrics.load_nvshmem()
    seconds = meeting.timeout.total_seconds()

    def prepare() -> tuple[Any, list[int]]:
        nvshmem.prepare(device=device.index, timeout=seconds)
        return nvshmem.initialised_for(), nvshmem.spare(bytes=heap.bytes)

    served, spares = zip(*meeting.gather(meeting.agree(prepare)), strict=True)
    unique_id = _nvshmem_id(served)
    common = set.intersection(*map(set, spares))

    def allocate() -> Any:
        return nvshmem.NvshmemHeap.allocate(
            unique_id=unique_id,
            rank=meeting.rank,
            world=meeting.world_size,
            device=device.index,
            bytes=heap.bytes,
        )

    if common:
        memory = meeting.agree(lambda: nvshmem.NvshmemHeap.reuse(number=min(common), device=device.index))
    else:
        unique_id = unique_id or _new_id(meeting, nvshmem)
        memory = meeting.agree(lambda: _within(max(seconds, NVSHMEM_SETUP_S), "the set-up of NVSHMEM", allocate))
    return _over_network(meeting, config, nvshmem.NvshmemGroup, memory, heap, device, sms)


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
    meeting: Meeting, topology: Topology, config: Config, heap: Any, device: torch.device, sms: int
) -> CudaBackend:
    nccl = fabrics.load_nccl()
    kept = meeting.gather(nccl.kept(heap=heap, rank=meeting.rank, device=device.index))
    common = set.intersection(*map(set, kept))
    unique_id = min(common) if common else _new_id(meeting, nccl)
    memory = meeting.agree(
        lambda: nccl.NcclHeap(
            unique_id=unique_id,
            heap=heap,
            rank=meeting.rank,
            device=device.index,
            timeout=meeting.timeout.total_seconds(),
        )
    )
    return _over_network(meeting, config, nccl.NcclGroup, memory, heap, device, sms)


def _new_id(meeting: Meeting, library: Any) -> bytes:
    """What the ranks of a new connection know each other by: rank 0 makes it."""
    return meeting.gather(meeting.agree(lambda: library.unique_id() if meeting.rank == 0 else b""))[0]


def _over_network(
    meeting: Meeting,
    config: Config,
    group: Callable[..., Any],
    memory: Any,
    heap: Any,
    device: torch.device,
    sms: int,
) -> CudaBackend:
    ranks = meeting.agree(
        lambda: group(
            heap=heap,
            rank=meeting.rank,
            memory=memory,
            device=device.index,
            num_sms=sms,
            timeout=config.timeout_seconds,
        )
    )
    return CudaBackend(ranks, heap, device)

"""How the ranks of a buffer on GPUs find each other's heaps. All of it is collective: what goes wrong on one rank is
raised on all of them, and no wait for a rank that does not come is without a bound.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from megatron_ep import _C, fabrics
from megatron_ep.config import Config, Topology
from megatron_ep.cuda_group import CudaRanks
from megatron_ep.errors import EPError

if TYPE_CHECKING:
    from megatron_ep.buffer import Buffer

T = TypeVar("T")

NVSHMEM_SETUP_S = 300.0  # at least: with many ranks it takes long, and one that is given up cannot be tried again


def local_ranks(topology: Topology, config: Config, heap: Any, device: torch.device, sms: int) -> CudaRanks:
    """All ranks in this process, on one GPU."""
    ranks = list(range(topology.world_size))
    with torch.cuda.device(device):
        memories = [_C.DeviceMemory.create(device.index, heap.bytes) for _ in ranks]
        return _p2p(heap, ranks, memories, device, sms, config)


def connect(buffer: Buffer, heap: Any, device: torch.device, sms: int, hosts: Sequence[str]) -> CudaRanks:
    """This process's rank, with the fabric that fits the hosts of all ranks."""
    connectors = {"p2p": _connect_p2p, "nvshmem": _connect_nvshmem, "nccl": _connect_nccl}
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.synchronize()  # nobody writes to an earlier buffer's memory any more

        buffer._agree(begin)
        return connectors[fabrics.choose(hosts, buffer._gather)](buffer, heap, device, sms)


def _connect_p2p(buffer: Buffer, heap: Any, device: torch.device, sms: int) -> CudaRanks:
    """The processes of the machine map each other's heaps through CUDA IPC."""
    members = " ".join(map(str, buffer._gather(os.getpid())))

    def create() -> tuple[Any, bytes]:
        memory = _C.DeviceMemory.create(device.index, heap.bytes, members)
        return memory, memory.handle()

    own, handle = buffer._agree(create)
    handles = buffer._gather(handle)

    def open_all() -> list[Any]:
        return [
            own if rank == buffer.rank else _C.DeviceMemory.open(device.index, other, heap.bytes)
            for rank, other in enumerate(handles)
        ]

    memories = buffer._agree(open_all)
    return buffer._agree(lambda: _p2p(heap, [buffer.rank], memories, device, sms, buffer.config))


def _p2p(heap: Any, ranks: list[int], memories: list[Any], device: torch.device, sms: int, config: Config) -> CudaRanks:
    group = _C.CudaGroup(
        heap=heap,
        ranks=ranks,
        memories=memories,
        device=device.index,
        num_sms=sms,
        timeout=config.timeout_seconds,
    )
    return CudaRanks(group, device, heap.nvl_ring_bytes)


def _connect_nvshmem(buffer: Buffer, heap: Any, device: torch.device, sms: int) -> CudaRanks:
    nvshmem = fabrics.load_nvshmem()
    seconds = buffer._timeout.total_seconds()

    def prepare() -> tuple[Any, list[int]]:
        nvshmem.prepare(device=device.index, timeout=seconds)
        return nvshmem.initialised_for(), nvshmem.spare(bytes=heap.bytes)

    served, spares = zip(*buffer._gather(buffer._agree(prepare)), strict=True)
    unique_id = _nvshmem_id(served)
    everyones = set.intersection(*map(set, spares))

    def allocate() -> Any:
        return nvshmem.NvshmemHeap.allocate(
            unique_id=unique_id,
            rank=buffer.rank,
            world=buffer.topology.world_size,
            device=device.index,
            bytes=heap.bytes,
        )

    if everyones:
        memory = buffer._agree(lambda: nvshmem.NvshmemHeap.reuse(number=min(everyones), device=device.index))
    else:
        unique_id = unique_id or _new_id(buffer, nvshmem)
        memory = buffer._agree(lambda: _within(max(seconds, NVSHMEM_SETUP_S), "the set-up of NVSHMEM", allocate))
    return _over_network(buffer, nvshmem.NvshmemGroup, memory, heap, device, sms)


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


def _connect_nccl(buffer: Buffer, heap: Any, device: torch.device, sms: int) -> CudaRanks:
    nccl = fabrics.load_nccl()
    kept = buffer._gather(nccl.kept(heap=heap, rank=buffer.rank, device=device.index))
    everyones = set.intersection(*map(set, kept))
    unique_id = min(everyones) if everyones else _new_id(buffer, nccl)
    memory = buffer._agree(
        lambda: nccl.NcclHeap(
            unique_id=unique_id,
            heap=heap,
            rank=buffer.rank,
            device=device.index,
            timeout=buffer._timeout.total_seconds(),
        )
    )
    return _over_network(buffer, nccl.NcclGroup, memory, heap, device, sms)


def _new_id(buffer: Buffer, library: Any) -> bytes:
    """What the ranks of a new connection know each other by: rank 0 makes it."""
    return buffer._gather(buffer._agree(lambda: library.unique_id() if buffer.rank == 0 else b""))[0]


def _over_network(
    buffer: Buffer, group: Callable[..., Any], memory: Any, heap: Any, device: torch.device, sms: int
) -> CudaRanks:
    ranks = buffer._agree(
        lambda: group(
            heap=heap,
            rank=buffer.rank,
            memory=memory,
            device=device.index,
            num_sms=sms,
            timeout=buffer.config.timeout_seconds,
        )
    )
    return CudaRanks(ranks, device, heap.nvl_ring_bytes)

"""The nccl fabric: GPUs of several machines, through NCCL's device API and a communicator of the buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.fabrics import choice, gpu
from megatron_ep.fabrics.connection import Connection, GpuRank, LowLatencyConnection, over_library


def connect(rank: GpuRank, heap: _C.Heap, begin: Callable[[], None]) -> Connection:
    memory, found = _memory(rank, heap, begin)
    group = choice.load_nccl().group
    # The group clears the signals of an earlier buffer, and waits for that as long as a launch waits.
    seconds = rank.config.timeout_seconds
    return rank.rendezvous.agree(lambda: over_library(rank, heap, group, memory, found), seconds)


def low_latency(rank: GpuRank, heap: Any, connection: Connection) -> LowLatencyConnection:
    memory, _ = _memory(rank, heap, gpu.prepare_to_allocate)
    launches = choice.load_nccl().low_latency
    # This clears the signals of an earlier heap, as in `connect`.
    made = rank.rendezvous.agree(
        lambda: launches(launcher=connection.launcher, heap=heap, memory=memory, blocks=rank.blocks),
        rank.config.timeout_seconds,
    )
    return LowLatencyConnection(made, network_memory=memory)


def _memory(rank: GpuRank, heap: Any, begin: Callable[[], None]) -> tuple[Any, str]:
    """Returns symmetric memory for a heap of either mode, and a description of it."""
    nccl, rendezvous, device = choice.load_nccl(), rank.rendezvous, rank.device
    seconds = rendezvous.timeout.total_seconds()

    def prepare() -> tuple[None, list[bytes]]:
        begin()
        return None, nccl.kept(heap=heap, rank=rank.rank, device=device.index)

    def new_id() -> tuple[None, bytes]:
        return None, nccl.unique_id() if rank.rank == 0 else b""

    _, kept = rendezvous.exchange(prepare, kind=list[bytes])
    common = set.intersection(*map(set, kept))
    unique_id = min(common) if common else rendezvous.exchange(new_id)[1][0]

    def take() -> tuple[Any, int]:
        free, _ = torch.cuda.mem_get_info(device)
        memory = nccl.NcclHeap(unique_id=unique_id, heap=heap, rank=rank.rank, device=device.index, timeout=seconds)
        return memory, free - torch.cuda.mem_get_info(device)[0] - heap.bytes

    memory, besides = rendezvous.agree(take, seconds)
    if common:
        return memory, "the communicator of an earlier buffer"
    return memory, f"a separate communicator, {besides / 2**20:.1f} MiB in addition to the heap"

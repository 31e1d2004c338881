"""The p2p fabric: GPUs of one machine, or of one NVLink domain, that map each other's memory, or one GPU shared by all
ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.config import Config
from megatron_ep.fabrics import gpu
from megatron_ep.fabrics.connection import Connection, GpuRank, LowLatencyConnection
from megatron_ep.fabrics.peer_memory import peer_memories


def connect(rank: GpuRank, heap: _C.Heap, begin: Callable[[], None]) -> Connection:
    memories = peer_memories(rank.rendezvous, begin, rank.device, heap.bytes, rank.processes, kind=rank.memory)
    return rank.rendezvous.agree(lambda: over(memories, [rank.rank], heap, rank.device, rank.blocks, rank.config))


def low_latency(rank: GpuRank, heap: _C.LowLatencyHeap, connection: Connection) -> LowLatencyConnection:
    memories = peer_memories(
        rank.rendezvous, gpu.prepare_to_allocate, rank.device, heap.bytes, rank.processes, kind=rank.memory
    )
    return low_latency_over(memories, heap, rank.blocks, connection)


def over(
    memories: list[_C.DeviceMemory],
    ranks: Sequence[int],
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    config: Config,
) -> Connection:
    """Connects the ranks of this process. memories: memory of each rank of the buffer."""
    launcher = _C.cuda_launcher(
        heap=heap,
        ranks=list(ranks),
        memories=memories,
        device=device.index,
        num_sms=sms,
        timeout=config.timeout_seconds,
    )
    return Connection(launcher, memories)


def own_memories(count: int, size: int, device: torch.device) -> list[_C.DeviceMemory]:
    """Returns memory of ranks that are all in this process, on one GPU."""
    with torch.cuda.device(device):
        gpu.prepare_to_allocate()
        return [_C.DeviceMemory.create(device.index, size) for _ in range(count)]


def low_latency_over(
    memories: list[Any], heap: _C.LowLatencyHeap, blocks: int, connection: Connection
) -> LowLatencyConnection:
    launcher = _C.cuda_low_latency(launcher=connection.launcher, heap=heap, memories=memories, blocks=blocks)
    return LowLatencyConnection(launcher, memories)

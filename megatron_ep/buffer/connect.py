"""Connects the ranks of a buffer on GPUs over the fabric that `fabrics/choice.py` has chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.config import Topology
from megatron_ep.fabrics import atomics, choice, gpu, nccl, nvshmem, p2p, proxied
from megatron_ep.fabrics.connection import Connection, GpuRank, LowLatencyConnection

CONNECT: dict[str, Callable[..., Connection]] = {
    "p2p": p2p.connect,
    "nvshmem": nvshmem.connect,
    "nccl": nccl.connect,
    **{name: functools.partial(proxied.connect, fabric=name) for name in choice.OF_HOST},
}
LOW_LATENCY: dict[str, Callable[..., LowLatencyConnection]] = {
    "p2p": p2p.low_latency,
    "nvshmem": nvshmem.low_latency,
    "nccl": nccl.low_latency,
    **dict.fromkeys(choice.OF_HOST, proxied.low_latency),
}


def connect(
    rank: GpuRank, topology: Topology, heap: _C.Heap, fabric: choice.Choice
) -> tuple[Connection, choice.Choice]:
    """Connects this process's rank with the others. Returns the connection, and the fabric with the reason for it and a
    description."""
    size = topology.world_size if fabric.name == "p2p" else topology.ranks_per_node
    first = rank.rank // size * size
    mapped = range(first, first + size)
    with contextlib.ExitStack() as stack:

        def begin() -> None:
            atomics.check(rank.rank, rank.gpus, mapped)
            stack.enter_context(torch.cuda.device(rank.device))
            gpu.prepare_to_allocate()

        connection = CONNECT[fabric.name](rank, heap, begin)
    reason = "; ".join(filter(None, (fabric.reason, connection.reason)))
    return connection, dataclasses.replace(fabric, reason=reason)


def low_latency(rank: GpuRank, heap: Any, fabric: str, connection: Connection) -> LowLatencyConnection:
    """Connects the low-latency mode of a buffer, over the buffer's fabric."""
    with torch.cuda.device(rank.device):
        return LOW_LATENCY[fabric](rank, heap, connection)

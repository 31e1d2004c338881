"""Shared code of the nvshmem and nccl fabrics, in which a library carries the puts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ep import _C
from megatron_ep.fabrics.connection import Connection, GpuRank


def over_library(rank: GpuRank, heap: _C.Heap, group: Callable[..., Any], memory: Any, reason: str) -> Connection:
    """Returns the connection over a library's symmetric memory. group: constructor of the compiled group."""
    made = group(
        heap=heap,
        rank=rank.rank,
        memory=memory,
        device=rank.device.index,
        num_sms=rank.blocks,
        timeout=rank.config.timeout_seconds,
    )
    return Connection(made, network_memory=memory, library_timeout=rank.config.timeout_seconds, reason=reason)

"""Connects the ranks of a buffer on GPUs over the fabric that `fabrics/choice.py` has chosen. Loads no other one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.config import Topology
from megatron_ep.fabrics import atomics, choice, gpu
from megatron_ep.fabrics.connection import Connection, GpuRank, LowLatencyConnection


def _module(fabric: str) -> Any:
    """Returns the module of a fabric, which has `connect` and `low_latency`."""
    name = "proxied" if fabric in choice.OF_HOST else fabric
    return importlib.import_module(f"megatron_ep.fabrics.{name}")


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

        module = _module(fabric.name)
        which = {"fabric": fabric.name} if fabric.name in choice.OF_HOST else {}
        connection: Connection = module.connect(rank, heap, begin, **which)
    reason = "; ".join(filter(None, (fabric.reason, connection.reason)))
    return connection, dataclasses.replace(fabric, reason=reason)


def low_latency(rank: GpuRank, heap: Any, fabric: str, connection: Connection) -> LowLatencyConnection:
    """Connects the low-latency mode of a buffer, over the buffer's fabric."""
    with torch.cuda.device(rank.device):
        connected: LowLatencyConnection = _module(fabric).low_latency(rank, heap, connection)
    return connected

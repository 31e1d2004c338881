"""Memory of GPUs that the processes of a machine map through CUDA IPC."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.fabrics import gpu
from megatron_ep.meeting.rendezvous import StoreRendezvous

# Memory of other processes, by the buffers that mapped it.
_mapped: weakref.WeakSet[_C.DeviceMemory] = weakref.WeakSet()


def peer_memories(
    rendezvous: StoreRendezvous,
    begin: Callable[[], None],
    device: torch.device,
    size: int,
    group: str,
    node: range | None = None,
) -> list[Any]:
    """Memory of so many bytes on each rank's GPU, zeroed, and mapped by the processes of its machine. Collective.

    begin: returns when this rank writes to nobody's memory any more.
    group: names the processes that may map it.
    node: the ranks that do; None: all.

    Returns it by rank, None for a rank of another node.
    """

    def create() -> tuple[_C.DeviceMemory, bytes]:
        begin()
        memory = _C.DeviceMemory.create(device.index, size, group)
        return memory, memory.handle()

    own, handles = rendezvous.exchange(create)

    mapped = range(rendezvous.world_size) if node is None else node

    def open_others() -> list[_C.DeviceMemory | None]:
        # Memory that is used again was still written to by ranks that were behind this one: credits, at the end of
        # their last call. Now all have begun, and none writes before all have come here.
        own.clear()
        others = {
            rank: _C.DeviceMemory.open(device.index, handles[rank], size) for rank in mapped if rank != rendezvous.rank
        }
        _mapped.update(others.values())
        return [own if rank == rendezvous.rank else others.get(rank) for rank in range(rendezvous.world_size)]

    return rendezvous.agree(open_others)


def maps_others() -> bool:
    """Whether this process maps the memory of another one through CUDA IPC."""
    gpu.run_deferred()  # what a finalizer has dropped may be mapped still
    return not all(memory.is_released for memory in _mapped)

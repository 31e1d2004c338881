"""GPU memory that the processes of a machine map through CUDA IPC."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.fabrics import gpu
from megatron_ep.meeting.rendezvous import StoreRendezvous

# Memory of other processes that buffers of this process have mapped.
_mapped: weakref.WeakSet[_C.DeviceMemory] = weakref.WeakSet()


def peer_memories(
    rendezvous: StoreRendezvous,
    begin: Callable[[], None],
    device: torch.device,
    size: int,
    group: str,
    node: range | None = None,
) -> list[Any]:
    """Allocates `size` zeroed bytes on each rank's GPU and maps the memory of other ranks. Collective.

    begin: returns when this rank no longer writes to the memory of other ranks.
    group: name of the processes that may map the memory.
    node: ranks whose memory is mapped; None: all.

    Returns the memory by rank, None for a rank that is not mapped.
    """

    def create() -> tuple[_C.DeviceMemory, bytes]:
        begin()
        memory = _C.DeviceMemory.create(device.index, size, group)
        return memory, memory.handle()

    own, handles = rendezvous.exchange(create)

    mapped = range(rendezvous.world_size) if node is None else node

    def open_others() -> list[_C.DeviceMemory | None]:
        # Slower ranks may have written the credits of their last call to memory that is reused here. All ranks have
        # passed `begin` now, and none writes before all have finished this step.
        own.clear()
        others = {
            rank: _C.DeviceMemory.open(device.index, handles[rank], size) for rank in mapped if rank != rendezvous.rank
        }
        _mapped.update(others.values())
        return [own if rank == rendezvous.rank else others.get(rank) for rank in range(rendezvous.world_size)]

    return rendezvous.agree(open_others)


def maps_others() -> bool:
    """Returns whether this process maps the memory of another one through CUDA IPC."""
    gpu.run_deferred()  # memory that a finalizer has dropped may still be mapped
    return not all(memory.is_released for memory in _mapped)

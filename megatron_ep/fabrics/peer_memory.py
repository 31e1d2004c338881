"""GPU memory that processes map from each other.

ipc         CUDA IPC, between the processes of a machine
descriptor  CUDA virtual memory, by file descriptors, between the processes of a host
fabric      CUDA virtual memory, by fabric handles, between the hosts of an NVLink domain
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics import descriptors, gpu
from megatron_ep.meeting.rendezvous import StoreRendezvous

VARIABLE = "MEGATRON_EP_PEER_MEMORY"
IPC, DESCRIPTOR, FABRIC = KINDS = ("ipc", "descriptor", "fabric")
PROBE_BYTES = 4096  # the driver takes a page

# Memory of other processes that buffers of this process have mapped.
_mapped: weakref.WeakSet[_C.DeviceMemory] = weakref.WeakSet()


def peer_memories(
    rendezvous: StoreRendezvous,
    begin: Callable[[], None],
    device: torch.device,
    size: int,
    group: str,
    node: range | None = None,
    kind: str = IPC,
) -> list[Any]:
    """Allocates `size` zeroed bytes on each rank's GPU and maps the memory of other ranks. Collective.

    begin: returns when this rank no longer writes to the memory of other ranks.
    group: name of the processes that may map the memory.
    node: ranks whose memory is mapped; None: all.
    kind: how they map it.

    Returns the memory by rank, None for a rank that is not mapped.
    """

    def create() -> _C.DeviceMemory:
        begin()
        return _C.DeviceMemory.create(device.index, size, group, kind)

    mapped = range(rendezvous.world_size) if node is None else node
    others = [rank for rank in mapped if rank != rendezvous.rank]
    with exchanged(rendezvous, create, others, kind) as (own, handles):

        def open_others() -> list[_C.DeviceMemory | None]:
            # Slower ranks may have written the credits of their last call to memory that is reused here. All ranks have
            # passed `begin` now, and none writes before all have finished this step.
            own.clear()
            opened = {rank: _C.DeviceMemory.open(device.index, handles[rank], size, kind) for rank in others}
            _mapped.update(opened.values())
            return [own if rank == rendezvous.rank else opened.get(rank) for rank in range(rendezvous.world_size)]

        return rendezvous.agree(open_others)


@contextlib.contextmanager
def exchanged(
    rendezvous: StoreRendezvous, own_memory: Callable[[], Any], others: Sequence[int], kind: str
) -> Iterator[tuple[Any, dict[int, bytes]]]:
    """Exchanges handles of memory. Collective; the ranks that a rank names must name it, too.

    Returns this rank's memory, and the handles of `others` by rank, which are valid inside the context.
    """
    if kind != DESCRIPTOR:

        def step() -> tuple[Any, bytes]:
            memory = own_memory()
            return memory, memory.handle()

        own, handles = rendezvous.exchange(step)
        yield own, {rank: handles[rank] for rank in others}
        return
    seconds = rendezvous.timeout.total_seconds()
    with contextlib.ExitStack() as stack:

        def open_mailbox() -> tuple[tuple[Any, socket.socket], str]:
            memory, listener = own_memory(), stack.enter_context(descriptors.mailbox(len(others), seconds))
            return (memory, listener), listener.getsockname()

        (own, listener), mailboxes = rendezvous.exchange(open_mailbox)

        def send() -> None:
            descriptor = int.from_bytes(own.handle(), sys.byteorder)
            try:
                descriptors.send(descriptor, rendezvous.rank, [mailboxes[rank] for rank in others], seconds)
            finally:
                os.close(descriptor)

        rendezvous.agree(send)
        received = rendezvous.agree(lambda: descriptors.receive(listener, len(others)))
    try:
        yield own, {rank: received[rank].to_bytes(4, sys.byteorder) for rank in others}
    finally:
        descriptors.close(received)


def kind_for(machines: Sequence[str], wanted: str | None, in_use: str | None = None) -> str:
    """Returns how ranks of these machines map each other's memory. Raises ValueError for another value of the variable.

    wanted: value of MEGATRON_EP_PEER_MEMORY; None: it is not set.
    in_use: how ranks that are connected already map it; None: none is connected.
    """
    if wanted is not None and wanted not in KINDS:
        raise ValueError(f"environment variable {VARIABLE} is {wanted!r}, must be one of {', '.join(KINDS)}")
    return wanted or in_use or (DESCRIPTOR if len(set(machines)) == 1 else FABRIC)


def lacks(rendezvous: StoreRendezvous, device: torch.device, kind: str) -> str:
    """Returns why ranks cannot map each other's memory, a kind of CUDA virtual memory; "" if a kernel of each rank has
    reached the memory of all others. Collective.

    What the driver says that it supports is not enough: without a channel of NVIDIA's IMEX service, for example, it
    refuses the memory that it says it could make.
    """
    try:
        memories = peer_memories(rendezvous, lambda: None, device, PROBE_BYTES, "", kind=kind)
        own = memories.pop(rendezvous.rank)

        def check_own() -> None:
            if (reached := own.first_word()) != len(memories):
                raise EPError(f"atomics of {reached} of {len(memories)} ranks reached the memory of this one")

        rendezvous.agree(lambda: [memory.add_one() for memory in memories])
        rendezvous.agree(check_own)
    except EPError as error:
        return str(error)
    for memory in (own, *memories):
        memory.release()
    return ""


def report() -> str:
    """Describes which kinds this process can make on its GPU, for `megatron-ep env`."""
    answers = {}
    for kind in KINDS:
        try:
            memory = _C.DeviceMemory.create(torch.cuda.current_device(), PROBE_BYTES, "", kind)
            handle = memory.handle()
            if kind == DESCRIPTOR:
                os.close(int.from_bytes(handle, sys.byteorder))
            memory.release()
            answers[kind] = "yes"
        except RuntimeError as error:
            answers[kind] = str(error)
    return "; ".join(f"{kind}: {answer}" for kind, answer in answers.items())


def maps_others() -> bool:
    """Returns whether this process maps the memory of another one."""
    gpu.run_deferred()  # memory that a finalizer has dropped may still be mapped
    return not all(memory.is_released for memory in _mapped)

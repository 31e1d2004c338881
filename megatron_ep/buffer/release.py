"""Collective release of a buffer's memory. No rank unmaps memory that it still writes to, or frees memory that another
rank still maps. All waits have bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ep.buffer.interface import Backend
from megatron_ep.errors import EPError
from megatron_ep.fabrics import peer_memory
from megatron_ep.meeting.rendezvous import DECISION_S, StoreRendezvous
from megatron_ep.meeting.stores import bounded

MAPS_OTHERS, MAPS_NOBODY = "maps others", "maps nobody"


def finish(rendezvous: StoreRendezvous, backend: Backend) -> EPError | None:
    """Waits until no rank uses the memory of another one. Returns the error if that is not known for all ranks.

    Raises ValueError on all ranks alike if one still needs its memory, and EPError if launches of this rank do not end.
    """
    has_finished = False

    def wait() -> tuple[None, str]:
        nonlocal has_finished
        need = backend.needs_memory()
        if not need:
            backend.drain()
        has_finished = True
        return None, need

    try:
        _, needs = rendezvous.exchange(wait)
    except EPError as lost:
        if not has_finished:
            raise
        return lost
    for rank, need in enumerate(needs):
        if need:
            raise ValueError(f"rank {rank} cannot release the buffer: {need}")
    return None


def of_machine(
    rendezvous: StoreRendezvous,
    memories: Sequence[Sequence[Any]],
    has_ended: Callable[[int], bool],
    release_left: Callable[[], None],
    *,
    all_came: bool,
) -> None:
    """Releases memory that processes have mapped.

    Raises EPError that names the ranks that still map the memory of this one, which then stays for a later buffer.

    memories: lists by rank, with None for memory that is not mapped here.
    has_ended: returns whether a rank's process has ended, so that it maps nothing.
    release_left: frees what closed buffers of these ranks have kept.
    all_came: whether all ranks have finished; if not, late ones are waited for only briefly.
    """
    for of_ranks in memories:
        for rank, memory in enumerate(of_ranks):
            if rank != rendezvous.rank and memory is not None:
                memory.release()
    own_word = MAPS_OTHERS if peer_memory.maps_others() else MAPS_NOBODY
    seconds = rendezvous.timeout.total_seconds() if all_came else DECISION_S
    words = rendezvous.leave(own_word, has_ended, seconds)
    late = [rank for rank in range(rendezvous.world_size) if rank not in words and not has_ended(rank)]
    if late:
        raise EPError(
            f"rank {', '.join(map(str, late))} did not give up the memory of rank {rendezvous.rank} within "
            f"{seconds:g} s, so it stays allocated, for a later buffer"
        )
    for of_ranks in memories:
        of_ranks[rendezvous.rank].release()
    if set(words.values()) == {MAPS_NOBODY}:  # a rank that maps any memory may map what closed buffers have kept
        release_left()


def of_network(rendezvous: StoreRendezvous, library: Any, memories: Sequence[Any]) -> None:
    """Releases symmetric memory, also of closed buffers, in the same order on all ranks. library: extension of the
    fabric. Raises EPError on all ranks if that fails or takes too long."""
    held = {memory.key: memory for memory in memories}
    keys = rendezvous.gather(sorted({*held, *library.left()}), kind=list[bytes] | list[int])

    def give_back() -> None:
        for key in sorted(set.intersection(*map(set, keys))):
            if key in held:
                held[key].release()
            else:
                library.release_left(key)

    seconds = rendezvous.timeout.total_seconds()
    late = "the ranks did not finish the release of the network's memory"
    rendezvous.agree(lambda: bounded(seconds, give_back, late), seconds)

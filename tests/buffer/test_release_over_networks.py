"""How ranks give back the memory that a network's library has for them, with a stand-in for that library."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from run_on import run_on

import megatron_ep as ep
from megatron_ep.buffer import release
from megatron_ep.meeting.rendezvous import StoreRendezvous

W = 3


class Library:
    """What it gave back, in order, and what earlier buffers have left in it."""

    def __init__(self, left: set[int]):
        self.of_left = left
        self.given_back: list[int] = []

    def left(self) -> list[int]:
        return list(self.of_left)

    def release_left(self, key: int) -> None:
        self.of_left.remove(key)
        self.given_back.append(key)


class Memory:
    def __init__(self, library: Library, key: int, seconds: float = 0.0):
        self.library, self.key, self.seconds = library, key, seconds

    def release(self) -> None:
        time.sleep(self.seconds)
        self.library.given_back.append(self.key)


def rendezvous(seconds: float = 20.0) -> StoreRendezvous:
    return StoreRendezvous(None, timedelta(seconds=seconds))


@run_on("ranks")
def test_ranks_give_back_what_all_have_in_one_order() -> None:
    """Rank 1 has dropped what the others hold still, and has something that nobody else has."""
    library = Library({1, 3, 9} if dist.get_rank() == 1 else {3})
    held = (2,) if dist.get_rank() == 1 else (2, 1)
    release.of_network(rendezvous(), library, [Memory(library, key) for key in held])
    assert library.given_back == [1, 2, 3]


@run_on("ranks")
def test_a_release_that_does_not_end_is_an_error_everywhere() -> None:
    library = Library(set())
    forever = 60.0 if dist.get_rank() == 1 else 0.0  # as when another rank dies inside it
    others = "" if dist.get_rank() == 1 else "rank 1 .*"
    reason = "the ranks did not finish the release of the network's memory within 1 s"
    with pytest.raises(ep.EPError, match=f"^{others}{reason}$"):
        release.of_network(rendezvous(1.0), library, [Memory(library, 0, forever)])

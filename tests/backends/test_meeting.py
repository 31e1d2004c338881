"""How ranks agree over the store of torch.distributed: what one cannot do fails on all, and every wait has a bound."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import megatron_ep as ep
from megatron_ep.backends.meeting import Meeting
from megatron_ep.bench.local_ranks import LocalRanks

W = 3
PATIENCE = 1.0


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 120) as ranks:
        yield ranks


def meet(seconds: float = 60.0) -> Meeting:
    return Meeting(dist.group.WORLD, timedelta(seconds=seconds))


def apart() -> None:
    """Returns when all ranks have come here, by other means than a meeting."""
    dist.barrier()


def run_exchanges() -> None:
    meeting, rank = meet(), dist.get_rank()
    assert meeting.gather({"rank": rank, "bytes": bytes([0, 255, rank])}) == [
        {"rank": other, "bytes": bytes([0, 255, other])} for other in range(W)
    ]
    kept, told = meeting.exchange(lambda: (f"kept by {rank}", 10 * rank))
    assert kept == f"kept by {rank}" and told == [0, 10, 20]
    assert meeting.agree(lambda: rank) == rank
    assert meet().gather(rank) == [0, 1, 2], "another meeting of the group is apart from this one"
    assert meeting.gather(-rank) == [0, -1, -2]


def test_exchanges(ranks) -> None:
    ranks.run(run_exchanges)


def run_attempts() -> None:
    """Ranks as torchrun restarts them, over one store: rank 2 ended before it had come to the first attempt's meeting,
    so the others' second one is its first."""
    with mock.patch.dict(os.environ, GROUP_WORLD_SIZE="1", TORCHELASTIC_RESTART_COUNT="0"):
        if dist.get_rank() != 2:
            meet()
    with mock.patch.dict(os.environ, GROUP_WORLD_SIZE="1", TORCHELASTIC_RESTART_COUNT="1"):
        assert meet(5).gather(dist.get_rank()) == [0, 1, 2]


def test_ranks_that_are_restarted_meet_anew(ranks) -> None:
    ranks.run(run_attempts)


def run_failure(kind: type[Exception]) -> None:
    def step() -> None:
        if dist.get_rank() == 1:
            raise kind("out of luck")

    own = dist.get_rank() == 1 and issubclass(kind, (ValueError, ep.EPError))
    meeting = meet()
    with pytest.raises(kind if own else ep.EPError) as caught:
        meeting.agree(step)
    expected = "out of luck" if own else "rank 1 could not set up the buffer: "
    assert str(caught.value).startswith(expected) and str(caught.value).endswith("out of luck")
    meeting.barrier()


@pytest.mark.parametrize("kind", [ValueError, ep.EPError, RuntimeError])
def test_what_fails_on_one_rank_fails_on_all(ranks, kind: type[Exception]) -> None:
    ranks.run(run_failure, kind)


def run_absence(absent: int, begin: Callable[[float], Meeting]) -> None:
    """A rank comes to an exchange when the others have given up; all of them meet again after that."""
    meeting = begin(PATIENCE)
    if dist.get_rank() == absent:
        apart()
    started = time.monotonic()
    with pytest.raises(ep.EPError, match=rf"^rank {absent} did not come to step 1 of .* within 1 s$"):
        meeting.gather(None)
    waited = time.monotonic() - started
    if dist.get_rank() == absent:
        assert waited < PATIENCE / 2, "the verdict was there already"
    else:
        assert PATIENCE * 0.9 < waited < PATIENCE + 5
        apart()
    assert meeting.gather(dist.get_rank()) == list(range(W))


@pytest.mark.parametrize("absent", range(W))
def test_a_rank_that_comes_late_hears_that_the_others_gave_up(ranks, absent: int) -> None:
    ranks.run(run_absence, absent, meet)


def run_missed_meeting() -> None:
    """Rank 2 does not even begin, and begins later; the meeting after that is one of all ranks again."""
    if dist.get_rank() == 2:
        apart()
    with pytest.raises(ep.EPError, match="rank 2 did not come"):
        meet(PATIENCE).gather(None)
    if dist.get_rank() != 2:
        apart()
    assert meet().gather(dist.get_rank()) == list(range(W))


def test_a_rank_that_missed_a_meeting_comes_to_the_next(ranks) -> None:
    ranks.run(run_missed_meeting)


def run_slow_step() -> None:
    slow = dist.get_rank() == 1
    meet(PATIENCE).agree(lambda: time.sleep(2.5 * PATIENCE) if slow else None, 10.0)


def test_a_step_may_take_the_time_that_was_given_to_it(ranks) -> None:
    ranks.run(run_slow_step)


def run_failure_and_absence() -> str:
    """Rank 1 fails, and rank 2 does not come: rank 1 says why it failed."""
    meeting = meet(PATIENCE)
    if dist.get_rank() == 2:
        apart()
        return ""

    def step() -> None:
        if dist.get_rank() == 1:
            raise ValueError("out of luck")

    with pytest.raises(RuntimeError if dist.get_rank() == 0 else ValueError) as caught:
        meeting.agree(step)
    apart()
    return str(caught.value)


def test_the_own_failure_is_said_before_another_ranks_absence(ranks) -> None:
    assert ranks.run(run_failure_and_absence)[1] == "out of luck"


def run_many() -> int:
    meeting = meet()
    for _ in range(4):
        meeting.gather(bytes(1 << 10))
    apart()
    count = _get_default_store().num_keys()
    apart()
    for _ in range(20):
        meeting.gather(bytes(1 << 10))
    apart()
    return _get_default_store().num_keys() - count


def test_what_was_told_does_not_stay_in_the_store(ranks) -> None:
    assert max(ranks.run(run_many)) <= 0


def run_sub_groups() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    for pair, members in zip(pairs, ([0, 1], [1, 2]), strict=True):
        if dist.get_rank() in members:
            meeting = Meeting(pair, timedelta(seconds=60))
            assert meeting.gather(dist.get_rank()) == members and meeting.rank == members.index(dist.get_rank())


def test_groups_meet_apart(ranks) -> None:
    ranks.run(run_sub_groups)

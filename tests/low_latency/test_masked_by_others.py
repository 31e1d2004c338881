"""Ranks that others have masked: they end, alone, and all that go on are in one group."""

import logging
import time

import pytest
import torch
from nightly import at_night
from rank_threads import run_together, thread_ranks
from waits import patience

import megatron_ep as ep

pytestmark = pytest.mark.usefixtures("closed_afterwards")
H, T, K = 8, 4, 2
MASK_S = patience(0.4)


def make(nodes, ranks_per_node, *, timeout=50 * MASK_S, mask_timeout=MASK_S):
    """The low-latency mode of each rank, one a thread."""
    world = nodes * ranks_per_node
    buffers = thread_ranks(nodes, ranks_per_node, ep.Config(num_experts=2 * world, timeout=timeout))
    sizes = {"max_tokens": T, "hidden": H, "topk": 2 * world, "dtype": torch.float32}
    return run_together(buffers, lambda b: ep.LowLatency(b, **sizes, on_dead_rank="mask", mask_timeout=mask_timeout))


def together(modes, work):
    return run_together(modes, lambda mode: work(mode, mode.buffer.rank))


def inputs(mode):
    """Each token chooses all experts."""
    experts = mode.buffer.config.num_experts
    return [torch.ones(T, H)], [torch.arange(experts).repeat(T, 1)]


def trip(mode):
    """How many ranks a call was made with."""
    received = mode.dispatch(*inputs(mode))
    y = mode.combine(received.x, received.handle)[0]
    assert (y == y[0, 0]).all() and y[0, 0] % 2 == 0
    return int(y[0, 0]) // 2


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 4), (2, 2), at_night(1, 2)])
def test_a_late_rank_ends_alone(nodes, ranks_per_node, caplog):
    modes = make(nodes, ranks_per_node)
    world = len(modes)

    def work(mode, rank):
        assert trip(mode) == world
        if rank == 1:
            time.sleep(2.5 * MASK_S)
        return [trip(mode) for _ in range(3)]

    results = together(modes, work)
    late = results.pop(1)
    assert results == [[world - 1] * 3] * (world - 1)
    assert isinstance(late, ep.EPMaskedError), late
    assert "rank 1 came too late: rank " in str(late) and "has masked it and goes on without it" in str(late)
    for mode in modes:
        rank = mode.buffer.rank
        assert mode.masked_ranks() == ([[]] if rank == 1 else [[1]]), "a masked rank masks nobody"
    said = warnings_of(caplog)
    for rank in {*range(world)} - {1}:
        of_rank = [text for text in said if text.startswith(f"rank {rank} has masked rank 1 and goes on without it")]
        assert len(of_rank) == 1, said
        seconds = float(of_rank[0].partition("it waited ")[2].split()[0])
        assert MASK_S / 2 <= seconds < 5 * MASK_S
        assert of_rank[0].endswith("s for the experts that a rank's tokens chose"), said
    assert len(said) == world - 1, said
    with pytest.raises(ep.EPMaskedError):
        ep.dispatch(*inputs(modes[1]), buffer=modes[1].buffer)
    modes[1].buffer.abort("it ends nobody's calls")
    late = modes.pop(1)
    assert together(modes, lambda mode, _: trip(mode)) == [world - 1] * (world - 1)
    modes.insert(1, late)
    for mode in modes:
        mode.buffer.reset()
    assert together(modes, lambda mode, _: trip(mode)) == [world] * world


def test_what_was_under_way_is_no_data():
    """A dispatch that was sent in time and whose hook comes too late."""
    modes = make(1, 2)

    def work(mode, rank):
        received, hook = mode.dispatch(*inputs(mode), return_recv_hook=True)
        if rank == 1:
            time.sleep(2.5 * MASK_S)
            with pytest.raises(ep.EPMaskedError):
                hook()
            return received.x[0]
        hook()
        mode.combine(received.x, received.handle)
        return trip(mode)

    first, x = together(modes, work)
    assert first == 1 and x.isnan().all()


def test_of_two_that_wait_for_each_other_one_goes_on():
    """Each in another call: both say that they wait, until neither has any patience left."""
    for _ in range(6):
        modes = make(1, 2, timeout=0.75 * MASK_S, mask_timeout=MASK_S / 4)

        def work(mode, rank):
            received = mode.dispatch(*inputs(mode))
            if rank == 0:
                mode.combine(received.x, received.handle)
            else:
                mode.dispatch(*inputs(mode))
            return mode.masked_ranks()

        results = together(modes, work)
        masked = [rank for rank, result in enumerate(results) if isinstance(result, ep.EPMaskedError)]
        assert len(masked) == 1, results
        assert results[1 - masked[0]] == [masked], results


def test_a_caller_masks_a_rank(caplog):
    """That is asked for: both go on, each without the other, and the log says so."""
    modes = make(1, 2)
    modes[0].active_ranks[0][1] = 0
    assert together(modes, lambda mode, _: [trip(mode), trip(mode)]) == [[1, 1]] * 2
    asked = "and goes on without it: the caller of one of the two wanted it so (active_ranks)"
    assert sorted(warnings_of(caplog)) == [f"rank 0 has masked rank 1 {asked}", f"rank 1 has masked rank 0 {asked}"]

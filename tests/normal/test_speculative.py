"""Dispatches that are launched before their counts are known, into memory for about as many rows as last time."""

import time
import weakref

import pytest
import rank_threads as ranks_as_threads
import torch
from cases import drawn
from host_backends import AheadBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import run_together, thread_ranks

import megatron_ep as ep
from megatron_ep import reference

pytestmark = pytest.mark.usefixtures("closed_afterwards", "speculates")
EXPERTS, HIDDEN = 8, 40


@pytest.fixture
def speculates(monkeypatch):
    monkeypatch.setattr(ranks_as_threads, "HostBackend", AheadBackend)


def buffers_of(nodes, ranks_per_node):
    return thread_ranks(nodes, ranks_per_node, ep.Config(num_experts=EXPERTS, timeout=20))


def inputs(tokens, topk, seed):
    return drawn(tokens, EXPERTS, topk, HIDDEN, seed, is_whole=True)


def guesses(buffers):
    """Whether they were right, of each rank."""
    return [buffer._group.live_backend().guesses for buffer in buffers]


def round_trip(buffers, x, ids, weights, **options):
    """On all ranks; each has what the reference says, in memory of little more than its size."""
    if options.get("layout") == "flat":
        expected, _, probs, _ = reference.flat_dispatch(x, ids, weights, EXPERTS)
        sums, counts = reference.flat_combine(expected, ids, EXPERTS), None
    else:
        expected, probs, counts = reference.dispatch(x, ids, weights, EXPERTS, **options)
        sums = reference.combine(expected, ids, EXPERTS, **options)

    def work(buffer):
        rank = buffer.rank
        leaf = x[rank].clone().requires_grad_()
        rows = ep.dispatch([leaf], [ids[rank]], [weights[rank]], buffer=buffer, **options)
        (out,), (out_probs,) = rows.x, rows.probs
        assert torch.equal(out, expected[rank]) and torch.equal(out_probs, probs[rank])
        assert not rows.overflow[0].any()
        assert counts is None or torch.equal(rows.tokens_per_expert[0], counts[rank])
        assert out._base is None and out.is_contiguous()
        assert out.untyped_storage().nbytes() / (4 * HIDDEN) <= len(out) / (1 - 1 / 8) + 128
        (y,) = ep.combine(rows.x, rows.handle)
        assert torch.equal(y, sums[rank])
        y.backward(x[rank])  # goes the way of the rows again
        assert torch.equal(leaf.grad, sums[rank])
        assert torch.equal(ep.dispatch([x[rank]], handle=rows.handle).x[0], out)

    for result in run_together(buffers, work):
        if isinstance(result, BaseException):
            raise result


FLAT, PADDED, ALIGNED = {"layout": "flat"}, {"expert_alignment": 16}, {"expert_alignment": 64}


@pytest.mark.parametrize(
    ("topology", "topk", "calls", "guessed"),
    [
        *(
            (topology, 3, [(700, {}), (700, {}), (700, PADDED), (700, FLAT), (700, FLAT), (700, {})], [True] * 5)
            for topology in [(1, 1), (1, 2), (2, 1), (2, 2)]
        ),
        # more rows than grouped ones, or as many and padding: the table of flat rows is as large as their tensors
        *(((1, 4), topk, [(500, ALIGNED), (500, FLAT)] * 3, [True] * 5) for topk in (1, 2)),
        ((1, 2), 2, [(300, {}), (310, {}), (310, {}), (300, {})], [True]),  # other tokens than last time: no guess
        ((1, 2), 2, [(400, {"expert_capacity": 300})] * 3, [True] * 2),  # as many rows each time
    ],
)
def test_about_as_many_rows_as_last_time(topology, topk, calls, guessed):
    """Nothing is known before the first call."""
    buffers = buffers_of(*topology)
    for number, (tokens, options) in enumerate(calls):
        round_trip(buffers, *inputs([tokens] * len(buffers), topk, seed=number // 2), **options)
    assert guesses(buffers) == [guessed] * len(buffers)


def test_a_rank_whose_guess_is_wrong_dispatches_later_than_others():
    """Rank 0 gets far more rows, then far fewer; rank 1 always as many."""
    buffers = buffers_of(1, 2)
    expert_of = {"few": 300, "many": 1500}
    for step, to_rank_0 in enumerate(["few", "few", "many", "many", "few", "few"]):
        x, ids, weights = inputs([2000, 400], 1, step)
        ids[1] = 4 + ids[1] % 4
        ids[0] = torch.where(torch.arange(2000)[:, None] < expert_of[to_rank_0], ids[0] % 4, -1)
        round_trip(buffers, x, ids, weights)
    assert guesses(buffers) == [[True, False, True, False, True], [True] * 5]


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4)]),
    st.lists(st.lists(st.sampled_from([0, 1, 7, 64, 800]), min_size=4, max_size=4), min_size=2, max_size=5),
    st.integers(1, 4),
)
def test_any_numbers_of_tokens(topology, calls, topk):
    buffers = buffers_of(*topology)
    for seed, tokens in enumerate(calls):
        for options in ({}, FLAT, ALIGNED):
            round_trip(buffers, *inputs(tokens[: len(buffers)], topk, seed), **options)


def test_no_memory_for_a_guess():
    """There may be enough for rows as many as there are."""
    buffers = buffers_of(1, 2)
    backend = buffers[1]._group.live_backend()
    new_output = backend.new_output

    def full(shape, dtype):
        if shape[0] > rows:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return new_output(shape, dtype)

    for seed in range(3):
        ids = inputs([300, 300], 2, seed)[1]
        rows = sum(int((i >= EXPERTS // 2).sum()) for i in ids)
        if seed:
            backend.new_output = full
        round_trip(buffers, *inputs([300, 300], 2, seed))
    assert guesses(buffers) == [[True] * 2, []]


def test_the_memory_of_a_wrong_guess_holds_the_rows():
    """Nothing of a guess is alive when its rows are allocated anew."""
    buffers = buffers_of(1, 2)
    backend, made = buffers[0]._group.live_backend(), []
    new_output = backend.new_output

    def noted(shape, dtype):
        alive = sum(rows() is not None for rows in made)
        out = new_output(shape, dtype)
        made.append(weakref.ref(out.untyped_storage()))
        asked.append((shape[0], alive))
        return out

    for rows_of_expert in (800, 800, 100):
        ids = torch.full((800, 1), -1)
        ids[:rows_of_expert] = 0
        made, asked, backend.new_output = [], [], noted
        x = torch.randn(800, HIDDEN)

        def work(buffer, x=x, ids=ids):
            return ep.dispatch([x], [ids], buffer=buffer)

        found = run_together(buffers, work)
        assert len(found[0].x[0]) == 2 * rows_of_expert
        backend.new_output = new_output
    assert backend.guesses == [True, False]
    assert asked == [(asked[0][0], 0), (200, 0)] and asked[0][0] > 1600, asked


def test_ids_that_are_none():
    """A guess that was right, of ids that are wrong on one rank: all ranks hear of it before the next call."""
    buffers = buffers_of(1, 2)
    for seed in range(2):
        round_trip(buffers, *inputs([300, 300], 2, seed))
    x, ids, weights = inputs([300, 300], 2, 5)
    ids[1][7, 1] = EXPERTS

    def work(buffer):
        rank = buffer.rank
        time.sleep(0.1 * (rank == 0))  # it comes when the other one has refused
        return ep.dispatch([x[rank]], [ids[rank]], [weights[rank]], buffer=buffer)

    first, second = run_together(buffers, work)
    assert isinstance(second, ValueError) and "topk_idx" in str(second)
    assert isinstance(first, ep.EPAbortError)

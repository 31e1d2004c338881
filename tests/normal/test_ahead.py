"""Dispatches that are launched before their counts are known, into memory for about as many rows as last time."""

import time

import pytest
import rank_threads as ranks_as_threads
import torch
from host_backends import AheadBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import run_together, thread_ranks

import megatron_ep as ep
from megatron_ep import reference

pytestmark = pytest.mark.usefixtures("closed_afterwards", "launches_ahead")
EXPERTS = 8


@pytest.fixture
def launches_ahead(monkeypatch):
    monkeypatch.setattr(ranks_as_threads, "HostBackend", AheadBackend)


def buffers_of(nodes, ranks_per_node, **config):
    return thread_ranks(nodes, ranks_per_node, ep.Config(num_experts=EXPERTS, timeout=20, **config))


def inputs(tokens, topk, seed, experts=EXPERTS):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices for t in tokens]
    x = [torch.randint(-8, 9, (t, 40), generator=generator).float() for t in tokens]
    return x, ids, [torch.rand(t, topk, generator=generator) for t in tokens]


def guesses(buffers):
    return [buffer._group.live_backend().guesses for buffer in buffers]


def run_on_all(buffers, work):
    for result in run_together(buffers, work):
        if isinstance(result, BaseException):
            raise result


def round_trip(buffers, x, ids, weights, **options):
    """On all ranks; each has what the reference says, in memory of little more than its size."""
    if options.get("layout") == "flat":
        expected, _, probs, _ = reference.flat_dispatch(x, ids, weights, EXPERTS)
    else:
        expected, probs, counts = reference.dispatch(x, ids, weights, EXPERTS, **options)

    def work(buffer):
        rank = buffer.rank
        leaf = x[rank].clone().requires_grad_()
        rows = ep.dispatch([leaf], [ids[rank]], [weights[rank]], buffer=buffer, **options)
        (out,), (out_probs,) = rows.x, rows.probs
        assert torch.equal(out, expected[rank]) and torch.equal(out_probs, probs[rank])
        if "layout" not in options:
            assert torch.equal(rows.tokens_per_expert[0], counts[rank])
        assert out._base is None and out.is_contiguous()
        size = out.untyped_storage().nbytes() / (4 * 40)
        assert size <= len(out) / (1 - 1 / 8) + 128
        (y,) = ep.combine(rows.x, rows.handle)
        y.sum().backward()
        copies = expected_copies(ids[rank], options, len(buffers))
        assert torch.equal(y, copies * x[rank]) and torch.equal(leaf.grad, copies.expand_as(leaf))
        again = ep.dispatch([x[rank]], handle=rows.handle)
        assert torch.equal(again.x[0], out)

    run_on_all(buffers, work)


def expected_copies(ids, options, world):
    if options.get("layout") == "flat":
        ranks = ids // (EXPERTS // world)
        return torch.tensor([[float(len(set(row.tolist())))] for row in ranks]).reshape(-1, 1)
    return torch.full((len(ids), 1), float(ids.shape[1]))


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_about_as_many_rows_as_last_time(nodes, ranks_per_node):
    buffers = buffers_of(nodes, ranks_per_node)
    world = len(buffers)
    for seed, options in enumerate([{}, {}, {"expert_alignment": 16}, {"layout": "flat"}, {"layout": "flat"}, {}]):
        round_trip(buffers, *inputs([700] * world, 3, seed), **options)
    assert guesses(buffers) == [[True] * 5] * world  # nothing is known before the first


def test_a_rank_whose_guess_is_wrong_dispatches_later_than_others():
    """Rank 0 gets far more rows, then far fewer; rank 1 always as many."""
    buffers = buffers_of(1, 2)
    expert_of = {"few": 300, "many": 1500}
    for step, to_rank_0 in enumerate(["few", "few", "many", "many", "few", "few"]):
        x, ids, weights = inputs([2000, 400], 1, step)
        ids[1] = 4 + ids[1] % 4
        ids[0] = torch.where(torch.arange(2000)[:, None] < expert_of[to_rank_0], ids[0] % 4, -1)
        x[0][expert_of[to_rank_0] :] = 0
        round_trip_of_some(buffers, x, ids, weights)
    assert guesses(buffers) == [[True, False, True, False, True], [True] * 5]


def round_trip_of_some(buffers, x, ids, weights):
    """With ids of -1: rows alone."""
    expected, _, _ = reference.dispatch(x, ids, weights, EXPERTS)

    def work(buffer):
        rank = buffer.rank
        rows = ep.dispatch([x[rank]], [ids[rank]], [weights[rank]], buffer=buffer)
        assert torch.equal(rows.x[0], expected[rank])
        (y,) = ep.combine(rows.x, rows.handle)
        assert torch.equal(y, x[rank])

    run_on_all(buffers, work)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4)]),
    st.lists(st.lists(st.sampled_from([0, 1, 7, 64, 800]), min_size=4, max_size=4), min_size=2, max_size=5),
    st.integers(1, 4),
)
def test_any_numbers_of_tokens(topology, calls, topk):
    buffers = buffers_of(*topology)
    for seed, tokens in enumerate(calls):
        for layout in ({}, {"layout": "flat"}, {"expert_alignment": 64}):
            round_trip(buffers, *inputs(tokens[: len(buffers)], topk, seed), **layout)


@pytest.mark.parametrize("topk", [1, 2])
def test_flat_rows_after_grouped_ones(topk):
    """Of which there are more, or as many and padding: the table of flat rows is as large as their tensors."""
    buffers = buffers_of(1, 4)
    for seed in range(3):
        for options in ({"expert_alignment": 64}, {"layout": "flat"}):
            round_trip(buffers, *inputs([500] * 4, topk, seed), **options)
    assert all(guess for of_rank in guesses(buffers) for guess in of_rank)


def test_other_tokens_than_last_time_are_not_guessed():
    buffers = buffers_of(1, 2)
    for seed, tokens in enumerate([300, 310, 310, 300]):
        round_trip(buffers, *inputs([tokens] * 2, 2, seed))
    assert guesses(buffers) == [[True]] * 2


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


def test_a_capacity_has_the_same_rows_each_time():
    buffers = buffers_of(1, 2)
    for seed in range(3):
        round_trip_of_capacity(buffers, *inputs([400, 380], 2, seed), expert_capacity=300)
    assert guesses(buffers) == [[True] * 2] * 2


def round_trip_of_capacity(buffers, x, ids, weights, **options):
    expected, _, _ = reference.dispatch(x, ids, weights, EXPERTS, **options)
    x = [part.requires_grad_() for part in x]  # so that padding is zeros

    def work(buffer):
        rows = ep.dispatch([x[buffer.rank]], [ids[buffer.rank]], [weights[buffer.rank]], buffer=buffer, **options)
        assert torch.equal(rows.x[0], expected[buffer.rank])
        assert not rows.overflow[0].any()

    run_on_all(buffers, work)


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

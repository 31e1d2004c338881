"""Plans of copies, and what they are predicted to gain, for loads whose answer is known."""

import itertools

import numpy as np
import pytest
import routing_traces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ep.tools.balance import copies, spread, trace
from megatron_ep.tools.balance.copies import Copy

LAYER = copies.Layer(weights=1000, rows=1 << 14, share=0.25, tflops=500, gb_s=1 << 40)


@st.composite
def loads(draw):
    """Rows of experts, W, and ranks of a node."""
    node = draw(st.integers(1, 4))
    ranks = node * draw(st.integers(1, 3))
    experts = ranks * draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(0, 50) | st.integers(0, 5000), min_size=experts, max_size=experts))
    return rows, ranks, node


@settings(max_examples=200, deadline=None)
@given(loads(), st.integers(0, 4), st.integers(1, 100))
@example(([9, 0, 0, 0], 4, 4), 1, 1)
def test_a_plan_keeps_its_limits(load, slots, least):
    rows, ranks, node = load
    local = len(rows) // ranks
    plan = copies.plan(rows, ranks, slots, node, least)
    before, after = spread.rank_loads(np.array(rows), ranks), copies.loads_with(plan, np.array(rows), ranks)
    assert after.sum() == before.sum() and (after >= 0).all()
    assert len({(copy.expert, copy.rank) for copy in plan}) == len(plan), "an expert twice on a rank"
    assert all(copy.rows >= least for copy in plan)
    taken = np.zeros(ranks, int)
    moved = np.zeros(len(rows), int)
    for copy in plan:
        assert copy.expert // local // node == copy.rank // node and copy.expert // local != copy.rank
        taken[copy.rank] += 1
        moved[copy.expert] += copy.rows
    assert taken.max() <= slots and (moved <= rows).all()
    for first in range(0, ranks, node):
        mean = -(-int(before[first : first + node].sum()) // node)
        here = slice(first, first + node)
        assert (after[here] <= np.maximum(before[here], mean)).all(), "a rank is over the mean that was not"
        if slots >= len(rows) and least == 1:
            assert after[here].max() <= mean


@settings(max_examples=50, deadline=None)
@given(loads())
def test_with_enough_slots_the_load_is_even(load):
    rows, ranks, node = load
    after = copies.loads_with(copies.plan(rows, ranks, len(rows), node), np.array(rows), ranks)
    for of_node in after.reshape(-1, node):
        assert of_node.max() <= -(-of_node.sum() // node)


def best(rows, ranks, slots):
    """The least possible rows of the busiest rank, by trying all sets of copies. A set allows a bound if no set of
    experts has more rows than the ranks that have one of them can take (Hall)."""
    homes = np.arange(len(rows)) // (len(rows) // ranks)
    places = [range(len(rows)) for _ in range(ranks * slots)]
    found = max(rows) * len(rows)
    for chosen in itertools.product(*places):
        where = [{int(home)} for home in homes]
        for place, expert in enumerate(chosen):
            where[expert].add(place // slots)
        bound = 0
        for size in range(1, len(rows) + 1):
            for experts in itertools.combinations(range(len(rows)), size):
                able = set().union(*(where[expert] for expert in experts))
                bound = max(bound, -(-sum(rows[expert] for expert in experts) // len(able)))
        found = min(found, bound)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_beside_the_best_plan(seed):
    """Three ranks, six experts and one slot. The best plan may let a rank give more than it must and take in turn, or
    fill two ranks from one; the busiest rank has at most 1.25 times as many rows here."""
    rows = np.random.default_rng(seed).integers(0, 200, 6).tolist()
    after = copies.loads_with(copies.plan(rows, 3, 1), np.array(rows), 3).max()
    assert best(rows, 3, 1) <= after <= 1.25 * best(rows, 3, 1)


def test_a_hot_expert_is_copied_to_the_ranks_with_room():
    assert copies.plan([80, 0, 10, 10, 20, 0, 0, 0], 4, 1) == [Copy(0, 3, 30), Copy(0, 1, 10), Copy(0, 2, 10)]
    assert copies.plan([80, 0, 10, 10, 20, 0, 0, 0], 4, 1, least=20) == [Copy(0, 3, 30)]
    assert copies.plan([80, 0, 10, 10, 20, 0, 0, 0], 4, 1, node=2) == [Copy(0, 1, 30), Copy(4, 3, 10)]
    assert copies.plan([5] * 8, 4, 1) == []


def test_links_are_counted_by_direction():
    assert copies.busiest_link([Copy(0, 1, 5), Copy(1, 2, 5), Copy(3, 2, 1), Copy(0, 3, 1)], 2, 4) == 3
    assert copies.busiest_link([Copy(0, 2, 5), Copy(3, 2, 5), Copy(6, 2, 1), Copy(3, 0, 1)], 2, 4) == 3
    assert copies.busiest_link([Copy(0, 1, 5), Copy(3, 0, 5)], 2, 4) == 1
    assert copies.busiest_link([], 2, 4) == 0


def read(directory, counts):
    """counts: [steps, W, E]."""
    return trace.read(routing_traces.write(directory, np.asarray(counts)[:, None, None]))


def test_what_a_perfect_plan_gains(tmp_path):
    """Rank 0 has 1.75 times the mean: experts are a quarter of an even step, so the step is 1 + 0.75 / 4."""
    counts = np.full((20, 4, 8), 100)
    counts[:, :, 0] = 1000
    mean = 1700 / 4
    *parts, whole = copies.gains(read(tmp_path, counts), LAYER, slots=2)
    assert whole.before == pytest.approx(1100 / mean) and whole.after == pytest.approx(1, abs=1e-3)
    wait = (1100 / mean - 1) / 4
    assert whole.most == pytest.approx(wait / (1 + wait), abs=1e-3)
    assert whole.least == pytest.approx(whole.most, abs=1e-3), "transfers take no time"
    assert [(part.first, part.last) for part in parts] == [(i, i + 1) for i in range(1, 20, 2)]
    assert (whole.first, whole.last, whole.slots, whole.copies) == (1, 20, 2, 3)


def test_transfers_that_take_longer_than_they_gain_are_not_made(tmp_path):
    counts = np.full((4, 4, 8), 100)
    counts[:, :, 0] = 1000
    found = read(tmp_path, counts)

    def least(gb_s):
        layer = copies.Layer(LAYER.weights, LAYER.rows, LAYER.share, LAYER.tflops, gb_s)
        return copies.gains(found, layer, slots=1)[-1].least

    gained = [least(gb_s) for gb_s in (1 << 40, 500, 200, 100, 1)]
    assert gained == sorted(gained, reverse=True) and gained[-1] == 0 < gained[2]


def test_times_are_those_of_the_layer():
    layer = copies.Layer(weights=3 * 7168 * 2048, rows=32768, share=0.25, tflops=570, gb_s=380)
    assert layer.experts_ms == pytest.approx(15.2, abs=0.1)
    assert layer.copy_ms == pytest.approx(0.927, abs=0.001)

"""The plan of copies: what it must keep, and what it does with loads whose answer is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ep.tools.balance.copies import Copies, plan


@st.composite
def cases(draw):
    nodes, ranks_per_node, local = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = draw(st.sampled_from([0, 3, 50, 5000]))
    ranks = nodes * ranks_per_node
    rows = draw(st.lists(st.integers(0, most), min_size=ranks * local, max_size=ranks * local))
    return rows, ranks, ranks_per_node, draw(st.integers(0, 4)), draw(st.integers(1, 40))


def loads_of(rows, ranks):
    local = len(rows) // ranks
    return [sum(rows[rank * local : (rank + 1) * local]) for rank in range(ranks)]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_what_every_plan_keeps(case):
    rows, ranks, ranks_per_node, slots, min_rows = case
    before, copies = loads_of(rows, ranks), plan(*case)
    assert len(copies.loads) == ranks and min(copies.loads) >= 0
    moved = 0
    for first in range(0, ranks, ranks_per_node):
        node = slice(first, first + ranks_per_node)
        assert sum(copies.loads[node]) == sum(before[node]), "no row leaves its node"
        assert max(copies.loads[node]) <= max(before[node]), "never worse than without"
        target = -(-sum(before[node]) // ranks_per_node)
        for old, new in zip(before[node], copies.loads[node], strict=True):
            assert new == old or (old < new <= target) or (old > new >= target)
            moved += max(0, new - old)
    assert moved >= copies.made * min_rows, "a copy takes at least so many rows"
    assert copies.made <= slots * ranks and copies.busiest <= copies.made
    assert (copies.made == 0) == (copies.loads == tuple(before))
    if all(load - sum(before) / ranks < min_rows for load in before) and ranks_per_node == ranks:
        assert copies.made == 0
    assert plan(*case) == copies


def test_one_hot_expert_is_spread_over_its_node():
    """1000 rows too many, places on three ranks: all end at the mean."""
    assert plan([1600, 0, 200, 0, 100, 100, 0, 100], 4, 4, 1, 100) == Copies((525, 525, 525, 525), 3, 3)
    assert plan([1600, 0, 200, 0, 100, 100, 0, 100], 4, 2, 1, 100) == Copies((900, 900, 200, 100), 1, 1)


def test_without_slots_and_below_the_least_rows_nothing_moves():
    assert plan([10, 0], 2, 2, 0, 1) == Copies((10, 0), 0, 0)
    assert plan([10, 0], 2, 2, 4, 6) == Copies((10, 0), 0, 0)
    assert plan([10, 0], 2, 2, 4, 5) == Copies((5, 5), 1, 1)


@pytest.mark.parametrize(("slots", "loads"), [(1, (700, 400)), (2, (550, 550))])
def test_more_slots_take_more_experts(slots, loads):
    assert plan([300, 300, 300, 100, 0, 50, 50, 0], 2, 2, slots, 10).loads == loads

"""How evenly rows fall, for loads whose answer is known."""

import dataclasses

import numpy as np
import pytest
import routing_traces

from megatron_ep.tools.balance import spread, trace


def read(directory, counts, **options):
    """counts: [steps, W, E]."""
    counts = np.asarray(counts)[:, None, None]
    return trace.read(routing_traces.write(directory, counts, **options))


def layer_of(found):
    [layer] = spread.layers(found)
    return layer


def test_an_even_load(tmp_path):
    found = read(tmp_path, np.full((20, 4, 8), 5))
    assert dataclasses.astuple(layer_of(found))[1:] == (1,) * 6
    assert [dataclasses.astuple(period)[2:] for period in spread.periods(found)] == [(1,) * 3] * (spread.PERIODS + 1)


def test_no_rows_at_all_are_even(tmp_path):
    assert layer_of(read(tmp_path, np.zeros((2, 4, 8)))).mean == 1


def test_one_hot_expert(tmp_path):
    """Expert 0 has as many rows as all others together: rank 0 has 1/2 + 1/14 of them, of which 1/4 is its share."""
    counts = np.full((20, 4, 8), 1)
    counts[:, :, 0] = 7
    layer = layer_of(read(tmp_path, counts))
    assert layer.mean == layer.p95 == pytest.approx(4 * 8 / 14)
    # Wherever it lies: no places are better.
    assert layer.placed == layer.second_half == pytest.approx(layer.mean)


def test_two_hot_experts_that_lie_together_can_be_placed_apart(tmp_path):
    counts = np.full((20, 4, 8), 1)
    counts[:, :, :2] = 4
    found = read(tmp_path, counts)
    layer = layer_of(found)
    assert layer.second_half == pytest.approx(4 * 8 / 14) and layer.placed == pytest.approx(4 * 5 / 14)
    order = spread.places(found)[1]
    assert sorted(order) == list(range(8)) and order.index(0) // 2 != order.index(1) // 2


def test_the_places_of_the_first_half_do_not_help_against_what_changes(tmp_path):
    """Another expert is hot each ten steps: the first half's places have its four apart."""
    counts = np.ones((80, 4, 8))
    counts[np.arange(80), :, np.arange(80) // 10] = 7
    layer = layer_of(read(tmp_path, counts))
    assert layer.placed == pytest.approx(layer.second_half) == pytest.approx(4 * 8 / 14)


def test_periods_follow_time(tmp_path):
    counts = np.ones((20, 2, 2))
    counts[8:, :, 0] = 3
    *periods, whole = spread.periods(read(tmp_path, counts))
    assert [(period.first, period.last) for period in periods] == [(i, i + 1) for i in range(1, 20, 2)]
    assert [period.mean for period in periods] == [1] * 4 + [1.5] * 6
    assert (whole.first, whole.last, whole.mean, whole.p50) == (1, 20, pytest.approx(1.3), 1.5)


def test_layers_and_groups_count_by_themselves(tmp_path):
    even, uneven = np.ones((4, 2, 1, 2, 2)), np.ones((4, 2, 1, 2, 2))
    uneven[:, 1, :, :, 0] = 3
    routing_traces.write(tmp_path, even, layers=(1, 2), group=(0, 1))
    routing_traces.write(tmp_path, uneven, layers=(1, 2), group=(2, 3))
    first, second = spread.layers(trace.read(tmp_path))
    assert (first.layer, first.mean, first.most) == (1, 1, 1)
    assert (second.layer, second.mean, second.most) == (2, 1.25, 1.5)


def test_places_are_a_permutation_with_equally_many_on_each_rank():
    rows = np.random.default_rng(3).integers(0, 1000, 24)
    order = spread.placement(rows, 6)
    assert sorted(order) == list(range(24))
    loads, before = rows[order].reshape(6, 4).sum(axis=1), rows.reshape(6, 4).sum(axis=1)
    assert loads.max() <= before.max()

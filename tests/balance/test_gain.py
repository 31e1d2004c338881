"""What copies would save, by hand."""

import dataclasses

import numpy as np
import pytest
import routing_traces

from megatron_ep.tools.balance import gain, trace
from megatron_ep.tools.balance.copies import plan
from megatron_ep.tools.balance.gain import OVERLAPPED, PLAIN, Costs, Machine, verdict

# A row's products take 6 * 10^6 / 6 * 10^12 s = 1 us; to copy weights or gradients of a byte a parameter, 1 us.
MACHINE = Machine(tflops=6.0, gb_s=1000.0)
COSTS = Costs(MACHINE, expert_parameters=1_000_000)


def hot(directory, rows=(30_000, 0, 10_000, 0), steps=4, **options):
    """Two ranks of two experts each, whose rows half of the tokens of each rank choose."""
    counts = np.zeros((steps, 1, 1, 2, 4)) + np.array(rows) / 2
    return trace.read(routing_traces.write(directory, counts, **options))


def test_rows_that_a_copy_takes_to_pay():
    """The notes' table: 600 TFLOP/s and 380 GB/s."""
    assert PLAIN.min_rows(Machine()) == 1579 and OVERLAPPED.min_rows(Machine()) == gain.PRODUCT_ROWS
    assert dataclasses.replace(PLAIN, bytes=8.0).min_rows(Machine()) == 2106


def test_a_hot_expert_by_hand(tmp_path):
    one = gain.gain(hot(tmp_path), 2, 1, PLAIN, COSTS)
    assert one.spread == (1.5, 1.0) and one.copies == one.busiest == 1
    # 10,000 rows waited for; then 6 bytes a parameter and the plan.
    assert one.lost == (pytest.approx(10.0), pytest.approx(6e-3 + 0.1))
    assert one.saved == pytest.approx((10.0 - 0.106) / 30.0) and one.of == "the experts' products"
    assert one.slot_bytes == 6_000_000
    timed = gain.gain(hot(tmp_path), 2, 1, PLAIN, dataclasses.replace(COSTS, step_ms=100.0))
    assert timed.saved == pytest.approx((10.0 - 0.106) / 100.0) and timed.of == "a step"
    overlapped = gain.gain(hot(tmp_path), 2, 1, OVERLAPPED, COSTS)
    assert overlapped.lost[1] == pytest.approx(1e-3 + 0.06)


def test_without_a_size_shares_are_the_same_but_for_the_plan(tmp_path):
    sized = gain.gain(hot(tmp_path), 2, 1, PLAIN, COSTS)
    bare = gain.gain(hot(tmp_path), 2, 1, PLAIN, Costs(MACHINE))
    assert bare.lost == (pytest.approx(10_000), pytest.approx(6)) and bare.slot_bytes is None
    assert bare.saved == pytest.approx(sized.saved + 0.1 / 30)


def test_copies_stay_in_their_node(tmp_path):
    one = gain.gain(hot(tmp_path), 1, 4, PLAIN, COSTS)
    assert one.copies == 0 and one.spread == (1.5, 1.5) and one.saved == pytest.approx(-0.1 / 30)


def test_layers_and_micro_batches_add_up_in_a_step(tmp_path):
    counts = np.zeros((3, 2, 4, 2, 4)) + np.array([15_000, 0, 5_000, 0])
    found = trace.read(routing_traces.write(tmp_path, counts, layers=(1, 2)))
    assert gain.gain(found, 2, 1, PLAIN, COSTS).lost[0] == pytest.approx(2 * 4 * 10.0)


def test_the_group_that_loses_most_counts(tmp_path):
    routing_traces.write(tmp_path, np.full((2, 1, 1, 2, 4), 5000), group=(0, 1))
    assert gain.gain(hot(tmp_path, group=(2, 3), steps=2), 2, 1, PLAIN, COSTS).lost[0] == pytest.approx(10.0)


def test_few_plans_of_many_passes(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(gain, "plan", lambda *case: made.append(case) or plan(*case))
    monkeypatch.setattr(gain, "MAX_PLANS", 4)
    one = gain.gain(hot(tmp_path, steps=12), 2, 1, PLAIN, COSTS)
    assert len(made) == 4 and one.lost == (pytest.approx(10.0), pytest.approx(0.106))


def test_tokens_that_stand_for_others(tmp_path):
    found = dataclasses.replace(hot(tmp_path), scaled=3)
    assert gain.gain(found, 2, 1, PLAIN, COSTS).lost[0] == pytest.approx(30.0)


def gains(plain, overlapped, of="a step"):
    one = gain.Gain(2, PLAIN, 1, (1.5, 1.0), 1.0, 1.0, (2.0, 1.0), plain, of, None)
    return [one, dataclasses.replace(one, exposure=OVERLAPPED, saved=overlapped)]


@pytest.mark.parametrize(
    ("plain", "overlapped", "of", "said"),
    [
        (0.06, 0.08, "a step", "worth it: copies would save 6.0% of a step with S = 2"),
        (
            0.06,
            0.08,
            "p",
            "may be worth it: copies would save at most 6.0% of a step with S = 2; --step-ms says how much",
        ),
        (
            0.01,
            0.08,
            "a step",
            "worth it if copies and gradients overlap with other work, and only then: they would save",
        ),
        (
            0.01,
            0.08,
            "p",
            "may be worth it if copies and gradients overlap with other work, and only then: they would save",
        ),
        (0.001, 0.008, "a step", "not worth it: copies would save 0.8% of a step, less than 3%"),
        (0.001, 0.008, "p", "not worth it: copies would save at most 0.8% of a step, less than 3%"),
        (-5.0, 0.0, "a step", "not worth it: copies would save nothing"),
    ],
)
def test_the_verdict(plain, overlapped, of, said):
    assert verdict(gains(plain, overlapped, of)).startswith(said)

"""Both modes between processes: every topology, and what all hear of a rank that stays away, makes a mistake or ends.
tests/gpu/test_gpu_one_rank.py runs the same on GPUs."""

import re

import one_rank
import pytest
import shared_memory
import survivors
from modes import HOST, MODES
from nightly import at_night
from waits import patience, within

ALL = ["normal", at_night("one hop"), "low latency"]
NETWORKS = ["tcp", at_night("verbs"), "mlx5"]
# On one machine test_blame.py has all phases, of ranks that are threads.
ABSENT = [("", "normal", "backward"), ("", "low latency", "combine")]
ABSENT += [("tcp", "normal", "dispatch"), ("mlx5", "low latency", "dispatch"), ("tcp", "one hop", "dispatch")]
ABSENT += [at_night("", "normal", phase) for phase in ("dispatch", "combine", "compiled backward")]
ABSENT += [at_night("", "one hop", phase) for phase in ("dispatch", "combine", "backward")]
ABSENT += [at_night("", "low latency", "dispatch"), at_night("tcp", "low latency", "dispatch")]
ABSENT += [at_night("mlx5", mode, "dispatch") for mode in ("normal", "one hop")]
ABSENT += [at_night("verbs", mode, "dispatch") for mode in MODES]
MISTAKES = [("normal", "dtype"), ("normal", "ids"), ("normal", "combine"), ("low latency", "dtype")]
MISTAKES += [at_night("one hop", "dtype"), at_night("one hop", "ids"), at_night("one hop", "combine")]


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("mode", ALL)
def test_topologies(over, mode, nodes):
    before = shared_memory.names()
    over("", one_rank.run_topology, mode, HOST, nodes)
    assert within(10, lambda: shared_memory.names() <= before), shared_memory.names() - before


@pytest.mark.parametrize(("fabric", "mode", "phase"), ABSENT)
def test_an_absent_rank_is_named(over, fabric, mode, phase):
    messages = over(fabric, one_rank.run_one_absent, mode, HOST, phase, 4 if fabric else 2)
    role, says = MODES[mode].absent[phase]
    assert any(role in m and "from rank 3: seen" in m for m in messages), messages
    assert all(re.search(rf": rank 3 {says}[;\n]", m) for m in messages[:3]), messages
    of_call = "" if mode == "low latency" else ", call 2"
    backward = f"in the backward pass of combine{of_call}: does the loss"
    assert all((backward in m) == ("backward" in phase) for m in messages[:3]), messages


@pytest.mark.parametrize(("mode", "kind"), MISTAKES)
@pytest.mark.parametrize("fabric", ["", *NETWORKS])
def test_a_mistake_on_one_rank_reaches_all(over, fabric, mode, kind):
    over(fabric, one_rank.run_one_mistake, mode, HOST, kind, 4 if fabric else 2)


@pytest.mark.parametrize("kind", ["dispatch", "combine", "weighted"])
@pytest.mark.parametrize("mode", MODES)
def test_a_failure_in_the_backward_pass_reaches_all(over, mode, kind):
    over("", one_rank.run_no_memory_in_backward, mode, HOST, kind)


AROUND_MISTAKES = [one_rank.run_mistake_and_reset, one_rank.run_mistake_and_close, one_rank.run_mistake_of_all]
AROUND_MISTAKES += [one_rank.run_mistake_of_another_thread, one_rank.run_mistake_after_a_late_call]


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("fabric", ["", "tcp", at_night("verbs"), at_night("mlx5")])
@pytest.mark.parametrize("run", AROUND_MISTAKES)
def test_what_comes_before_and_after_a_mistake(over, run, fabric, mode):
    over(fabric, run, mode, HOST, 4 if fabric else 2)


@pytest.mark.parametrize("check", [survivors.check_killed, survivors.check_interrupted])
@pytest.mark.parametrize("mode", ALL)
def test_survivors(tmp_path, mode, check):
    """One rank is killed, or interrupted, between two calls or in one."""
    before = shared_memory.names()
    check(tmp_path, mode)
    assert within(10, lambda: shared_memory.names() <= before), shared_memory.names() - before


@pytest.mark.parametrize(("fabric", "nodes"), [("", 1), ("tcp", 4), at_night("", 4), at_night("mlx5", 4)])
def test_a_late_rank_is_masked(over, fabric, nodes):
    mask_s = patience(0.8)
    took = over(fabric, one_rank.run_one_masked, HOST, nodes, mask_s)
    assert mask_s / 2 < max(took[:3]) < 5 * mask_s, took  # one wait for it, and no other
    assert took[3] < 4 * mask_s, took  # it waits for nobody


def test_a_rank_that_stays_away_from_the_backward_pass(over):
    messages = over("", one_rank.run_one_masked_in_backward, HOST, 2, patience(0.8))
    said = re.compile(r"^rank [023] met rank 1 in a backward pass, masked since its forward pass\n")
    assert all(said.search(messages[rank]) for rank in (0, 2, 3)), messages

"""1F1B overlap reaches into a dispatcher by private names: those that the installed Megatron uses must be there."""

import sys

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron_ep.megatron import step_state


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("d._comm_manager.token_probs = probs", "sets no dispatched_probs of a dispatcher"),
        ("", "sets no dispatched_probs, token_probs"),
        (
            "m = d._comm_manager; d._comm_manager.token_probs = m.dispatched_probs = d._comm_manager.dispatched_probs",
            None,
        ),
        (
            "d._comm_manager.token_probs = d._comm_manager.dispatched_probs = d._comm_manager.new_state",
            "uses new_state of a dispatcher",
        ),
    ],
)
def test_a_schedule_that_reaches_for_other_names_is_refused(monkeypatch, tmp_path, source, words):
    (tmp_path / "another_schedule.py").write_text(f"def step(d, probs):\n    {source or 'pass'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "another_schedule", raising=False)
    monkeypatch.setattr(step_state, "SCHEDULE", "another_schedule")
    if words is None:
        step_state.check_overlap()
        return
    with pytest.raises(ValueError, match=f"overlap_moe_expert_parallel_comm is True, but .* {words}"):
        step_state.check_overlap()


def test_the_installed_schedule_uses_what_is_there():
    step_state.check_overlap()

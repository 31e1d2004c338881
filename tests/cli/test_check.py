"""`megatron-ep check` on this machine passes, and fails when something is wrong. Ranks of a job: test_check_job.py."""

import pytest
import torch

from megatron_ep import megatron as megatron_side
from megatron_ep.cli import check, checks


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(checks, "MEGATRON_LAYERS", {"": checks.MEGATRON_LAYERS[""]})


def _verdicts(text):
    return [line.split()[0] for line in text.splitlines() if line.startswith(("pass", "FAIL"))]


def test_without_megatron_its_part_is_skipped_and_said_so(monkeypatch, capsys):
    monkeypatch.setattr(megatron_side, "is_installed", lambda: False)
    assert check.main([]) == 0
    text = capsys.readouterr().out
    assert "skipped: megatron-core is not installed" in text and "all passed" in text
    assert _verdicts(text) == ["pass"] * 6


@pytest.mark.skipif(not megatron_side.is_installed(), reason="megatron-core is not installed")
def test_a_difference_from_megatron_fails(monkeypatch, capsys):
    monkeypatch.setattr(checks, "MEGATRON_TOLERANCE", -1.0)  # even equal is too far
    assert check.main([]) == 1
    text = capsys.readouterr().out
    assert _verdicts(text) == [*["pass"] * 6, "FAIL"]
    assert "router.weight" in text and "input gradient" in text and "1 failed" in text


def test_random_ids_are_distinct_and_some_are_missing():
    ids = checks.random_ids(200, 4, 8, torch.Generator().manual_seed(0))
    assert ids.shape == (200, 4) and bool((ids == -1).any())
    for row in ids.tolist():
        experts = [expert for expert in row if expert >= 0]
        assert len(set(experts)) == len(experts) and all(0 <= expert < 8 for expert in experts)

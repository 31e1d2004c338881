"""`megatron-ep check` passes here, and fails when something is wrong."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.cli import check, check_common


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(check, "TOPOLOGIES", ((2, 2),))
    monkeypatch.setattr(check, "REFERENCE_CASES", 5)
    monkeypatch.setattr(check_common, "MEGATRON_LAYERS", {"": check_common.MEGATRON_LAYERS[""]})


@pytest.fixture
def without_megatron(monkeypatch):
    monkeypatch.setattr(megatron_side, "is_installed", lambda: False)


def _verdicts(text):
    return [line.split()[0] for line in text.splitlines() if line.startswith(("pass", "FAIL"))]


def test_everything_passes(capsys):
    assert check.main([]) == 0
    text = capsys.readouterr().out
    assert _verdicts(text) == ["pass"] * (3 if megatron_side.is_installed() else 2)
    assert "all passed" in text


def test_without_megatron_its_part_is_skipped_and_said_so(without_megatron, capsys):
    assert check.main([]) == 0
    text = capsys.readouterr().out
    assert "skipped: megatron-core is not installed" in text
    assert _verdicts(text) == ["pass", "pass"]


def test_a_wrong_gradient_fails(without_megatron, monkeypatch, capsys):
    def dispatch(x, ids, weights, **options):
        return original(x, ids, [tensor.detach() for tensor in weights], **options)

    original = ep.dispatch
    monkeypatch.setattr(ep, "dispatch", dispatch)
    assert check.main([]) == 1
    text = capsys.readouterr().out
    assert _verdicts(text) == ["FAIL", "pass"]
    assert "GradcheckError" in text and "1 failed" in text


def test_a_wrong_sum_fails(without_megatron, monkeypatch, capsys):
    original = ep.combine
    monkeypatch.setattr(ep, "combine", lambda rows, handle: [y + 1e-9 for y in original(rows, handle)])
    assert check.main([]) == 1
    text = capsys.readouterr().out
    assert _verdicts(text) == ["pass", "FAIL"]
    assert "sums of rank 0 differ from the specification" in text


@pytest.mark.skipif(not megatron_side.is_installed(), reason="megatron-core is not installed")
def test_a_difference_from_megatron_fails(monkeypatch, capsys):
    monkeypatch.setattr(check_common, "MEGATRON_TOLERANCE", -1.0)  # even equal is too far
    assert check.main([]) == 1
    text = capsys.readouterr().out
    assert _verdicts(text) == ["pass", "pass", "FAIL"]
    assert "router.weight" in text and "input gradient" in text


def test_random_ids_are_distinct_and_some_are_missing():
    ids = check_common.random_ids(200, 4, 8, torch.Generator().manual_seed(0))
    assert ids.shape == (200, 4) and bool((ids == -1).any())
    for row in ids.tolist():
        experts = [expert for expert in row if expert >= 0]
        assert len(set(experts)) == len(experts) and all(0 <= expert < 8 for expert in experts)

"""`run.py imbalance` without a GPU: the rows of each rank, what is timed, and that results are compared. Nothing here
judges a time."""

import json

import bench_imbalance as imbalance
import pytest
import torch
from bench_imbalance import Case

from megatron_ep.tools.local_ranks import LocalRanks

SMALL = Case("small", 64, 32, 8, tokens=25)
PHASES = [
    ("experts", "grouped_mm"),
    ("dispatch+combine", "ours"),
    ("dispatch+combine", "nccl_all_to_all"),
    ("layer", "ours"),
    ("layer", "nccl_all_to_all"),
]


@pytest.mark.parametrize(("world_size", "shares"), [(2, (1.0, 1.25, 2.0)), (3, (1.5, 3.0))])
def test_every_phase_is_timed_on_every_rank(world_size, shares):
    """With twice the mean on one of two ranks the other has no rows at all."""
    with LocalRanks(world_size, 120) as ranks:
        by_rank = ranks.run(imbalance.measure, [SMALL._replace(share=share) for share in shares], "cpu", 1, 2)
    for cases in by_rank:
        for share, measured in zip(shares, cases, strict=True):
            assert [(each.phase, each.implementation) for each in measured] == PHASES
            assert all(len(each.seconds) == 2 and min(each.seconds) > 0 for each in measured)
            assert measured[0].settings["share"] == share <= measured[0].settings["max_vio"] + 1


class HostRanks(LocalRanks):
    def run(self, function, cases, device, *rounds):
        assert device == "cuda"
        return super().run(function, cases, "cpu", *rounds)


def test_the_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(imbalance, "gpu_ranks", lambda _, timeout: HostRanks(2, timeout))
    monkeypatch.setattr(imbalance, "MODELS", (SMALL, SMALL._replace(model="wide", hidden=128)))
    file = tmp_path / "imbalance.json"
    rounds = ("--iters", "2", "--warmup", "1", "--json", str(file))
    assert imbalance.main(["--tokens", "25", "--shares", "1", "1.5", *rounds]) == 0
    records = json.loads(file.read_text())["records"]
    assert [(record["model"], record["share"]) for record in records[:: len(PHASES)]] == [
        (model, share) for model in ("small", "wide") for share in (1, 1.5)
    ]
    text = capsys.readouterr().out
    assert "2 GPUs, wide T=25 H=128 F=32 K=8 L=8, rank 0 has 1.5 x the mean of rows" in text
    assert text.count("/ even") == 4 and text.count(" 1.00\n") >= 2 * len(PHASES)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("share", [0.5, 1.0, 1.25, 1.5, 2.0])
def test_rank_0_gets_its_share(world_size, share):
    case = Case("", 8, 8, 8, tokens=400, share=share)
    weights, ids = imbalance.draw(case, world_size, torch.Generator().manual_seed(0))
    assert weights.shape == ids.shape == (400, 8)
    assert ids.min() >= 0 and ids.max() < 8 * world_size
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all(), "a token chose an expert twice"
    rows = (ids // 8).flatten().bincount(minlength=world_size)
    assert rows[0] == round(400 * 8 * share / world_size)
    if share < world_size:
        assert len((ids // 8 == 0).sum(dim=1).unique()) > 3, "tokens are all alike"
    experts = ids.flatten().bincount(minlength=8 * world_size).view(world_size, 8)
    assert ((experts[0] - rows[0] / 8).abs() < 6 * (rows[0] / 8) ** 0.5 + 1).all()


@pytest.mark.parametrize(
    ("share", "world_size", "words"),
    [(2.1, 2, r"--shares has 2\.1, must be in \[0, 2\]"), (0.9, 1, "there is 1 GPU"), (-1, 4, r"must be in \[0, 4\]")],
)
def test_shares_that_no_rank_can_have(share, world_size, words):
    with pytest.raises(ValueError, match=words):
        imbalance.check(SMALL._replace(share=share), world_size)


def _with_wrong_sums(case):
    imbalance._Layer._sum = lambda self, rows: 1.1 * self._return(rows).view(-1, self._topk, rows.shape[1]).sum(dim=1)
    imbalance.measure([case], "cpu", 1, 1)


def test_other_results_are_not_timed():
    with LocalRanks(2, 60) as ranks, pytest.raises(AssertionError, match=r"output differs from all-to-all's"):
        ranks.run(_with_wrong_sums, SMALL)


def test_times_over_those_of_the_first_share():
    even = {}

    def cells(model, seconds):
        record = {"model": model, "phase": "layer", "implementation": "ours", "seconds": seconds}
        [cell] = imbalance._over_even(even, [record]).values()
        return cell(record)

    assert [cells("a", 2.0), cells("a", 3.0), cells("b", 5.0), cells("b", 4.0)] == ["1.00", "1.50", "1.00", "0.80"]

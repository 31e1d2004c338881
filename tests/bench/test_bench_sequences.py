"""`tests/bench/run.py sequences`: what it measures, on the host. Nothing here judges a time."""

import sys
import types

import bench_sequences as sequences
import pytest
import torch
from nightly import at_night
from sequence_baselines import attention_of
from sequence_case import Case, draw_documents, plans_of

from megatron_ep.sequences import reference
from megatron_ep.sequences.planner import bytes_between
from megatron_ep.tools.bench.report import Report
from megatron_ep.tools.local_ranks import LocalRanks

WAYS, LAYOUTS = ("ours", "all_to_all"), ("at_home", "balanced", "context_parallel")


@pytest.mark.parametrize("dtype", ["bf16", at_night("fp32")])
def test_records(capsys, dtype):
    """The ranks compare what is timed with each other, so that the same work is."""
    world = 3
    case = Case(draw_documents(192, 8, 128, world, 0), 4, 2, 8, dtype, "cpu")
    with LocalRanks(world, 60) as ranks:
        by_rank = ranks.run(sequences.measure, case, ranks.topology, 1, 2)
    report = Report(None)
    sequences.add(report, case, by_rank)
    records = {(record["phase"], record["implementation"]): record for record in report.records}
    ways = ("dispatch", "return", "both", "both + gradients")
    assert set(records) == {
        *((phase, way) for phase in ways for way in WAYS),
        *((phase, layout) for phase in sequences.OF_ATTENTION for layout in LAYOUTS),
    }
    plans = plans_of(case)
    for record in records.values():
        assert 0 < record["seconds_min"] <= record["seconds"] <= record["seconds_max"]
        assert (record["case"], record["documents"]) == (str(case), case.documents)
    for layout, plan in plans.items():
        pairs = plan.attention_pairs
        assert records["attention", layout]["operations"] == 4 * 8 * 4 * pairs.max().item()
        assert records["step", layout]["load"] == pytest.approx((pairs.max() * world / pairs.sum()).item())
    text = capsys.readouterr().out
    assert f"3 ranks T=192, {sum(map(len, case.documents))} documents, heads 4/2 D=8 {dtype}" in text
    assert "attention by plain torch, the slowest rank" in text and "/ ours" in text and "/ balanced" in text


@pytest.mark.parametrize("world", [2, 3, 8])
def test_documents(world):
    for seed in range(20):
        documents = draw_documents(48_000, 1000, 20_000, world, seed)
        assert [sum(lengths) for lengths in documents] == [48_000] * world
        for lengths in documents:
            assert all(length % (2 * world) == 0 and 990 < length < 21_010 for length in lengths), lengths
    assert draw_documents(48_000, 1000, 20_000, world, 1) != documents


@pytest.mark.parametrize("world", [2, 5])
def test_plans(world):
    case = Case(draw_documents(4000, 40, 3000, world, 0), 4, 2, 8, "bf16", "cpu")
    plans = plans_of(case)
    rows = [4000] * world
    assert all(plan.q_rows.sum(1).tolist() == rows for plan in plans.values()), "no rank has more tokens than another"
    assert bytes_between(plans["at_home"], case.row_bytes).sum() == 0
    assert plans["context_parallel"].attention_pairs.unique().numel() == 1
    most = {name: plan.attention_pairs.max() for name, plan in plans.items()}
    assert most["balanced"] < most["at_home"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", ["torch's flash attention", "Transformer Engine"])
def test_attention_of_a_gpu(layout, kernel, monkeypatch):
    """Transformer Engine's is a stand-in."""
    if kernel == "Transformer Engine":
        pytest.importorskip("megatron.core")
        import te_attention

        monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te_attention)
    case = Case(draw_documents(240, 20, 200, 2, 0), 4, 2, 8, "fp32", "cpu")
    of_ranks = [plans_of(case)[layout].of_rank(rank) for rank in range(2)]
    assert any(tables.context_rows is not None for tables in of_ranks) == (layout == "context_parallel")
    assert any(tables.num_kv_rows > tables.num_q_rows for tables in of_ranks) == (layout != "at_home")
    for tables in of_ranks:
        q, k, v = torch.randn(tables.num_q_rows, 4, 8), *torch.randn(2, tables.num_kv_rows, 2, 8)
        out = attention_of(case, tables, kernel)(q, k, v)
        torch.testing.assert_close(out, reference.attention(q, k, v, tables))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((190, 8, 128), "--tokens is 190, must be a multiple of 4 for 2 ranks"),
        ((192, 64, 256), "--documents is 64 256, must be two of 4 to 192, the shortest first"),
        ((192, 128, 64), "--documents is 128 64, must be two of 4 to 192"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        draw_documents(*sizes, 2, 0)

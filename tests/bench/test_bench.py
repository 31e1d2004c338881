"""`megatron-ep bench`: what it writes, and what it refuses. Nothing here judges a time."""

import json
import sys
import types

import pytest
import rank_processes
import torch
import training_runs
from ports import free_port

from megatron_ep import _C
from megatron_ep import megatron as megatron_side
from megatron_ep.tools.bench import layer
from megatron_ep.tools.bench import main as bench

SIZES = ["--tokens", "24", "--hidden", "40", "--topk", "3", "--experts", "8", "--iters", "2", "--warmup", "1"]
PHASES = {"dispatch", "combine", "dispatch+combine"}


def _run(tmp_path, *arguments):
    file = tmp_path / "bench.json"
    assert bench.main([*SIZES, "--timeout", "60", "--json", str(file), *arguments]) == 0
    content = json.loads(file.read_text())
    assert content["environment"]["packages"]["torch"] == torch.__version__
    return content["records"]


@pytest.mark.skipif(not megatron_side.is_installed(), reason="megatron-core is not installed")
def test_records_beside_megatron(tmp_path, capsys):
    records = _run(tmp_path, "--nodes", "2", "--ranks-per-node", "2", "--dtype", "fp32", "bf16")
    by_case = {(record["case"], record["phase"], record["implementation"]): record for record in records}
    assert len(by_case) == len(records) == (5 + 6) * 3, "5 implementations, with bf16 one more, 3 phases"
    implementations = {"ours", "low_latency", "low_latency_sum_at_expert", "megatron_alltoall", "memcpy"}
    for dtype, more in (("fp32", set()), ("bf16", {"low_latency_fp8"})):
        assert {r["implementation"] for r in records if r["dtype"] == dtype} == implementations | more
    assert {record["phase"] for record in records} == PHASES
    for record in records:
        element = 4 if record["dtype"] == "fp32" else 2
        passes = 2 if record["phase"] == "dispatch+combine" else 1
        assert 0 < record["seconds_min"] <= record["seconds"] <= record["seconds_max"]
        assert record["bytes"] % (passes * 40 * element) == 0, "whole rows"
        assert 0 < record["bytes"] <= passes * 4 * 24 * 3 * 40 * element, "at most what all ranks send"
    text = capsys.readouterr().out
    assert "2x2 fp32 T=24 H=40 K=3 E=8" in text
    head = text.partition("2x2 fp32")[0]
    assert f"torch {torch.__version__}" in head and head.count("\n") <= 2, "one line about the machine, an empty one"


def test_the_ranks_of_a_job(tmp_path):
    """Of this machine; those of several: test_bench_network.py."""
    file = tmp_path / "bench.json"
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    tasks = training_runs.clean_environment(**slurm, GLOO_SOCKET_IFNAME="lo")
    command = ["-m", "megatron_ep.cli.main", "bench", *SIZES, "--dtype", "bf16", "--json", file]
    statuses, texts = zip(
        *rank_processes.run(command, [tasks | {"SLURM_PROCID": str(rank)} for rank in range(2)]), strict=True
    )
    assert statuses == (0, 0), texts
    assert "1x2 bf16 T=24 H=40 K=3 E=8" in texts[0] and texts[1] == ""
    assert {record["case"] for record in json.loads(file.read_text())["records"]} == {"1x2 bf16 T=24 H=40 K=3 E=8"}


def test_records_without_megatron(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(megatron_side, "is_installed", lambda: False)
    records = _run(tmp_path, "--nodes", "1", "--ranks-per-node", "2", "--dtype", "fp64")
    assert {record["implementation"] for record in records} == {
        "ours",
        "low_latency",
        "low_latency_sum_at_expert",
        "memcpy",
    }
    assert "megatron_alltoall skipped: megatron-core is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2"], "go together"),
        (["--tokens", "0"], "'0' is not a positive whole number"),
        (["--experts", "6"], "--experts 6 is not a multiple of 2x2 ranks"),
        (["--topk", "65"], "--topk 65 is over 32"),
        (["--topk", "5", "--experts", "4"], "--topk 5 is over 4"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--timeout", "0"], "'0' is not a number of seconds in (0, 1e+06]"),
        (["--timeout", "nan"], "'nan' is not a number of seconds in (0, 1e+06]"),
        (["--timeout", "1e7"], "'1e7' is not a number of seconds in (0, 1e+06]"),
        (["--tokens", "1000000000"], "--tokens 1000000000 --topk 8 --hidden 2048 takes"),
        (["--json", "/nowhere/bench.json"], "there is no folder /nowhere"),
        (["--json", "/tmp"], "/tmp cannot be written"),
        (["gpus", "--topk", "9", "--experts", "8"], "--topk 9 is over 8"),
        (["low-latency", "--topk", "9", "--experts", "8"], "--topk 9 is over 8"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_benchmark_with_a_name(monkeypatch):
    name = "gpus"
    named = types.ModuleType(f"megatron_ep.tools.bench.{name}")
    named.main = lambda argv: (name, argv)
    monkeypatch.setitem(sys.modules, f"megatron_ep.tools.bench.{name}", named)
    monkeypatch.setattr(f"megatron_ep.tools.bench.{name}", named, raising=False)
    assert bench.main([name, "--tokens", "1"]) == (name, ["--tokens", "1"])


@pytest.mark.skipif(hasattr(_C, "cuda_launcher") and torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for():
    with pytest.raises(SystemExit, match="megatron-ep bench gpus: device is 'cuda', but"):
        bench.main(["gpus"])


def test_what_differs_from_megatron_is_not_timed():
    def steps(rows, output):
        return (lambda: rows), (lambda _: output)

    rows, output = torch.arange(6.0).view(3, 2), torch.ones(2, 2)
    layer._check_equal({"ours": steps(rows, output), "megatron_alltoall": steps(rows.clone(), output.clone())})
    for wrong in (steps(rows.flip(0), output), steps(rows, output + 0.01)):
        with pytest.raises(AssertionError):
            layer._check_equal({"ours": wrong, "megatron_alltoall": steps(rows, output)})

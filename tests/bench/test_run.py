"""`tests/bench/run.py`: the gate's records, and what is refused. Nothing here judges a time."""

import json

import bench_router as router
import pytest
import run

from megatron_ep import megatron as megatron_side


def test_the_gate(tmp_path, capsys):
    file = tmp_path / "router.json"
    rounds = ("--iters", "2", "--warmup", "1", "--device", "cpu")
    assert router.main(["--tokens", "7", "9", *rounds, "--json", str(file)]) == 0
    records = json.loads(file.read_text())["records"]
    gates = {"ours", "ours_dense"} | ({"megatron"} if megatron_side.is_installed() else set())
    assert {(record["tokens"], record["implementation"], record["phase"]) for record in records} == {
        (tokens, gate, phase) for tokens in (7, 9) for gate in gates for phase in ("forward", "forward+backward")
    }
    assert "T=9 E=256 K=8 groups 4/8 cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sequences", "--query-heads", "6", "--kv-heads", "4"], "--query-heads 6 is not a multiple of --kv-heads 4"),
        (["sequences", "--num-sms", "0"], "'0' is not a positive whole number"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_benchmarks_are_listed(capsys):
    assert run.main(["gpus"]) == run.main([]) == 2
    text = capsys.readouterr().err
    assert all(f"\n    {name} " in text for name in run.NAMES)

"""`megatron-ep balance`: what it prints and writes of traces whose answer is known."""

import json
import sys

import numpy as np
import pytest
import routing_traces

from megatron_ep.cli import main as cli
from megatron_ep.megatron import trace_file


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def uniform(directory, rows=1000, **options):
    counts = np.full((20, 2, 2, 4, 8), rows)
    routing_traces.write(directory, counts, layers=(2, 3), ranks_per_node=2, **options)


def hot(directory, **options):
    """Expert 0 has as many rows as all others together: 4 * 8 / 14 = 2.286 times the mean on its rank."""
    counts = np.full((20, 2, 2, 4, 8), 10_000)
    counts[..., 0] = 70_000
    routing_traces.write(directory, counts, layers=(2, 3), ranks_per_node=2, **options)


def table(text, heading):
    """Numbers of the lines below a heading, up to an empty one."""
    lines = text[text.index(heading) :].splitlines()[1:]
    return [line.split() for line in lines[: lines.index("")]]


def test_an_even_load_needs_no_copies(tmp_path, capsys):
    uniform(tmp_path / "trace")
    assert cli.main(["balance", "trace"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "2 x 2 ranks, 8 experts, top-1: 20 steps, 80 passes of a layer, 8,000 rows a rank and pass\n"
    )
    names, *layers = table(text, "rows of the rank with the most")
    assert names == ["layer", "p50", "p95", "most", "mean", "lasting", "momentary", "nodes", "2nd", "half", "placed"]
    assert [layer[0] for layer in layers] == ["2", "3"]
    assert all(float(value) == (0 if number == 5 else 1) for layer in layers for number, value in enumerate(layer[1:]))
    assert text.endswith("not worth it: copies would save nothing\n")


def test_one_hot_expert_is_worth_copies(tmp_path, capsys):
    hot(tmp_path / "trace", device="GPU", expert_parameters=44_000_000, seconds=1.0)
    assert cli.main(["balance", "trace", "--slots", "1,3", "--node", "4", "--json", "all.json"]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith("worth it: copies would save 30.8%")
    assert text.splitlines()[-1].endswith("% of a step with S = 1")
    [report] = json.loads((tmp_path / "all.json").read_text())
    assert report["verdict"] == text.splitlines()[-1] and report["step_ms"] == pytest.approx(1000)
    plain = report["gains"][0]
    assert plain["spread"][0] == pytest.approx(4 * 8 / 14) and plain["spread"][1] == pytest.approx(1.0, abs=1e-5)
    assert (plain["copies"], plain["busiest"], plain["slot_bytes"]) == (3, 3, 6 * 44_000_000)
    # 2 layers of 2 micro-batches: (80,000 - 35,000) * 4 rows over the mean, 0.44 us each; 3 copies of 6 * 44 MB.
    assert plain["lost"][0] == pytest.approx(4 * 45_000 * 4 * 0.44e-3)
    assert plain["lost"][1] == pytest.approx(4 * (3 * 264 / 380 + 0.1), rel=1e-3)
    assert plain["saved"] == pytest.approx((plain["lost"][0] - plain["lost"][1]) / 1000)
    assert sorted(report["places"]["2"]) == list(range(8))
    assert [layer["lasting"] for layer in report["layers"]] == pytest.approx([4 * 8 / 14] * 2)


def test_what_is_not_known_is_bounded(tmp_path, capsys):
    hot(tmp_path / "trace", expert_parameters=44_000_000, seconds=1.0)
    assert cli.main(["balance", "trace"]) == 0
    assert "may be worth it: copies would save at most " in capsys.readouterr().out
    assert cli.main(["balance", "trace", "--step-ms", "20000"]) == 0
    assert "not worth it: copies would save " in capsys.readouterr().out


def test_other_numbers_of_ranks(tmp_path, capsys):
    uniform(tmp_path / "trace")
    assert cli.main(["balance", "trace", "--ep", "2,8", "--json", "all.json"]) == 0
    text = capsys.readouterr().out
    assert "1 x 2 ranks" in text and "4 x 2 ranks" in text
    assert "an estimate: the tokens of each rank of the trace stand for those of 2 ranks" in text
    assert [report["scaled"] for report in json.loads((tmp_path / "all.json").read_text())] == [1, 2]


def test_the_steps_before_the_first_are_left_out(tmp_path, capsys):
    counts = np.full((20, 2, 2, 4, 8), 1000)
    counts[:9, ..., 0] = 70_000
    routing_traces.write(tmp_path / "trace", counts)
    assert cli.main(["balance", "trace", "--first-step", "10"]) == 0
    text = capsys.readouterr().out
    assert "11 of 20 steps, 22 passes of a layer, 8,000 rows a rank and pass" in text
    _, *periods = table(text, "          steps")
    assert periods[-1] == ["10", "to", "20", "1.000", "1.000", "1.000"]


def test_of_many_layers_the_least_and_the_most_are_shown(tmp_path, capsys):
    counts = np.ones((2, 20, 1, 2, 4)) * np.array([1, 1, 1, 2])
    counts[:, 7, ..., 3] = 9
    routing_traces.write(tmp_path / "trace", counts, layers=range(1, 21))
    assert cli.main(["balance", "trace", "--json", "all.json"]) == 0
    layers = table(capsys.readouterr().out, "rows of the rank with the most")
    assert len(layers) == 1 + 12 + 1 and "8" in [line[0] for line in layers]
    assert len(json.loads((tmp_path / "all.json").read_text())[0]["layers"]) == 20


def test_a_single_step(tmp_path, capsys):
    routing_traces.write(tmp_path / "trace", np.ones((1, 1, 1, 2, 4)))
    assert cli.main(["balance", "trace", "--json", "all.json", "--picture", "p.png"]) == 0
    assert "nan" in capsys.readouterr().out
    [layer] = json.loads((tmp_path / "all.json").read_text(), parse_constant=pytest.fail)[0]["layers"]
    assert layer["placed"] is None


def test_megatrons_trace(tmp_path, capsys):
    passes = [(step, 1, [[0, 1], [0, 2]]) for step in range(3)]
    routing_traces.write_megatron(tmp_path / "trace", {0: passes, 1: passes})
    assert cli.main(["balance", "trace", "--experts", "4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1 x 2 ranks, 4 experts, top-2: 3 steps, 3 passes of a layer, 4 rows a rank and pass\n")
    assert "1.500" in text and "lost, rows" in text
    assert cli.main(["balance", "trace", "--experts", "4", "--ep", "1", "--json", "all.json"]) == 0
    assert json.loads((tmp_path / "all.json").read_text())[0]["expert_ranks"] == 1


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    hot(tmp_path / "trace")
    assert cli.main(["balance", "trace", "--picture", f"p.{suffix}"]) == 0
    start = (tmp_path / f"p.{suffix}").read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], ["none: is no directory"]),
        (["empty"], ["empty: holds no trace"]),
        (["bad"], ["rank_00001.routing: is no trace that --ep-trace of this version has written"]),
        (["half"], ["half: has no file of rank 1"]),
        (["theirs"], ["theirs: is Megatron's trace, which does not say how many experts there are: --experts"]),
        (["theirs", "--experts", "2"], ["line 1 has expert 3, must be in [0, 2)"]),
        (["theirs", "--experts", "4", "--step-ms", "9"], ["--step-ms needs --expert-parameters"]),
        (["trace", "--experts", "8"], ["--experts is 8, but trace says how many there are"]),
        (["trace", "--ep", "3"], ["--ep is 3, must divide the 8 experts"]),
        (["trace", "--ep", "2,x"], ["--ep is '2,x', must be a number, or several"]),
        (["trace", "--node", "3"], ["--node is 3, must divide the 4 ranks"]),
        (["trace", "--node", "0"], ["--node is 0"]),
        (["trace", "--first-step", "0"], ["--first-step is 0"]),
        (["trace", "--first-step", "21"], ["--first-step is 21, but the trace ends with step 20"]),
        (["trace", "--slots", "0"], ["--slots is 0"]),
        (["trace", "--window", "0"], ["--window is 0"]),
        (["trace", "--tflops", "nan"], ["--tflops is nan, must be a number over 0"]),
        (["trace", "--gb-s", "0"], ["--gb-s is 0.0, must be a number over 0"]),
        (["trace", "--json", "none/all.json"], ["--json none/all.json: No such file"]),
        (["trace", "--picture", "p.doc"], ["--picture p.doc", "not supported"]),
        (["trace", "--picture", "none/p.png"], ["--picture none/p.png: No such file"]),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, words, tmp_path, capsys):
    uniform(tmp_path / "trace")
    (tmp_path / "empty").mkdir()
    for name in ("bad", "half"):
        uniform(tmp_path / name)
    trace_file.file_of(tmp_path / "bad", 1).write_bytes(b"something else")
    trace_file.file_of(tmp_path / "half", 1).unlink()
    routing_traces.write_megatron(tmp_path / "theirs", {0: [(0, 1, [[3]])]})
    assert cli.main(["balance", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-ep balance: ") and all(word in line for word in words), line


def test_a_picture_without_matplotlib(monkeypatch, tmp_path, capsys):
    uniform(tmp_path / "trace")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = {"numpy": object()}
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    assert cli.main(["balance", "trace", "--picture", "p.png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err

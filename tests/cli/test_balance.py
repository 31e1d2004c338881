"""`megatron-ep balance`: what it prints and writes of traces whose answer is known."""

import json

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
    routing_traces.write(directory, counts, layers=(2, 3), **options)


def table(text, heading):
    """Numbers of the lines below a heading, up to an empty one."""
    lines = text[text.index(heading) :].partition("\n\n")[0].splitlines()[1:]
    return [line.split() for line in lines]


def test_an_even_load(tmp_path, capsys):
    uniform(tmp_path / "trace")
    assert cli.main(["balance", "trace", "--json", "all.json"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("4 ranks, 8 experts, top-1: 20 steps, 80 passes of a layer, 8,000 rows a rank and pass\n")
    names, *layers = table(text, "rows of the rank with the most")
    assert names == ["layer", "p50", "p95", "most", "mean", "2nd", "half", "placed"]
    assert layers == [[number, *["1.000"] * 6] for number in ("2", "3")]
    assert text.splitlines()[-1].split() == ["1", "to", "20", "1.000", "1.000", "1.000"]
    assert sorted(json.loads((tmp_path / "all.json").read_text())["places"]["2"]) == list(range(8))


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
    assert len(json.loads((tmp_path / "all.json").read_text())["layers"]) == 20


def test_a_single_step(tmp_path, capsys):
    routing_traces.write(tmp_path / "trace", np.ones((1, 1, 1, 2, 4)))
    assert cli.main(["balance", "trace", "--json", "all.json"]) == 0
    assert "nan" in capsys.readouterr().out
    [layer] = json.loads((tmp_path / "all.json").read_text(), parse_constant=pytest.fail)["layers"]
    assert layer["placed"] is None


def test_megatrons_trace(tmp_path, capsys):
    passes = [(step, 1, [[0, 1], [0, 2]]) for step in range(3)]
    routing_traces.write_megatron(tmp_path / "trace", {0: passes, 1: passes})
    assert cli.main(["balance", "trace", "--experts", "4"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 ranks, 4 experts, top-2: 3 steps, 3 passes of a layer, 4 rows a rank and pass\n")
    assert "1.500" in text
    assert cli.main(["balance", "trace", "--experts", "4", "--ep", "1", "--json", "all.json"]) == 0
    assert json.loads((tmp_path / "all.json").read_text())["expert_ranks"] == 1


def test_what_copies_gain(tmp_path, capsys):
    """Two experts of one rank have half of all rows; four ranks become eight, and two steps one."""
    counts = np.full((20, 1, 1, 4, 16), 100)
    counts[..., :2] = 700
    routing_traces.write(tmp_path / "trace", counts)
    options = ["--fold", "8", "--merge", "2", "--copies", "1,2", "--share", "0.2", "--node", "4", "--json", "all.json"]
    assert cli.main(["balance", "trace", *options]) == 0
    text = capsys.readouterr().out
    assert text.startswith("8 ranks, 16 experts, top-1: 10 of 20 steps, 10 passes of a layer, 2,800 rows a rank and")
    assert "predicted with B copies a rank within nodes of 4: max/mean" in text
    before = (700 + 700) / (2 * 700 + 14 * 100) * 8
    after = before * (1400 + 3 * 200) / 4 / 1400
    *_, last = text.splitlines()
    assert last.split()[:5] == ["1", "to", "19", f"{before:.3f}", f"{after:.3f}"]
    gains = json.loads((tmp_path / "all.json").read_text())["copies"]
    whole = [gain for gain in gains if gain["last"] - gain["first"] > 2]
    assert [gain["slots"] for gain in whole] == [1, 2]
    share = 0.2 * (before - after) / (1 + 0.2 * (before - 1))
    assert all(gain["most"] == pytest.approx(share) and 0 < gain["least"] < share for gain in whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], ["none: is no directory"]),
        (["empty"], ["empty: holds no trace"]),
        (["bad"], ["rank_00001.routing: is no trace that --ep-trace of this version has written"]),
        (["half"], ["half: has no file of rank 1"]),
        (["theirs"], ["theirs: is Megatron's trace, which does not say how many experts there are: --experts"]),
        (["theirs", "--experts", "2"], ["line 1 has expert 3, must be in [0, 2)"]),
        (["trace", "--experts", "8"], ["--experts is 8, but trace says how many there are"]),
        (["trace", "--ep", "4"], ["--ep is 4, but trace says how many there are"]),
        (["theirs", "--experts", "4", "--ep", "3"], ["--ep is 3, must divide the 1 ranks"]),
        (["trace", "--fold", "3"], ["--fold is 3, must divide the 8 experts"]),
        (["trace", "--merge", "41"], ["--merge is 41, but layer 2 has 40 passes"]),
        (["trace", "--copies", "0"], ["--copies is 0, must be"]),
        (["trace", "--copies", "many"], ["--copies is 'many', must be a number, or several"]),
        (["trace", "--copies", "1", "--node", "3"], ["--node is 3, must divide the 4 ranks"]),
        (["trace", "--node", "2"], ["--node is 2, which only --copies uses"]),
        (["trace", "--copies", "1", "--share", "0"], ["--share is 0, must be greater than 0 and at most 1"]),
        (["trace", "--copies", "1", "--gb-s", "nan"], ["--gb-s is nan, must be greater than 0"]),
        (["trace", "--first-step", "0"], ["--first-step is 0"]),
        (["trace", "--first-step", "21"], ["--first-step is 21, but the trace ends with step 20"]),
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

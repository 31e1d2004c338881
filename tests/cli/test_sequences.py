"""`megatron-ep sequences`: loads and bytes of given documents, before and after."""

import pytest

from megatron_ep.cli import main as cli


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.txt").write_text("4096\n0\n4096\n")


def rows(text):
    """The table's numbers by its rows' names."""
    return {line[:16].strip(): [float(x) for x in line[16:].split()] for line in text.splitlines()[2:]}


def test_lengths(capsys):
    assert cli.main(["sequences", "lengths.txt", "--ranks", "4", "--block", "16"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("2 documents, 8,192 rows, 4 ranks; of a core, balancing took ")
    table = rows(text)
    assert list(table) == ["at home", "balanced"]
    # The second half of a document is 3 times the work of the first.
    assert table["at home"][0] == pytest.approx(1.5, abs=1e-3) and table["balanced"][0] < 1.02
    kv = 2 * 8 * 128 * 2
    assert table["at home"][1:] == pytest.approx([2 * 2048 * kv / 1e9, *(2048 * kv / 1e9,) * 2], abs=1e-3)


def test_a_bound(capsys):
    assert cli.main(["sequences", "lengths.txt", "--ranks", "2", "--max-bytes", "0"]) == 0
    table = rows(capsys.readouterr().out)
    assert table["balanced"] == table["at home"]


def test_nothing_to_compute(tmp_path, capsys):
    (tmp_path / "none.txt").write_text("")
    assert cli.main(["sequences", "none.txt", "--ranks", "2"]) == 0
    assert rows(capsys.readouterr().out)["balanced"] == [1, 0, 0, 0]
    assert cli.main(["sequences", "none.txt", "--ranks", "2", "--predict"]) == 0
    assert capsys.readouterr().out.count("0.01") > 0  # launches alone


@pytest.mark.parametrize("more", [[], ["--ranks-per-node", "2"]], ids=["one node", "two nodes"])
def test_predicted_times(more, tmp_path, capsys):
    (tmp_path / "lengths.txt").write_text("1024\n0\n1024\n")
    assert cli.main(["sequences", "lengths.txt", "--ranks", "4", "--predict", "--num-sms", "16", *more]) == 0
    text = capsys.readouterr().out.partition("Predicted on ")[2]
    assert text.startswith(f"h200_{'cx7, 2 x 2' if more else 'nvlink, 1 x 4'} ranks, 16 SMs")
    lines = [line for line in text.splitlines() if line.startswith(("at home", "balanced"))]
    times = [[float(x) for x in line[16:].split()[:6]] for line in lines]
    for q, kv, out, gradient, both, everything in times:
        assert both == pytest.approx(q + kv + out, abs=0.021)
        assert everything == pytest.approx(2 * (q + out + gradient) + kv, abs=0.05)
    assert len(times) == 2 and times[0][4] < times[1][4]  # what is at home moves less
    assert ("by what is guessed of the network card" in text) == bool(more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.txt", "--ranks", "2"], ["nothing.txt", "No such file"]),
        (["lengths.txt", "--ranks", "0"], ["--ranks is 0, must be an int in [1,"]),
        (["lengths.txt", "--ranks", "2", "--block", "0"], ["--block is 0"]),
        (["lengths.txt", "--ranks", "2", "--kv-heads", "0"], ["--kv-heads is 0"]),
        (["lengths.txt", "--ranks", "2", "--max-bytes", "-1"], ["--max-bytes is -1"]),
        (["words.txt", "--ranks", "2"], ["words.txt: line 2: '-3' is no length"]),
        (["long.txt", "--ranks", "2"], ["long.txt: line 1: '9999999999' is no length of at most"]),
        (["bytes.txt", "--ranks", "2"], ["bytes.txt", "utf-8"]),
        (["lengths.txt", "--ranks", "2", "--num-sms", "8"], ["--num-sms: only with --predict"]),
        (["lengths.txt", "--ranks", "4", "--predict", "--ranks-per-node", "3"], ["--ranks-per-node is 3, must divide"]),
        (["lengths.txt", "--ranks", "4", "--predict", "--num-sms", "0"], ["--num-sms is 0"]),
        (["lengths.txt", "--ranks", "4", "--predict", "--machine", "h300"], ["machine is 'h300'", "h200_cx7"]),
        (["lengths.txt", "--ranks", "128", "--predict"], ["ranks_per_node is 128"]),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, words, tmp_path, capsys):
    (tmp_path / "words.txt").write_text("12\n-3\n")
    (tmp_path / "long.txt").write_text("9999999999\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\n")
    assert cli.main(["sequences", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-ep sequences: ") and all(word in line for word in words), line

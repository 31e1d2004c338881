"""Two files of a benchmark beside each other."""

import json

import pytest
import run

from megatron_ep.tools.bench.report import make_record

STEADY = [0.010, 0.010, 0.011]
SLOWER = [0.013, 0.014, 0.014]
NOISY = [0.009, 0.012, 0.020]


def write(path, machine="a", **seconds):
    records = [make_record("2x2", phase, "ours", times, 1) for phase, times in seconds.items()]
    path.write_text(json.dumps({"environment": machine, "records": [*records, {"case": "4x4", "error": "too large"}]}))
    return str(path)


@pytest.mark.parametrize(
    ("before", "after", "status", "says"),
    [
        (STEADY, SLOWER, 1, "SLOWER"),
        (SLOWER, STEADY, 0, "faster"),
        (STEADY, STEADY, 0, ""),
        (STEADY, NOISY, 0, ""),
        (NOISY, SLOWER, 0, ""),
    ],
)
def test_what_counts(tmp_path, capsys, before, after, status, says):
    files = [write(tmp_path / "a.json", dispatch=before), write(tmp_path / "b.json", dispatch=after)]
    assert run.main(["compare", *files]) == status
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if "dispatch" in line]
    assert row[6:] == ([says] if says else [])


def test_what_only_one_file_has(tmp_path, capsys):
    files = [write(tmp_path / "a.json", dispatch=STEADY), write(tmp_path / "b.json", "b", combine=STEADY)]
    assert run.main(["compare", *files]) == 0
    said = capsys.readouterr().out
    assert f"only in {files[0]}: 2x2, dispatch, ours" in said and f"only in {files[1]}: 2x2, combine, ours" in said
    assert "different machines" in said and "0 of 0 slower" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": 1, "records": [{"seconds": 1}]}'])
def test_a_file_of_something_else(tmp_path, capsys, text):
    other = tmp_path / "b.json"
    other.write_text(text)
    assert run.main(["compare", write(tmp_path / "a.json"), str(other)]) == 2
    assert f"{other} is no file of a benchmark's --json" in capsys.readouterr().err
    assert run.main(["compare", str(tmp_path / "missing"), str(other)]) == 2

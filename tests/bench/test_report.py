"""Records, tables and the file that every benchmark writes."""

import json

import pytest

from megatron_ep.tools.bench import gpus
from megatron_ep.tools.bench.report import EXTREMES, PERCENTILES, RATE, WHAT, Report, make_record, relative


def test_percentiles_are_values_that_were_measured():
    record = make_record("c", "p", "i", [i / 1000 for i in range(100, 0, -1)], 10**9, nodes=2)
    assert record["seconds_min"] == 0.001 and record["seconds_max"] == 0.1
    assert record["seconds"] == pytest.approx(0.0505)
    assert record["seconds_p90"] == 0.09 and record["seconds_p99"] == 0.099
    assert record["gigabytes_per_second"] == pytest.approx(1 / 0.0505)
    assert record["nodes"] == 2
    one = make_record("c", "p", "i", [3.0], 1)
    assert {one[key] for key in one if key.startswith("seconds")} == {3.0}


def test_tables_and_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("megatron_ep.diagnosis.env.collect", lambda: {"machine": {"cpu": "some [bold] cpu"}})
    monkeypatch.setattr("megatron_ep.diagnosis.env.headline", lambda report: f"on {report['machine']['cpu']}")
    path = tmp_path / "bench.json"
    report = Report(path)
    records = [
        make_record("2x2", "dispatch", "ours", [0.001, 0.003], 3 * 10**6),
        make_record("2x2", "dispatch", "theirs", [0.004], 3 * 10**6),
    ]
    report.add("2x2 [of all]", records, WHAT | EXTREMES | RATE | relative("/ ours", "ours", records))
    lines = capsys.readouterr().out.splitlines()
    report.add("4x4", [more := make_record("4x4", "dispatch", "ours", [0.001], 1)], WHAT)
    assert lines[:3] == ["on some [bold] cpu", "", "2x2 [of all]"]
    assert [line.split() for line in lines[3:]] == [
        ["phase", "implementation", "min", "ms", "median", "max", "GB/s", "/", "ours"],
        ["dispatch", "ours", "1.000", "2.000", "3.000", "1.50", "1.00"],
        ["dispatch", "theirs", "4.000", "4.000", "4.000", "0.75", "2.00"],
    ]
    assert all(line.startswith("  ") for line in lines[3:]) and len(set(map(len, lines[3:]))) == 1
    content = json.loads(path.read_text())
    assert content["environment"] == {"machine": {"cpu": "some [bold] cpu"}}
    assert content["records"] == [*records, more]


def test_a_round_of_all_gpus_takes_as_long_as_its_slowest_rank(capsys, monkeypatch):
    monkeypatch.setattr("megatron_ep.diagnosis.env.collect", dict)
    monkeypatch.setattr("megatron_ep.diagnosis.env.headline", lambda report: "")
    ranks = [
        gpus.Measured("1x2", "dispatch", "ours", seconds, size, {"nodes": 1})
        for seconds, size in (([0.001, 0.005, 0.002], 100), ([0.002, 0.001, 0.003], 300))
    ]
    record = gpus.slowest(ranks)
    assert [record[key] for key in ("seconds_min", "seconds", "seconds_max")] == [0.002, 0.003, 0.005]
    assert record["bytes"] == 200 and record["nodes"] == 1
    Report(None).add("1x2", [record], WHAT | PERCENTILES)
    assert capsys.readouterr().out.splitlines()[-1].split() == ["dispatch", "ours", "3.000", "5.000", "5.000"]

"""`megatron-ep simulate`: its tables and files, and one sentence for a mistake."""

import json

import pytest

from megatron_ep.cli.main import main
from megatron_ep.config import Topology
from megatron_ep.tools.simulate.main import default_images

SMALL = ("--tokens", "64", "--experts", "64")


def run(capsys, *arguments):
    assert main(["simulate", *arguments, *SMALL]) == 0
    return capsys.readouterr().out


def test_one_node(capsys):
    said = run(capsys, "1", "2")
    assert "machine h200_nvlink" in said and "error for topologies that were held out" in said
    assert "band" not in said.split("us ")[0] and "network card" not in said
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert float(lines["dispatch"][1]) <= float(lines["dispatch"][3])
    assert "nvl_sender" in lines and "combine_receiver" in lines and "rdma_sender" not in lines
    [share] = [line.split() for line in said.splitlines() if line.startswith("of a layer ")]
    calls, experts = (
        2e-3 * (float(lines["dispatch"][3]) + float(lines["combine"][3])),
        18 * 7168 * 2048 * 64 * 8 / 570e9,
    )
    assert abs(float(share[4]) - calls) < 0.06 and abs(float(share[10]) - experts) < 0.06
    assert abs(float(share[3].strip("%:")) - 100 * calls / (calls + experts)) < 3
    [notify] = [line for line in said.splitlines() if line.startswith("notify ") and "not calibrated" in line]
    assert float(notify.split()[1]) > 0 and said.count("not calibrated") == 1


@pytest.mark.parametrize("mode", ["normal", "low-latency"])
def test_a_rack_that_was_not_measured(capsys, tmp_path, mode):
    table = tmp_path / "times.json"
    rack = ["1", "72", "--machine", "gb200_nvl72", "--tokens", "4", "--experts", "72", "--mode", mode, "--num-sms", "8"]
    assert main(["simulate", *rack, "--json", str(table)]) == 0
    assert "148 SMs; NOT MEASURED: published figures" in capsys.readouterr().out
    [found] = json.loads(table.read_text())
    assert found["machine"] == "gb200_nvl72" and found["held_out"] is None


def test_several_nodes_have_a_band_and_a_recommendation(capsys):
    said = run(capsys, "2,4", "1", "--num-sms", "4,8")
    assert "its network card was not measured" in said
    assert said.count(" to ") >= 8 and said.count(": recommended ") == 2
    assert "2 x 1: recommended " in said and "4 x 1: recommended " in said
    assert " to " not in run(capsys, "2", "1", "--no-band").split("dispatch ")[1].split("\n")[0].split("waits")[0]


def test_the_low_latency_mode(capsys, tmp_path):
    file = tmp_path / "json"
    options = ("--mode", "low-latency", "--sum-at", "expert", "--dtype", "fp8", "--json", str(file))
    said = run(capsys, "2", "2", *options)
    assert "low-latency mode, 24 SMs, sums at the expert" in said and "of 8 figures" in said
    assert "messages of a rank over the network: dispatch " in said
    assert all(f"low_latency_{role}" in said for role in ("sender", "receiver", "combine_sender", "combine_receiver"))
    [found] = json.loads(file.read_text())
    assert found["case"]["mode"] == "low-latency" and found["held_out"]["figures"] == 8
    assert found["phases"].keys() == {"dispatch", "combine"}
    for phase in found["phases"].values():
        assert 0 < phase["bytes_alone"] < phase["us"]["p50"] and phase["messages"] > phase["rail_rows"] > 0


def test_the_file(capsys, tmp_path):
    file = tmp_path / "json"
    run(capsys, "2", "2", "--json", str(file))
    [found] = json.loads(file.read_text())
    for name in ("dispatch", "combine"):
        phase = found["phases"][name]
        assert 0 < phase["bytes_alone"] < phase["us"]["p50"] <= phase["us"]["p99"] <= phase["us"]["max"]
        assert phase["band"][0] <= phase["us"]["max"] <= phase["band"][1] and 0 < phase["busy"]["card"] <= 1
    calibrated = {name: phase["is_calibrated"] for name, phase in found["phases"].items()}
    assert calibrated == {"notify": False, "dispatch": True, "combine": True}
    notify = found["phases"]["notify"]
    assert notify["band"][0] <= notify["us"]["max"] <= notify["band"][1] and notify["bytes_alone"] is None
    assert notify["messages"] == 4 * 2 and notify["rail_rows"] == 0  # of each rank counts and their flag
    assert found["held_out"]["figures"] >= 30 and found["case"]["num_tokens"] == 64


def test_settings_side_by_side(capsys):
    said = run(capsys, "2", "1", "--no-band", "--channels", "4,8", "--rdma-rows", "2,8", "--chunk", "1,4")
    assert said.count("\n2 x 1 ranks") == 8
    assert "24 SMs, 4 channels, network rings of 2 rows, puts of 1;" in said
    [last] = [line for line in said.splitlines() if "recommended" in line]
    totals = sorted(
        sum(float(line.split()[3]) for line in part.splitlines()[1:5] if line.startswith(("dispatch", "combine")))
        for part in said.split("\n\n")[1:9]
    )
    assert f"both ways {totals[0]:.0f} us" in last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2", "0"], "Topology.ranks_per_node is 0"),
        (["two", "2"], "NODES is 'two', must be a number"),
        (["2", "2", "--num-sms", "8;9"], "--num-sms is '8;9', must be a number"),
        (["2", "2", "--machine", "a100"], "machine is 'a100', must be"),
        (["2", "2", "--machine", "h200_nvlink"], "has no network card"),
        (["2", "2", "--routing", "hot"], "routing is 'hot', must be"),
        (["4", "2", "--images", "3"], "images is 3, must divide the 4 nodes"),
        (["2", "2", "--num-sms", "1", "--channels", "9"], "num_sms is 1, too few for 9 channels"),
        (["2", "2", "--mode", "low-latency", "--channels", "4"], "--channels: there is none in mode low-latency"),
        (["2", "2", "--mode", "low"], "mode is 'low', must be normal or low-latency"),
        (["2", "2", "--sum-at", "expert"], "sum_at is 'expert', which only mode low-latency has"),
        (["2", "2", "--hidden", "-8"], "row_bytes is -16"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, arguments, message):
    assert main(["simulate", *arguments, *SMALL]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-ep simulate: ") and error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("topology", "images"), [((1, 8), 1), ((2, 8), 1), ((8, 2), 4), ((6, 2), 3), ((5, 1), 5), ((1, 72), 1)]
)
def test_how_many_nodes_stand_for_all(topology, images):
    assert default_images(Topology(*topology)) == images

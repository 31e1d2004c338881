"""What was measured, what the constants say of it, and what a change of the protocol would have to explain."""

import math
import shutil
from pathlib import Path

import calibrate
import pytest
from nightly import at_night

from megatron_ep.config import Config, Topology, Tuning
from megatron_ep.tools.simulate import Case, Machine, predict
from megatron_ep.tools.simulate.machine import FOLDER, MAX_ERROR

MEASURED = Path(__file__).parent / "h200_measured.csv"
# A change that moves a prediction by more has made the protocol faster or slower: say so in the changes, and calibrate
# again (python tests/simulate/calibrate.py).
MOVED = 0.05


@pytest.fixture(scope="module")
def figures():
    return calibrate.read(MEASURED)


@pytest.fixture(scope="module")
def errors(figures):
    return calibrate.Predictor().errors(figures, Machine.load("h200_nvlink"))


def check_not_moved(figures, errors):
    for figure, error in zip(figures, errors, strict=True):
        moved = figure.us * math.exp(error) / figure.predicted - 1
        assert abs(moved) <= MOVED, f"{figure}: {moved:+.1%}"


def test_predictions_have_not_moved(figures):
    some = figures[::8]
    check_not_moved(some, calibrate.Predictor().errors(some, Machine.load("h200_nvlink")))


@pytest.mark.nightly
def test_no_prediction_has_moved(figures, errors):
    check_not_moved(figures, errors)


@pytest.mark.nightly
def test_what_was_held_out_is_predicted(figures, errors):
    found, told = calibrate.held_out(figures, errors), Machine.load("h200_nvlink").held_out
    assert found["normal"]["figures"] >= 30 and found["low-latency"]["figures"] >= 8
    assert found.keys() == told.keys() == MAX_ERROR.keys()
    for mode, off in found.items():
        most_off = dict(zip(("median", "p90", "worst"), MAX_ERROR[mode], strict=True))
        assert all(off[name] <= most for name, most in most_off.items())
        assert told[mode].figures == off["figures"] and off["median"] == pytest.approx(told[mode].median, abs=0.01)


def test_whole_topologies_are_held_out(figures):
    fitted = {figure.case.topology for figure in figures if not figure.is_held_out}
    held = {figure.case.topology for figure in figures if figure.is_held_out}
    assert len(held - fitted) >= 2


# us of dispatch and combine, of constants whose network card nobody has measured
@pytest.mark.parametrize(
    ("nodes", "ranks", "settings", "dispatch", "combine"),
    [(2, 8, {}, 241.9, 389.7), (8, 8, {"images": 1}, 845.6, 966.4), at_night(32, 8, {"images": 1}, 1272.6, 1379.2)],
)
def test_predictions_over_networks_have_not_moved(nodes, ranks, settings, dispatch, combine):
    case = Case(Topology(nodes, ranks), Config(num_experts=256, num_sms=24), num_tokens=512, **settings)
    found = predict(case, Machine.load("h200_cx7")).phases
    assert found["dispatch"].us == pytest.approx(dispatch, rel=MOVED)
    assert found["combine"].us == pytest.approx(combine, rel=MOVED)


# us, of the same constants: nobody has measured notify alone
@pytest.mark.parametrize(("nodes", "images", "us"), [(1, 1, 20.7), (8, 1, 31.2), at_night(8, 8, 31.3), (64, 1, 62.4)])
def test_the_exchange_of_counts_has_not_moved(nodes, images, us):
    config = Config(num_experts=max(256, 8 * nodes), num_sms=24)
    case = Case(Topology(nodes, 8), config, num_tokens=64, images=images)
    notify = predict(case, Machine.load("h200_cx7")).notify
    assert notify.us == pytest.approx(us, rel=MOVED) and not notify.is_calibrated
    assert notify.messages / case.simulated_ranks == 2 * (nodes - 1)
    assert notify.roles.keys() == {"notify"} and notify.rail_rows == notify.peer_rows == 0


# us of dispatch and combine, and messages of a rank's dispatch, of the same constants
@pytest.mark.parametrize(
    ("nodes", "tokens", "dispatch", "combine", "messages"),
    [(2, 128, 168.6, 196.5, 441), (8, 128, 311.2, 322.6, 1031), (8, 1, 30.4, 29.0, 125)],
)
def test_low_latency_predictions_over_networks_have_not_moved(nodes, tokens, dispatch, combine, messages):
    config = Config(num_experts=256, num_sms=32)
    case = Case(Topology(nodes, 8), config, mode="low-latency", num_tokens=tokens, images=1)
    found = predict(case, Machine.load("h200_cx7")).phases
    assert found["dispatch"].us == pytest.approx(dispatch, rel=MOVED)
    assert found["combine"].us == pytest.approx(combine, rel=MOVED)
    assert found["dispatch"].messages / 8 == pytest.approx(messages, rel=0.01)


def test_a_fit_finds_constants_again(tmp_path, monkeypatch, capsys):
    """From measurements that are predictions of other constants."""
    line = "fit,normal,1,{ranks},24,,{tokens},{experts},bf16,off,,dispatch,{us},,test"
    held = line.replace("fit", "held", 1)
    true = Machine.load("h200_nvlink").with_constants(sm_store=50.0, launch=9000.0)
    lines = []
    for text, ranks, tokens in ((line, 2, 512), (line, 2, 1), (line, 2, 128), (held, 4, 256)):
        config = Config(num_experts=16 * ranks, num_sms=24, tuning=Tuning(local_pass=False))
        us = predict(Case(Topology(1, ranks), config, num_tokens=tokens), true).phases["dispatch"].us
        lines.append(text.format(ranks=ranks, tokens=tokens, experts=16 * ranks, us=us))
    table, machine = tmp_path / "measured.csv", tmp_path / "machine.toml"
    table.write_text("\n".join([MEASURED.read_text().splitlines()[0], *lines]) + "\n")
    shutil.copy(FOLDER / "h200_nvlink.toml", machine)
    monkeypatch.setattr(calibrate, "PRIOR", 1e-3)
    keep = {"sm_store", "launch"}
    text = machine.read_text().split("\n\n")
    machine.write_text(
        "\n\n".join(
            part if part.split("]")[0].removeprefix("[constants.") in keep else drop_prior(part) for part in text
        )
    )
    assert calibrate.main([str(table), str(machine)]) == 0
    fitted = Machine.load(str(machine))
    assert fitted.constants["sm_store"] == pytest.approx(50, rel=0.03)
    assert fitted.constants["launch"] == pytest.approx(9000, rel=0.03)
    assert fitted.held_out["normal"].figures == 1 and fitted.held_out["normal"].worst < 0.03
    assert "held 1x4" in capsys.readouterr().out


def drop_prior(part):
    return "\n".join(line for line in part.split("\n") if not line.startswith("prior"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("worst = ", "worst = 0.5 #"), "predicts mode normal too badly: .*worst 50.0%.*may be 5%, 10%, 20%"),
        (("[constants.step]", "[constants.stap]"), "there is no constant stap; did you mean step"),
        (("[constants.step]", "[constants.poll2]"), "there is no constant poll2"),
        (("origin = ", "origin_of = "), "step must have an origin and a date"),
        (("sms = 132", "sms = 0"), "sms must be an int > 0"),
        (("[held_out.normal]", "[held_out.usual]"), "its prediction error is unknown: held_out.normal"),
        (("sms = 132", "sms = ["), "machine .*: "),
        (("sms = 132", "sms = 132\nunmeasured = 'a guess'"), "has held_out, so it is not unmeasured"),
        (("sms = 132", "sms = 132\nunmeasured = true"), "unmeasured must be a text"),
        (("[constants.step]", "[other.step]"), "lacks step"),
    ],
)
def test_a_machine_file_that_is_refused(tmp_path, change, message):
    file = tmp_path / "machine.toml"
    file.write_text((FOLDER / "h200_nvlink.toml").read_text().replace(*change, 1))
    with pytest.raises(ValueError, match=message):
        Machine.load(str(file))


def test_machines_by_name():
    assert not Machine.load("h200_nvlink").has_card and Machine.load("h200_cx7").has_card
    unmeasured = Machine.load("gb200_nvl72")
    assert unmeasured.unmeasured and not unmeasured.held_out, "errors of another machine are not its own"
    with pytest.raises(ValueError, match=r"machine is 'b200', must be a TOML file or one of gb200_nvl72, h200_cx7,"):
        Machine.load("b200")


def test_a_table_that_cannot_be_read(tmp_path, capsys):
    table = tmp_path / "measured.csv"
    table.write_text("set,nodes\nfit,1\n")
    assert calibrate.main([str(table), str(FOLDER / "h200_nvlink.toml")]) == 2
    assert "measurements" in capsys.readouterr().err

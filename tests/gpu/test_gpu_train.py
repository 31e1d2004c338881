"""Training runs whose ranks share a GPU, against the same recipe on the host and with Megatron's dispatcher."""

import functools
import shutil

import pytest
import training_runs
from skips import missing
from training_runs import deterministic, rows

ON_GPU = training_runs.RECIPES / "tiny_moe_gpu.yaml"
STEPS, SAVED = 18, 8
run = functools.partial(training_runs.run, ON_GPU)
pytestmark = pytest.mark.needs(missing("megatron.core", "pydantic"))


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    out = tmp_path_factory.mktemp("host") / "run"
    run(out, "--steps", str(STEPS), "--set", f"checkpoint.save_interval={SAVED}", "--set", "train.device=cpu")
    return out


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "run"
    text = run(out, "--steps", str(STEPS), "--set", f"checkpoint.save_interval={SAVED}")
    assert "1 x 4 ranks on cuda, dispatcher ep" in text and "Traceback" not in text
    return out


def resumed(source, out):
    """The steps after SAVED once more, on the GPU, from the source's checkpoint there."""
    shutil.copytree(source, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:08d}")
    run(out, "--steps", str(STEPS), "--resume", "--set", f"checkpoint.save_interval={STEPS}")
    return rows(out)[SAVED:]


def furthest(expected, actual, key):
    return max(abs(float(e[key]) - float(a[key])) / float(e[key]) for e, a in zip(expected, actual, strict=True))


def assert_alike(expected, actual):
    """Equal but for fp32 rounding: on the host two dispatchers differ by 1e-7. A few tokens may find another expert,
    where two scores differ by less than the rounding. A wrong gradient shows in the norm at once."""
    assert furthest(expected, actual, "loss") < 1e-4
    assert furthest(expected, actual, "grad_norm") < 1e-3


def test_a_run_goes_on_from_the_host_with_the_hosts_losses(on_host, tmp_path):
    assert_alike(rows(on_host)[SAVED:], resumed(on_host, tmp_path / "gpu"))


def test_a_resumed_run_continues_bit_for_bit(on_gpu, tmp_path):
    again = resumed(on_gpu, tmp_path / "again")
    assert [deterministic(row) for row in again] == [deterministic(row) for row in rows(on_gpu)[SAVED:]]


@pytest.mark.parametrize(
    "changes",
    [("dispatcher.type=alltoall",), ("topology.nodes=2", "topology.ranks_per_node=2")],
    ids=["megatrons_dispatcher", "two_nodes"],
)
def test_the_loss_curve_is_that_of(on_gpu, tmp_path, changes):
    run(tmp_path / "run", "--steps", "10", *(word for change in changes for word in ("--set", change)))
    assert_alike(rows(on_gpu)[:10], rows(tmp_path / "run"))


def test_nothing_of_a_pass_that_a_rank_stalled_is_kept(tmp_path):
    """Two ranks, on two GPUs where there are two."""
    texts = training_runs.run_with_a_stalled_rank(ON_GPU, tmp_path / "run", "cuda", "prompt")
    training_runs.assert_nothing_was_kept(texts, tmp_path / "run")

"""Whole training runs, several processes each: what they leave behind, how they continue, and how they end."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import rank_processes
import shared_memory
import training_runs
from ports import free_port
from training_runs import deterministic, finish, kill_rank, rows, running, signal_rank, until_training
from waits import within

pytest.importorskip("megatron.core")

TINY = training_runs.RECIPES / "tiny_moe_cpu.yaml"
STEPS, SAVED = 25, 20
SOON = ("--set", "scheduler.lr_warmup_iters=5")  # a short run learns, too


def start(*arguments, **variables):
    return training_runs.start(TINY, *arguments, *SOON, **variables)


@pytest.fixture(scope="module")
def run():
    """run(OUT, ARGUMENT...) without a launcher, which other tests have."""

    def train(out, *arguments):
        return training_runs.run_forked(TINY, out, *arguments, *SOON, world=4)

    return train


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "ep"
    text = run(out, "--steps", str(STEPS), "--set", f"checkpoint.save_interval={SAVED}")
    return out, text


def test_a_run_learns_and_leaves_its_figures(trained):
    out, text = trained
    table = rows(out)
    assert [int(row["step"]) for row in table] == list(range(1, STEPS + 1))
    losses = [float(row["loss"]) for row in table]
    entropy = float(text.split("unigram entropy ")[1].split()[0])
    assert 5.2 < losses[0] < 6.2, "a fresh model knows nothing: ln 257 = 5.55, and what initialisation adds"
    assert sum(losses[-5:]) / 5 < entropy - 0.3 and 2.5 < entropy < 4
    for row in table:
        assert float(row["tokens_per_second"]) > 0
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step_00000020", "step_00000025"]
    assert "dispatcher ep" in text and "step 20/25" in text and "Traceback" not in text


def test_a_resumed_run_continues_bit_for_bit(trained, run, tmp_path):
    source, _ = trained
    out = tmp_path / "resumed"
    shutil.copytree(source, out)
    shutil.rmtree(out / "checkpoints" / f"step_{STEPS:08d}")
    (out / "checkpoints" / "step_00000099.partial").mkdir()  # a save that was interrupted
    text = run(out, "--steps", str(STEPS), "--resume", "--set", "checkpoint.save_interval=1000")
    assert f"resumed after step {SAVED}" in text
    assert [deterministic(row) for row in rows(out)] == [deterministic(row) for row in rows(source)]
    assert rows(out)[SAVED - 1] == rows(source)[SAVED - 1], "kept as they were"
    assert rows(out)[SAVED]["seconds"] != rows(source)[SAVED]["seconds"], "trained again"


@pytest.mark.nightly
def test_resuming_something_else_names_the_difference(trained):
    out, _ = trained
    process = start(out, "--resume", "--set", "train.seed=7", "--set", "topology.nodes=1")
    text = finish(process)
    assert process.returncode == 2, "the user's mistake, which only the ranks find"
    assert "train.seed was 1234, is 7" in text and "topology.nodes was 2, is 1" in text
    assert text.count("belongs to another run") == 1 and "Traceback" not in text and "failed" not in text
    assert len(rows(out)) == STEPS


@pytest.mark.nightly
def test_ctrl_c_ends_everything_quietly(tmp_path):
    out, before = tmp_path / "run", shared_memory.names()
    process = start(out, "--set", "topology.nodes=1")
    until_training(process, out)
    assert len(running(out)) == 3
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the launcher's group
    began = time.monotonic()
    text = finish(process)
    assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert text.count("SIGINT") == 1 and "Traceback" not in text
    assert not running(out)
    assert within(10, lambda: shared_memory.names() <= before), shared_memory.names() - before


@pytest.mark.nightly
def test_a_killed_rank_ends_all_and_is_named_once(tmp_path):
    out, before = tmp_path / "run", shared_memory.names()
    process = start(out, "--set", "topology.nodes=1")
    until_training(process, out)
    kill_rank(out, 1)
    began = time.monotonic()
    text = finish(process)
    assert time.monotonic() - began < 20
    assert process.returncode == 1
    assert "rank 1 failed: killed by SIGKILL" in text and text.count("failed") == 1 and "Traceback" not in text
    assert not running(out)
    assert within(10, lambda: shared_memory.names() <= before), shared_memory.names() - before


@pytest.mark.nightly
def test_ranks_end_with_a_killed_launcher(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--set", "topology.nodes=1")
    until_training(process, out)
    process.kill()
    process.wait(timeout=10)
    assert within(10, lambda: not running(out)), running(out)
    process.stdout.close()


@pytest.mark.nightly
def test_torchrun_restarts_from_the_checkpoint_with_the_same_losses(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    arguments = ["--steps", "12", "--set", "topology.nodes=1"]
    arguments += ["--set", "train.global_batch_size=8", "--set", "dataset.seq_length=32"]
    arguments += ["--set", "checkpoint.save_interval=4"]
    process = subprocess.Popen(
        [*command, "-m", "megatron_ep.cli.main", "train", str(TINY), "--out", str(out), *arguments],
        env=training_runs.clean_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until_training(process, out, steps=5)
    signal_rank(out, 1, signal.SIGSTOP)
    time.sleep(0.3)  # the other one waits for it, and its file is complete
    first = rows(out)
    signal_rank(out, 1, signal.SIGKILL)
    text = finish(process)
    assert process.returncode == 0, text
    saved = int(re.search(r"resumed after step (\d+)", text)[1])
    table = rows(out)
    assert [int(row["step"]) for row in table] == list(range(1, 13))
    assert saved % 4 == 0 and table[:saved] == first[:saved], "kept as they were"
    again, before = table[saved : len(first)], first[saved:]
    assert [deterministic(row) for row in again] == [deterministic(row) for row in before]
    assert all(mine["seconds"] != other["seconds"] for mine, other in zip(again, before, strict=True)), "trained again"


@pytest.mark.nightly
def test_slurm_tasks_find_each_other(trained, tmp_path):
    port = free_port()
    variables = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODELIST": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = ["-m", "megatron_ep.cli.main", "train", TINY, "--out", tmp_path]
    command += ["--steps", "2", "--set", "topology.nodes=1", "--set", "train.micro_batch_size=2", *SOON]
    environment = training_runs.clean_environment(**variables)
    tasks = rank_processes.run(
        command, [environment | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    )
    texts = [text for _, text in tasks]
    assert [status for status, _ in tasks] == [0, 0], texts
    # 2 ranks with 4 microbatches each see the batches that 4 ranks with one do; only the experts start differently.
    for row, wide in zip(rows(tmp_path), rows(trained[0])[:2], strict=True):
        assert float(row["loss"]) == pytest.approx(float(wide["loss"]), rel=0.02)
    assert "unigram entropy" in texts[0] and "unigram entropy" not in texts[1]

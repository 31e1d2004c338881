"""Whole training runs, several processes each, for the tests of what they leave behind and how they end."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import rank_processes
from rank_processes import Program

RECIPES = Path(__file__).parents[2] / "recipes"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LIMIT = 400  # seconds; a run takes about 25 on two idle cores


def clean_environment(**variables):
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHERS and not k.startswith(("SLURM_", "TORCHELASTIC_"))}
    return kept | variables


def start(recipe, out, *arguments, **variables):
    command = [sys.executable, "-m", "megatron_ep.cli.main", "train", str(recipe), "--out", str(out)]
    return subprocess.Popen(
        [*command, *arguments],
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    try:
        text, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return text


def run(recipe, out, *arguments):
    process = start(recipe, out, *arguments)
    text = finish(process)
    assert process.returncode == 0, text
    return text


def run_forked(recipe, out, *arguments, world):
    """The same without the launcher; what rank 0 prints."""
    command = ["-m", "megatron_ep.cli.main", "train", recipe, "--out", out]
    ranks = rank_processes.run_ranks([*command, *arguments], world)
    assert [status for status, _ in ranks] == [0] * world, "\n".join(text for _, text in ranks)
    return ranks[0][1]


def rows(out):
    with open(out / "loss.csv", newline="") as file:
        return list(csv.DictReader(file))


def deterministic(row):
    return {key: row[key] for key in ("step", "loss", "lr", "grad_norm")}


def until_training(process, out, limit=200, steps=2):
    deadline = time.monotonic() + limit
    while not (out / "loss.csv").exists() or len((out / "loss.csv").read_text().splitlines()) <= steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step within the time"
        time.sleep(0.05)


def running(out):
    """Processes of the run that writes to `out`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(out).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def signal_rank(out, rank, number):
    victim = next(pid for pid in running(out) if b"RANK=%d\0" % rank in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, number)


def kill_rank(out, rank):
    signal_rank(out, rank, signal.SIGKILL)


def run_with_a_stalled_rank(recipe, out, device, lateness):
    """What the two ranks of stalled_rank.py printed."""
    arguments = [Path(__file__).parent / "stalled_rank.py", recipe, out, device, lateness]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    ranks = [Program(arguments, clean_environment(**place, **hidden)) for place in rank_processes.job(2)]
    try:
        return ["".join(rank.communicate(LIMIT)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def assert_nothing_was_kept(texts, out):
    """All ranks ended with the named error, before a step or a checkpoint took what the failed pass had left."""
    first, second = texts
    assert "\nEPTimeoutError: rank 0 timed out first, after 2 s" in first, first
    assert any(f"\n{name}: rank 0 timed out first" in f"\n{second}" for name in ("EPTimeoutError", "EPAbortError")), (
        second
    )
    for text in texts:
        assert "2 steps, parameters unchanged" in text, text
    saved = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert saved == ["step_00000001", "step_00000002"]

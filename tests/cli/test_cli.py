import importlib.metadata
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ep import _C
from megatron_ep.cli import main as cli
from megatron_ep.fabrics import gpu
from megatron_ep.meeting import job
from megatron_ep.training import launcher

TINY = str(Path(__file__).parents[2] / "recipes" / "tiny_moe_cpu.yaml")
ON_GPU = str(Path(__file__).parents[2] / "recipes" / "tiny_moe_gpu.yaml")


@pytest.fixture(autouse=True)
def by_hand(monkeypatch, tmp_path):
    """No launcher's variables, and a launcher that would be noticed."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    launches = []
    monkeypatch.setattr(launcher, "launch", lambda *args, **kwargs: launches.append((args, kwargs)))
    monkeypatch.chdir(tmp_path)
    return launches


def test_help_names_the_commands(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("train", "check", "bench", "env"))


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-ep {importlib.metadata.version('megatron_ep')}\n"


def test_no_command_is_a_mistake(capsys):
    assert cli.main([]) == 2
    assert cli.main(["trian"]) == 2
    assert "'trian'" in capsys.readouterr().err


def test_train_help_tells_every_option(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("RECIPE", "--steps", "--data", "--out", "--resume", "--set", "example:"))


def test_train_starts_the_ranks_of_the_recipe(by_hand, tmp_path):
    assert cli.main(["train", TINY, "--out", "here", "--steps", "3", "--set", "train.seed=5"]) == 0
    [((world_size, arguments), options)] = by_hand
    assert world_size == 4
    assert arguments[:3] == ["train", TINY, "--out"] and arguments[-2:] == ["--out", str(tmp_path / "here")]
    assert options["log_dir"] == tmp_path / "here" / "logs"


@pytest.mark.skipif(hasattr(_C, "cuda_launcher") and torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_recipe_without_a_gpu_starts_nothing(by_hand, capsys):
    assert cli.main(["train", ON_GPU]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "train.device: device is 'cuda', but" in line and not by_hand


@pytest.mark.parametrize(
    ("gpus", "ranks", "num_sms", "most"), [(1, 4, 33, None), (1, 4, 34, 33), (1, 8, "null", 16), (2, 8, "null", None)]
)
def test_ranks_that_share_a_gpu_share_its_sms(by_hand, capsys, monkeypatch, gpus, ranks, num_sms, most):
    monkeypatch.setattr(gpu, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    overrides = [f"topology.ranks_per_node={ranks}", "train.micro_batch_size=1", f"dispatcher.num_sms={num_sms}"]
    status = cli.main(["train", ON_GPU, *(word for override in overrides for word in ("--set", override))])
    assert (status, len(by_hand)) == ((0, 1) if most is None else (2, 0))
    if most is not None:
        message = capsys.readouterr().err
        assert f"dispatcher.num_sms is {'24 by default' if num_sms == 'null' else num_sms}" in message
        assert f"must be at most {most} for {ranks} ranks on a GPU of 132 SMs" in message


def test_bench_names_its_benchmarks(capsys):
    assert cli.main(["bench", "nosuch"]) == 2
    assert "no benchmark 'nosuch'; there are gpus, low-latency" in capsys.readouterr().err


def test_runs_without_out_get_a_directory_each(by_hand, tmp_path):
    cli.main(["train", TINY])
    [((_, arguments), _)] = by_hand
    assert Path(arguments[-1]).parent == tmp_path / "runs" and Path(arguments[-1]).name.startswith("tiny_moe_cpu-")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.yaml"], ["none.yaml", "No such file", "none of deepseek_v3, ", " tiny_moe_cpu"]),
        ([TINY, "--set", "train.sead=1"], ["train.sead", "did you mean seed?"]),
        ([TINY, "--steps", "0"], ["train.train_iters", "0"]),
        ([TINY, "--data", "nothing.txt"], ["--data", "nothing.txt"]),
        ([TINY, "--resume"], ["--resume", "--out"]),
        ([TINY, "--resume", "--out", "empty"], ["--resume", "no checkpoint"]),
        ([TINY, "--out", "used"], ["used", "--resume continues it"]),
        ([TINY, "--out", "/dev/null/here"], ["--out /dev/null/here", "Not a directory"]),
        ([TINY, "--data", "used"], ["--data", "no readable file"]),
    ],
)
def test_mistakes_are_told_before_anything_starts(by_hand, tmp_path, capsys, arguments, words):
    (tmp_path / "used" / "checkpoints" / "step_00000005").mkdir(parents=True)
    (tmp_path / "empty" / "checkpoints" / "step_00000005.partial").mkdir(parents=True)
    assert cli.main(["train", *arguments]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words) and "Traceback" not in text
    assert not by_hand


def test_what_training_needs_is_named(by_hand, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "yaml" else find_spec(name))
    assert cli.main(["train", TINY]) == 2
    assert "needs yaml: pip install 'megatron_ep[megatron,train]'" in capsys.readouterr().err and not by_hand


def test_a_rank_in_a_world_of_the_wrong_size(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert cli.main(["train", TINY, "--out", "here"]) == 2
    assert "WORLD_SIZE is 3" in (text := capsys.readouterr().err) and "2 x 2 = 4" in text
    assert cli.main(["train", TINY]) == 2
    assert "--out" in capsys.readouterr().err


def test_launch_failures_and_signals_become_exit_codes(monkeypatch, capsys):
    def failing(error):
        def launch(*_, **__):
            raise error

        return launch

    monkeypatch.setattr(launcher, "launch", failing(launcher.LaunchError("rank 2 failed: ZeroDivisionError", 1)))
    assert cli.main(["train", TINY]) == 1
    monkeypatch.setattr(launcher, "launch", failing(launcher.LaunchError("--resume: wrong", launcher.MISTAKE)))
    assert cli.main(["train", TINY]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-2:] == ["megatron-ep: rank 2 failed: ZeroDivisionError", "megatron-ep: --resume: wrong"]
    monkeypatch.setattr(launcher, "launch", failing(launcher.LaunchError("stopped by SIGTERM", 143)))
    assert cli.main(["train", TINY]) == 143
    monkeypatch.setattr(launcher, "launch", failing(KeyboardInterrupt()))
    assert cli.main(["train", TINY]) == 130
    text = capsys.readouterr().err
    assert "SIGTERM" in text and "interrupted" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("localhost", "localhost"),
        ("gpu7,gpu9", "gpu7"),
        ("gpu[007-009,12],login", "gpu007"),
        ("gpu[12,14-15]", "gpu12"),
        ("rack3-n[1-4]-ib", "rack3-n1-ib"),
        ("a-b.example.org", "a-b.example.org"),
    ],
)
def test_first_host_of_a_slurm_list(nodelist, host):
    assert job.first_host(nodelist) == host


def test_who_is_a_rank():
    assert not job.adopt({})
    assert job.adopt({"RANK": "0", "WORLD_SIZE": "1"})
    assert not job.adopt({"WORLD_SIZE": "4"})
    assert not job.adopt({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert not job.adopt({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}), "a batch script is no task"
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        job.adopt({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"})


def test_slurm_variables_become_torchs():
    task = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    env = task | {"SLURM_NODELIST": "n[03-04]"}
    assert job.adopt(env)
    assert {k: v for k, v in env.items() if not k.startswith("SLURM")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "n03",
        "MASTER_PORT": str(20000 + 123456 % 20000),
    }
    chosen = task | {"MASTER_ADDR": "head", "MASTER_PORT": "9"}
    assert job.adopt(chosen)
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("head", "9")

"""`megatron-ep env --all-ranks`: in what the ranks of a job differ, before hours are spent."""

import copy
import os
import threading
from datetime import timedelta
from unittest import mock

import pytest
import rank_processes
import torch.distributed as dist
import training_runs
from ports import free_port
from waits import within

from megatron_ep.cli import env as all_ranks
from megatron_ep.cli import main as cli
from megatron_ep.diagnosis import env
from megatron_ep.meeting import job

GPU = "NVIDIA H200, 143771 MiB, 580.65, 9.0"


@pytest.fixture(scope="module")
def report():
    with mock.patch.object(env, "_run", lambda *_, **__: (1, "")):  # what it asks other programs takes seconds
        made = env.collect()
    made["extension"]["imports"] = True
    made["cuda"]["gpus"] = [f"{index}, {GPU}" for index in range(8)]
    made["environment"] = {"RANK": "0"}
    return made


def changed(report, host, **facts):
    """facts: section__name=value"""
    other = copy.deepcopy(report)
    other["system"]["host"] = host
    for name, value in facts.items():
        section, _, key = name.partition("__")
        other[section][key] = value
    return other


def compared(*reports):
    return all_ranks.compare(dict(enumerate(reports)), len(reports), 5)


def test_equal_ranks(report):
    text, status = compared(*(changed(report, host, environment__RANK=host) for host in ("a", "a", "b", "b")))
    assert status == 0
    assert text.startswith("4 ranks on 2 hosts:\n  a  ranks 0-1\n  b  ranks 2-3\n\nequal on all ranks:\n")
    assert f"  gpus: 8 x {GPU}\n" in text and "differs" not in text and "RANK" not in text
    assert f"  torch: {report['packages']['torch']}\n" in text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"packages__torch": "1.0"}, "torch:\n    ranks 0-1, 3: {torch}\n    rank 2: 1.0\n"),
        ({"system__python": "3.9.1 (/usr/bin/python)"}, "rank 2: 3.9.1\n"),
        (
            {"system__network cards": ["mlx5_0 port 1: 28.4, Ethernet, 4: ACTIVE, 100 Gb/sec"]},
            "rank 2: mlx5_0 port 1: 28",
        ),
        ({"cuda__gpus": [f"0, {GPU}"]}, f"gpus:\n    ranks 0-1, 3: 8 x {GPU}\n    rank 2: 1 x {GPU}\n"),
        ({"cuda__fabrics": {"nccl": "loads"}}, "fabrics nccl:\n"),
        ({"extension__imports": False}, "imports:\n    ranks 0-1, 3: yes\n    rank 2: no\n"),
        (
            {"environment__MEGATRON_EP_TIMEOUT": "5"},
            "$MEGATRON_EP_TIMEOUT:\n    ranks 0-1, 3: not set\n    rank 2: 5\n",
        ),
    ],
)
def test_what_matters_is_named_and_fails(report, facts, words):
    same = changed(report, "a")
    text, status = compared(same, same, changed(report, "b", **facts), same)
    assert status == 1
    assert words.format(torch=report["packages"]["torch"]) in text.split("differs, and must not:\n")[1]


def test_what_may_be_meant_is_told_and_does_not_fail(report):
    text, status = compared(report, changed(report, "b", system__cpu="another", environment__NCCL_DEBUG="INFO"))
    assert status == 0
    told = text.split("differs, which may be meant:\n")[1].split("equal on all ranks")[0]
    assert "rank 1: another" in told and "$NCCL_DEBUG:\n    rank 0: not set\n    rank 1: INFO" in told


def test_a_rank_that_does_not_report_is_named(report):
    text, status = all_ranks.compare({0: report, 3: report}, 4, 5)
    assert status == 1 and "did not report within 5 s: ranks 1-2\n" in text


def test_nobody_waits_for_ever(report):
    store, results = dist.HashStore(), {}

    def run(rank):
        results[rank] = all_ranks.exchange(store, rank, 3, report, timedelta(seconds=0.5))

    other = threading.Thread(target=run, args=(2,))
    other.start()
    assert within(20, lambda: store.check(["report 2"]))
    run(0)
    other.join(timeout=20)
    assert results[0] == results[2] and results[0][1] == 1
    assert "did not report within 0.5 s: rank 1\n" in results[0][0]


def test_a_store_that_does_not_answer_is_given_up(report, monkeypatch, capsys):
    answers = threading.Event()
    silent = mock.Mock(set=lambda *_: answers.wait(60))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(job, "store_of_ranks", lambda _: (silent, 1, 2))
    monkeypatch.setattr(dist, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(all_ranks, "LIMIT_S", 0.2)
    monkeypatch.setattr(env, "collect", lambda: report)
    assert all_ranks._compare_all() == 1
    answers.set()
    assert "rank 1 lost the others: the store of torch.distributed did not answer" in capsys.readouterr().err


@pytest.mark.parametrize("told", ["{not JSON", "[]", '{"system": 1}', '{"system": {}}', "1" * 5000])
def test_a_report_that_no_rank_has_told(report, told):
    store = dist.HashStore()
    store.set("report 1", told)
    with pytest.raises(RuntimeError, match="holds at key 'report 1' a value that no rank has written"):
        all_ranks.exchange(store, 0, 2, report, timedelta(seconds=5))


@pytest.mark.parametrize("told", ["{not JSON", '["text", "0"]', "[]"])
def test_a_verdict_that_no_rank_has_told(report, told):
    store = dist.HashStore()
    store.set("comparison", told)
    with pytest.raises(RuntimeError, match="holds at key 'comparison' a value that no rank has written"):
        all_ranks.exchange(store, 1, 2, report, timedelta(seconds=5))


def test_network_cards(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", "InfiniBand\n"), ("state", "4: ACTIVE\n"), ("rate", "400 Gb/sec (4X NDR)\n")):
        (port / name).write_text(text)
    assert env._cards(tmp_path) == ["mlx5_0 port 1: -, InfiniBand, 4: ACTIVE, 400 Gb/sec (4X NDR)"]
    assert env._cards(tmp_path / "none") == ["none"]


def test_ranks_of_a_launcher(tmp_path):
    port = free_port()
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODELIST": "localhost", "MASTER_PORT": str(port)}
    tasks = training_runs.clean_environment(**slurm)
    own = [{"SLURM_PROCID": str(rank), "MEGATRON_EP_TIMEOUT": str(5 + rank)} for rank in range(2)]
    ends = rank_processes.run(
        ["-m", "megatron_ep.cli.main", "env", "--all-ranks"], [tasks | variables for variables in own]
    )
    statuses, texts = zip(*ends, strict=True)
    assert statuses == (1, 1), texts
    assert "$MEGATRON_EP_TIMEOUT:\n    rank 0: 5\n    rank 1: 6\n" in texts[0] and texts[1] == ""


def test_without_a_launcher(capsys, monkeypatch):
    for name in [*training_runs.LAUNCHERS, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["env", "--all-ranks"]) == 2
    assert "start it under torchrun or srun" in capsys.readouterr().err

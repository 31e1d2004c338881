"""What a resumed run reads back."""

import os
import resource
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("pydantic")

import torch
import torch.distributed as dist
import training_runs
from run_on import run_on

from megatron_ep.training import checkpoint, loop, recipe
from megatron_ep.training import log as train_log

TINY = training_runs.RECIPES / "tiny_moe_cpu.yaml"


def row(step, **figures):
    given = {"loss": 5.5, "tokens_per_second": 9.0, "lr": 1e-3, "grad_norm": 1.0}
    return train_log.Row(step=step, **{**given, "seconds": 2.0, "memory_gib": 1.5, **figures})


def test_the_line_has_a_runs_figures(tmp_path, capsys):
    with train_log.TrainLog(tmp_path, recipe.load(TINY, ["logger.log_interval=1"]), Corpus, 10, 0) as log:
        log.write(row(1), lambda: "  more")
    assert "  loss 5.5000  9 tokens/s  1.5 GiB  lr 1.00e-03  more\n" in capsys.readouterr().out


def test_the_slowest_peer_is_that_since_the_last_time(monkeypatch):
    counts = [None, [0, 0, 0], [0, 30, 10], [0, 30, 70]]
    monkeypatch.setattr(
        "megatron_ep.megatron.shared_buffers.wait_ns", lambda: None if counts[0] is None else torch.tensor(counts[0])
    )
    slowest = loop._SlowestPeer()
    says = []
    while counts:
        says.append(slowest())
        counts.pop(0)
    assert says == [
        "",
        "",
        *(f"  {share}% of this rank's waiting was for rank {rank}" for share, rank in ((75, 1), (100, 2))),
    ]


def test_a_row_that_was_cut_short_is_left_out(tmp_path) -> None:
    path = tmp_path / "loss.csv"
    first = row(1)
    names = list(vars(first))
    path.write_text("\n".join([",".join(names), ",".join(str(getattr(first, name)) for name in names), "2,5.4"]))
    assert train_log._read(path) == [first]
    path.write_text("\n".join([",".join(names[:5]), ",".join(str(getattr(first, name)) for name in names[:5])]))
    (older,) = train_log._read(path)
    assert older.loss == 5.5 and older.memory_gib != older.memory_gib, "what an earlier version did not write"
    assert train_log._read(tmp_path / "none.csv") == []


class Corpus:
    name, documents, tokens, unigram_entropy = "text", 1, range(1000), 3.5


def test_a_full_disk_is_named(tmp_path):
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/loss.csv'"),
        train_log.TrainLog(tmp_path, recipe.load(TINY, []), Corpus, 10, 0) as log,
    ):
        os.dup2(full := os.open("/dev/full", os.O_WRONLY), log._file.fileno())
        os.close(full)
        log.write(row(1), lambda: "")


@pytest.mark.parametrize("kilobytes", [0, 300])
@run_on("four_ranks")
def test_a_checkpoint_that_one_rank_cannot_write_leaves_nothing(tmp_path, kilobytes):
    rank, states = dist.get_rank(), {"state_dict": lambda: {"weights": torch.zeros(1 << 16)}}
    checkpoints = object.__new__(checkpoint.Checkpoints)
    checkpoints._directory, checkpoints._rank, checkpoints._on_gpu, checkpoints._origin = tmp_path, rank, False, {}
    checkpoints._model = SimpleNamespace(module=SimpleNamespace(**states))
    checkpoints._optimizer = checkpoints._scheduler = SimpleNamespace(**states)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes << 10, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/step_00000003.partial'"):
            checkpoints.save(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    assert not list(tmp_path.iterdir())
    dist.barrier()
    checkpoints.save(3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]

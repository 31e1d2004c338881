"""tests/conformance/test_one_rank.py on GPUs: processes that share one through CUDA IPC, whose kernels take turns."""

import re
import threading
import time

import comebacks
import one_rank
import pytest
import survivors
import torch
import torch.distributed as dist
from modes import GPU, MODES, Normal
from run_on import run_on
from waits import patience

import megatron_ep as ep

W = 4


@pytest.mark.parametrize(("mode", "nodes"), [("normal", 1), ("normal", 2), ("normal", 4), ("low latency", 1)])
def test_topologies(ranks, mode, nodes):
    ranks.run(one_rank.run_topology, mode, GPU, nodes)


@pytest.mark.parametrize(
    ("mode", "phase", "nodes"), [("normal", "dispatch", 1), ("normal", "combine", 2), ("low latency", "dispatch", 1)]
)
def test_an_absent_rank_is_named(ranks, mode, phase, nodes):
    messages = ranks.run(one_rank.run_one_absent, mode, GPU, phase, nodes)
    role, says = MODES[mode].absent[phase]
    assert phase == "combine" or any(role in m and "from rank 3: seen" in m for m in messages), messages
    says = says.replace("call", "(call|notify)")  # what some of them wait in
    assert all(re.search(rf": rank 3 {says}\n", m) for m in messages[:3]), messages


def test_a_mistake_on_one_rank_reaches_all(ranks):
    ranks.run(one_rank.run_one_mistake, "normal", GPU, "dtype", 2)


@pytest.mark.parametrize("check", [survivors.check_killed, survivors.check_interrupted])
@pytest.mark.parametrize("mode", MODES)
def test_survivors(tmp_path, mode, check):
    check(tmp_path, mode, GPU)
    started = time.monotonic()
    assert torch.ones(1 << 20, device="cuda").sum().item() == 1 << 20
    assert time.monotonic() - started < 5, "a kernel of theirs still holds the GPU"


def spread_out(function, *arguments):
    """Each rank on a GPU of its own."""
    torch.cuda.set_device(dist.get_rank())
    try:
        return function(*arguments)
    finally:
        torch.cuda.set_device(0)


@pytest.mark.parametrize("spread", [False, True])
def test_a_late_rank_is_masked(ranks, spread):
    if spread and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    run = (spread_out, one_rank.run_one_masked) if spread else (one_rank.run_one_masked,)
    mask_s = patience(0.5)
    took = ranks.run(*run, GPU, 1, mask_s)
    assert mask_s < max(took[:3]) < 5 * mask_s and took[3] < 8 * mask_s, took


def test_a_rank_that_stays_away_from_the_backward_pass(ranks):
    messages = ranks.run(one_rank.run_one_masked_in_backward, GPU, 1, patience(0.5))
    said = re.compile(r"^rank [023] met rank 1 in a backward pass, masked since its forward pass\n")
    assert all(said.search(messages[rank]) for rank in (0, 2, 3)), messages


def test_ranks_come_back(tmp_path):
    """Killed, masked, started again: graphs that were captured before reach the new processes. With several GPUs the
    memory of another GPU has gone, too."""
    comebacks.check_comebacks(tmp_path, nodes=1, killed=(1,), device="cuda", patience=90)


def run_one_late():
    calls = Normal(GPU, 1, 10.0)
    buffer, own = calls.buffer, calls.own()
    for _ in range(2):  # kernels are loaded in the first round
        buffer.synchronize()
        torch.distributed.barrier()
        if calls.rank == 1:
            time.sleep(0.5)
        calls.dispatch(*own)
    buffer.synchronize()
    statistics = {name: part[0].tolist() for name, part in buffer.statistics().items()}
    torch.distributed.barrier()
    buffer.close()
    return statistics


def test_a_late_rank_is_seen(ranks):
    for rank, statistics in enumerate(ranks.run(run_one_late)):
        last, total = statistics["last_wait_ns"], statistics["wait_ns"]
        assert last[rank] == 0 and all(a <= b for a, b in zip(last, total, strict=True)), statistics
        if rank != 1:
            assert last.index(max(last)) == 1 and last[1] > 0.3e9, statistics


@run_on("ranks")
def test_the_reason_of_an_abort_reaches_all():
    calls = Normal(GPU, 2, 30.0)
    if calls.rank == 0:
        threading.Timer(1.0, ep.abort_all, ["the job restarts"]).start()
    if calls.rank != 3:
        with pytest.raises(ep.EPAbortError, match="rank 0 was told to stop: the job restarts"):
            calls.dispatch(*calls.own())
    torch.distributed.barrier()  # who closes a buffer ends the calls that wait for it, by another reason
    calls.buffer.close()

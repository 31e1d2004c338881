"""Processes that share one GPU through CUDA IPC. Their kernels take turns on it, so these cases are small."""

import threading
import time

import pytest
import torch

import megatron_ep as ep
from megatron_ep import reference

W = 4
TOKENS = (5, 0, 17, 64)  # of each rank
TIMEOUT = 10.0


def make_buffer(nodes, timeout=TIMEOUT, world=W, **settings):
    settings = {"num_sms": 2, **settings}
    config = ep.Config(num_experts=8, timeout=timeout, **settings)
    return ep.Buffer(None, config, ep.Topology(nodes, world // nodes), device="cuda")


def inputs(topk, hidden=520, world=W):
    generator = torch.Generator().manual_seed(topk)
    ids = [torch.rand(t, 8, generator=generator).topk(topk, dim=1).indices for t in TOKENS[:world]]
    x = [torch.randint(-8, 9, (t, hidden), generator=generator).float() for t in TOKENS[:world]]
    weights = [torch.rand(t, topk, generator=generator) for t in TOKENS[:world]]
    return x, ids, weights


def round_trips(buffer, rounds=2):
    rank = buffer.rank
    for topk in range(1, rounds + 1):
        x, ids, weights = inputs(topk, world=buffer.topology.world_size)
        leaf = x[rank].cuda().requires_grad_()
        rows = ep.dispatch(leaf, ids[rank].cuda(), weights[rank].cuda(), buffer=buffer)
        expected, probs, counts = reference.dispatch(x, ids, weights, 8)
        assert torch.equal(rows.x.cpu(), expected[rank]) and torch.equal(rows.probs.cpu(), probs[rank])
        assert torch.equal(rows.tokens_per_expert, counts[rank])
        y = ep.combine(rows.x, rows.handle)
        assert torch.equal(y, topk * leaf)
        y.sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, topk))
    buffer.synchronize()


def run_one_late():
    buffer = make_buffer(1)
    x, ids, weights = (part[buffer.rank].cuda() for part in inputs(2))
    for _ in range(2):  # kernels are loaded in the first round
        buffer.synchronize()
        torch.distributed.barrier()
        if buffer.rank == 1:
            time.sleep(0.5)
        ep.dispatch(x, ids, weights, buffer=buffer)
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


def run_one_told_to_stop():
    buffer = make_buffer(2, timeout=30.0)
    x, ids, weights = (part[buffer.rank].cuda() for part in inputs(2))
    if buffer.rank == 0:
        threading.Timer(1.0, ep.abort_all, ["the job restarts"]).start()
    if buffer.rank != 3:
        with pytest.raises(ep.EPAbortError, match="rank 0 was told to stop: the job restarts"):
            ep.dispatch(x, ids, weights, buffer=buffer)
    buffer.close()


def test_the_reason_of_an_abort_reaches_all(ranks):
    ranks.run(run_one_told_to_stop)

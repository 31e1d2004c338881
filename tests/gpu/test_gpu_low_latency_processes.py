"""The low-latency mode between processes, through CUDA IPC: on one GPU, or a GPU for each."""

import time

import pytest
import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import reference

W, E, K, H, MAX = 4, 8, 3, 520, 40


def make(spread, timeout=10.0):
    torch.cuda.set_device(dist.get_rank() if spread else 0)
    buffer = ep.Buffer(None, ep.Config(num_experts=E, timeout=timeout, num_sms=2), device="cuda")
    return buffer, ep.LowLatency(buffer, max_tokens=MAX, hidden=H, topk=K)


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = [5, 0, 17, MAX]
    ids = [torch.rand(t, E, generator=generator).topk(K, dim=1).indices for t in tokens]
    return [torch.randint(-8, 9, (t, H), generator=generator).bfloat16() for t in tokens], ids


def round_trips(low_latency, rounds=6):
    rank = low_latency.buffer.rank
    for seed in range(rounds):
        x, ids = inputs(seed)
        own = x[rank].cuda()
        received = low_latency.dispatch(own, ids[rank].cuda())
        expected, _, counts = reference.dispatch(x, ids, [torch.ones(i.shape) for i in ids], E)
        assert torch.equal(received.recv_counts.cpu(), counts[rank].int())
        rows = torch.cat([part[:count] for part, count in zip(received.x.cpu(), counts[rank], strict=True)])
        assert torch.equal(rows, expected[rank])
        assert torch.equal(low_latency.combine(received.x, received.handle), 3 * own)
    low_latency.buffer.synchronize()


def run_storm(spread, rounds):
    """Every token goes to all ranks, in lines whose every byte changes with every round."""
    torch.cuda.set_device(dist.get_rank() if spread else 0)
    tokens, hidden, local_experts = 64, 7168, E // W
    generator = torch.Generator("cuda").manual_seed(1)
    bits = torch.randint(-(1 << 15), 1 << 15, (W, tokens, hidden), generator=generator, device="cuda").short()
    ids = torch.arange(0, E, local_experts, device="cuda").expand(tokens, W).contiguous()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with ep.Buffer(None, ep.Config(num_experts=E, timeout=20, num_sms=16), device="cuda") as buffer:
        low_latency = ep.LowLatency(buffer, max_tokens=tokens, hidden=hidden, topk=W)
        for round in range(rounds):
            sent = bits + 257 * round
            received = low_latency.dispatch(sent[buffer.rank].view(torch.bfloat16), ids)
            wrong += (received.x[0].view(torch.int16) != sent.flatten(0, 1)).sum()
        buffer.synchronize()
    assert not wrong.item()


@pytest.mark.parametrize(("spread", "rounds"), [(False, 100), (True, 3000)])
def test_no_line_is_torn_or_stale(ranks, spread, rounds):
    if spread and torch.cuda.device_count() < W:
        pytest.skip(f"needs {W} GPUs")
    ranks.run(run_storm, spread, rounds)


def run_beside_nccl():
    """NCCL's kernels and ours on two streams, in another order on every rank: nobody waits in a circle."""
    buffer, low_latency = make(True, timeout=20.0)
    nccl = dist.new_group(backend="nccl")
    rank, side = buffer.rank, torch.cuda.Stream()
    x, ids = (part[rank].cuda() for part in inputs(1))
    big = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(big.clone(), group=nccl)  # the first one makes NCCL's connections, and waits for the GPU
    torch.cuda.synchronize()
    with buffer:
        for round in range(10):

            def reduce():
                with torch.cuda.stream(side):
                    dist.all_reduce(big, group=nccl)

            if (rank + round) % 2:
                reduce()
            received = low_latency.dispatch(x, ids)
            y = low_latency.combine(received.x, received.handle)
            if not (rank + round) % 2:
                reduce()
            assert torch.equal(y, 3 * x)
        torch.cuda.synchronize()
        buffer.synchronize()


def test_beside_nccl(ranks):
    if torch.cuda.device_count() < W:
        pytest.skip(f"needs {W} GPUs")
    ranks.run(run_beside_nccl)


def run_counting():
    """Rank 3 comes late: all others wait for it, in both kinds of call."""
    buffer, low_latency = make(False)
    rank, late = buffer.rank, 3
    with buffer:
        round_trips(low_latency, rounds=1)
        x, ids = inputs(1)
        counters = [torch.zeros(W, dtype=torch.int64, device="cuda") for _ in range(3)]
        rows, dispatch_ns, combine_ns = counters
        own = x[rank].cuda(), ids[rank].cuda()
        for calls in (1, 2):
            dist.barrier()
            if rank == late:
                time.sleep(0.5)
            received = low_latency.dispatch(*own, recv_rows=rows, recv_wait_ns=dispatch_ns)
            low_latency.combine(received.x, received.handle, recv_wait_ns=combine_ns)
            buffer.synchronize()
            here = torch.tensor([int((idx // (E // W) == rank).any(dim=1).sum()) for idx in ids])
            assert torch.equal(rows.cpu(), calls * here)
            assert dispatch_ns[rank] == 0 and (combine_ns >= 0).all()
            if rank != late:
                assert dispatch_ns.argmax() == late and dispatch_ns[late] >= calls * 0.4e9, dispatch_ns


def test_rows_and_waits_are_counted_by_rank(ranks):
    ranks.run(run_counting)

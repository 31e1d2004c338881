"""The low-latency mode between processes, through CUDA IPC: on one GPU, or a GPU for each."""

import time

import pytest
import torch
import torch.distributed as dist
from modes import GPU, LowLatency
from run_on import run_on

import megatron_ep as ep

W, E = 4, 8
NEEDS_FOUR = pytest.mark.skipif(torch.cuda.device_count() < W, reason=f"needs {W} GPUs")


@pytest.mark.parametrize(("spread", "rounds"), [(False, 100), pytest.param(True, 3000, marks=NEEDS_FOUR)])
@run_on("ranks")
def test_no_line_is_torn_or_stale(spread, rounds):
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


@NEEDS_FOUR
@run_on("ranks")
def test_beside_nccl():
    """NCCL's kernels and ours on two streams, in another order on every rank: nobody waits in a circle."""
    torch.cuda.set_device(dist.get_rank())
    calls = LowLatency(GPU, 1, 20.0)
    nccl = dist.new_group(backend="nccl")
    side, own = torch.cuda.Stream(), calls.own(3)
    big = torch.ones(1 << 24, device="cuda")
    dist.all_reduce(big.clone(), group=nccl)  # the first one makes NCCL's connections, and waits for the GPU
    torch.cuda.synchronize()
    with calls.buffer:
        for round in range(10):

            def reduce():
                with torch.cuda.stream(side):
                    dist.all_reduce(big, group=nccl)

            if (calls.rank + round) % 2:
                reduce()
            y = calls.combine(calls.dispatch(*own))
            if not (calls.rank + round) % 2:
                reduce()
            assert torch.equal(y, 3 * own[0])
        torch.cuda.synchronize()
        calls.buffer.synchronize()


@run_on("ranks")
def test_rows_and_waits_are_counted_by_rank():
    """Rank 3 comes late: all others wait for it, in both kinds of call."""
    calls, late = LowLatency(GPU, 1, 10.0), 3
    with calls.buffer as buffer:
        calls.round_trips()
        (x, ids, _), (_, all_ids, _) = calls.own(3), calls.inputs(3)
        rows, dispatch_ns, combine_ns = (torch.zeros(W, dtype=torch.int64, device="cuda") for _ in range(3))
        for number in (1, 2):
            dist.barrier()
            if calls.rank == late:
                time.sleep(0.5)
            received = calls.mode.dispatch(x, ids, recv_rows=rows, recv_wait_ns=dispatch_ns)
            calls.mode.combine(received.x, received.handle, recv_wait_ns=combine_ns)
            buffer.synchronize()
            here = torch.tensor([int((idx // (E // W) == calls.rank).any(dim=1).sum()) for idx in all_ids])
            assert torch.equal(rows.cpu(), number * here)
            assert dispatch_ns[calls.rank] == 0 and (combine_ns >= 0).all()
            if calls.rank != late:
                assert dispatch_ns.argmax() == late and dispatch_ns[late] >= number * 0.4e9, dispatch_ns

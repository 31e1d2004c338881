"""Masked ranks in the low-latency mode on GPUs: in graphs, and when processes are late or killed."""

import re
import time

import comebacks
import pytest
import survivors
import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.tools.local_ranks import LocalRanks

W, E, K, H, MAX = 4, 8, 3, 520, 40


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = [5, 0, 17, MAX]
    ids = [torch.rand(t, E, generator=generator).topk(K, dim=1).indices for t in tokens]
    return [torch.randint(-8, 9, (t, H), generator=generator).bfloat16() for t in tokens], ids


def test_in_a_graph():
    """Who is masked between two replays is left out by the second."""
    with ep.LocalCluster(1, W, ep.Config(num_experts=E, timeout=10), device="cuda") as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=MAX, hidden=H, topk=K, on_dead_rank="mask")
        x, ids = ([tensor.cuda() for tensor in tensors] for tensors in inputs(0))

        def step():
            received = low_latency.dispatch(x, ids)
            return low_latency.combine(received.x, received.handle)

        with torch.no_grad():
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                step()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = step()
        for masked in ((), ((0, 1),), ((0, 1), (3, 2))):
            for rank, other in masked:
                low_latency.active_ranks[rank][other] = 0
            for _ in range(2):
                graph.replay()
            active = torch.ones(W, W, dtype=torch.int32)
            for rank, other in masked:
                active[rank, other] = 0
            kept = reference.without_masked([idx.cpu() for idx in ids], list(active), E)
            for rank in range(W):
                choices = (kept[rank] >= 0).sum(dim=1, keepdim=True)
                assert torch.equal(y[rank].cpu(), choices * x[rank].cpu())
        cluster.synchronize()


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 120) as ranks:
        yield ranks


def make(spread):
    torch.cuda.set_device(dist.get_rank() if spread else 0)
    buffer = ep.Buffer(None, ep.Config(num_experts=E, timeout=30.0, num_sms=2), device="cuda")
    options = {"on_dead_rank": "mask", "mask_timeout": 0.5}
    return buffer, ep.LowLatency(buffer, max_tokens=MAX, hidden=H, topk=K, **options)


def trip(low_latency, seed, active):
    rank = low_latency.buffer.rank
    x, ids = inputs(seed)
    kept = reference.without_masked(ids, active, E)
    own = x[rank].cuda()
    received = low_latency.dispatch(own, ids[rank].cuda())
    expected, _, counts = reference.dispatch(x, kept, [torch.ones(i.shape) for i in ids], E)
    assert torch.equal(received.recv_counts.cpu(), counts[rank].int())
    rows = torch.cat([part[:count] for part, count in zip(received.x.cpu(), counts[rank], strict=True)])
    assert torch.equal(rows, expected[rank])
    choices = (kept[rank] >= 0).sum(dim=1, keepdim=True).cuda()
    assert torch.equal(low_latency.combine(received.x, received.handle), choices * own)


def run_late(spread):
    """Rank 3 is late: the others go on without it, and it ends; a reset brings it back."""
    buffer, low_latency = make(spread)
    everyone, without = torch.ones(W, W, dtype=torch.int32), torch.ones(W, W, dtype=torch.int32)
    without[3, :3] = without[:3, 3] = 0
    with buffer:
        for _ in range(2):
            dist.barrier()  # kernels are loaded in the first round
            trip(low_latency, 0, everyone)
        dist.barrier()
        started = time.monotonic()
        if buffer.rank == 3:
            time.sleep(2)
            x, ids = (of_ranks[3].cuda() for of_ranks in inputs(0))
            with pytest.raises(ep.EPMaskedError, match=r"rank 3 came too late: rank . took it for dead"):
                received = low_latency.dispatch(x, ids)
                low_latency.combine(received.x, received.handle)
                buffer.synchronize()
            with pytest.raises(ep.EPMaskedError):
                low_latency.dispatch(x, ids)
            assert low_latency.masked_ranks() == []
        else:
            for seed in range(8):
                trip(low_latency, seed, without)
            assert low_latency.masked_ranks() == [3]
        took = time.monotonic() - started
        buffer.reset()
        dist.barrier()
        trip(low_latency, 0, everyone)
    return took


@pytest.mark.parametrize("spread", [False, True])
def test_a_late_rank_is_masked(ranks, spread):
    if spread and torch.cuda.device_count() < W:
        pytest.skip(f"needs {W} GPUs")
    took = ranks.run(run_late, spread)
    assert 0.5 < max(took[:3]) < 1.8, took
    assert took[3] < 3, took


def run_backward():
    buffer, low_latency = make(False)
    rank = buffer.rank
    for _ in range(2):
        dist.barrier()
        trip(low_latency, 0, torch.ones(W, W, dtype=torch.int32))
    x, ids = inputs(0)
    own = x[rank].cuda().requires_grad_()
    received = low_latency.dispatch(own, ids[rank].cuda())
    y = low_latency.combine(received.x, received.handle)
    buffer.synchronize()
    message = ""
    if rank != 1:
        with pytest.raises(ep.EPError) as caught:
            y.sum().backward()
            buffer.synchronize()
        message = str(caught.value)
    buffer.reset()
    buffer.close()
    return message


def test_a_rank_that_stays_away_from_the_backward_pass(ranks):
    messages = ranks.run(run_backward)
    said = re.compile(r"^rank [023] met rank 1 in a backward pass, masked since its forward pass\n")
    assert all(said.search(messages[rank]) for rank in (0, 2, 3)), messages


@pytest.mark.parametrize("spread", [False, True])
def test_survivors_go_on(tmp_path, monkeypatch, spread):
    """One rank is killed, whose memory the others have mapped; with several GPUs, that of another GPU, too."""
    script = survivors.masking(survivors.with_low_latency(survivors.SURVIVOR))
    if spread:
        if torch.cuda.device_count() < 2:
            pytest.skip("needs 2 GPUs")
        device = "    device = f'cuda:{rank % torch.cuda.device_count()}'\n    torch.cuda.set_device(device)\n"
        before = "    config = ep.Config("
        assert before in script
        script = script.replace(before, device + before)
    monkeypatch.setattr(survivors, "SURVIVOR", script)
    survivors.check_masked(tmp_path, "cuda")


def test_ranks_come_back(ranks, tmp_path):
    """Killed, masked, started again: graphs that were captured before reach the new processes."""
    ranks.run(dist.get_rank)  # the server that processes are forked from has imported torch
    comebacks.check_comebacks(tmp_path, nodes=1, killed=(1,), device="cuda", patience=90)

"""Masked ranks in the low-latency mode on GPUs: in graphs, and when processes are late or killed."""

import comebacks
import pytest
import survivors
import torch

import megatron_ep as ep
from megatron_ep import reference

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


def test_ranks_come_back(tmp_path):
    """Killed, masked, started again: graphs that were captured before reach the new processes."""
    comebacks.check_comebacks(tmp_path, nodes=1, killed=(1,), device="cuda", patience=90)

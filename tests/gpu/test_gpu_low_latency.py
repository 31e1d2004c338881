"""The low-latency mode on a GPU, where it differs from the host: the tests that both share are in tests/low_latency."""

import functools
import gc

import pytest
import torch
from graphs import captured

import megatron_ep as ep
from megatron_ep import float8, reference

W, E, K, H, MAX = 4, 16, 3, 520, 32


def cluster_of_four(nodes=2, num_sms=None, **options):
    cluster = ep.LocalCluster(nodes, W // nodes, ep.Config(num_experts=E, timeout=10, num_sms=num_sms), device="cuda")
    return cluster, ep.LowLatency(cluster, max_tokens=MAX, hidden=H, topk=K, **options)


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = [MAX, 0, 5, 17]
    ids = [torch.rand(t, E, generator=generator).topk(K, dim=1).indices.cuda() for t in tokens]
    return [torch.randint(-8, 9, (t, H), generator=generator).bfloat16().cuda() for t in tokens], ids


def assert_thrice(y, x):
    for a, b in zip(y, x, strict=True):
        assert torch.equal(a, 3 * b)


def test_fp8_in_a_graph_and_backward():
    cluster, low_latency = cluster_of_four()
    x, ids = inputs(7)

    @torch.no_grad()
    def step():
        received = low_latency.dispatch(x, ids, fp8="pow2", scale_layout="column", recv_rows=counts, recv_wait_ns=waits)
        return received.x, received.scales, received.handle

    counts = [torch.zeros(W, dtype=torch.int64, device="cuda") for _ in range(W)]
    waits = [torch.zeros(W, dtype=torch.int64, device="cuda") for _ in range(W)]
    with cluster:
        graph, (rows, scales, handle) = captured(step)
        expected = torch.stack(counts).cpu()  # of the warm-up
        for seed in range(5):
            fresh, ids_now = inputs(seed)
            for static, new in zip((*x, *ids), (*fresh, *ids_now), strict=True):
                static.copy_(new)
            graph.replay()
            for rank in range(W):
                expected[rank] += torch.tensor([int((i // (E // W) == rank).any(dim=1).sum()) for i in ids])
            assert torch.equal(torch.stack(counts).cpu(), expected)
            assert all(int(wait[rank]) == 0 and bool((wait >= 0).all()) for rank, wait in enumerate(waits))
            again = low_latency.dispatch(x, ids, fp8="pow2", scale_layout="column")
            for rank in range(W):
                is_row = handle.is_row(rank)
                for a, b in ((rows, again.x), (scales, again.scales)):
                    assert torch.equal(a[rank].flatten(0, 1)[is_row].float(), b[rank].flatten(0, 1)[is_row].float())
        leaves = [t.clone().requires_grad_() for t in x]
        received = low_latency.dispatch(leaves, ids, fp8="fp32")
        parts = zip(received.x, received.scales, received.straight_through, strict=True)
        out = [float8.dequantize(*rows, straight_through=stand_in) for *rows, stand_in in parts]
        y = low_latency.combine(out, received.handle)
        torch.autograd.backward(y, [torch.ones_like(t) for t in y])
        for leaf in leaves:
            assert torch.equal(leaf.grad, torch.full_like(leaf, 3))
        cluster.synchronize()


def test_a_graph_outlives_the_buffer():
    """What it needs, the heap of the low-latency mode too, stays as long as the graph; a replay gives NaN."""
    cluster, low_latency = cluster_of_four()
    x, ids = inputs(0)

    @torch.no_grad()
    def step(mode):
        received, hook = mode.dispatch(x, ids, return_recv_hook=True)
        hook()
        return mode.combine(received.x, received.handle)

    graph, y = captured(functools.partial(step, low_latency))
    graph.replay()
    torch.cuda.synchronize()
    assert_thrice(y, x)
    cluster.close()
    del cluster, low_latency
    gc.collect()
    taken = torch.full((256 << 20,), 0x5A, dtype=torch.uint8, device="cuda")  # whatever was freed is somebody else's
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(part.isnan().all() for part in y)
    assert (taken == 0x5A).all()


def test_graphs_in_any_mix():
    """Two graphs with odd numbers of calls, eager calls and the normal mode, in a random order on one buffer."""
    cluster, low_latency = cluster_of_four()
    x, ids = inputs(0)

    @torch.no_grad()
    def step(calls):
        results = []
        for _ in range(calls):
            received, hook = low_latency.dispatch(x, ids, return_recv_hook=True)
            hook()
            results.append(low_latency.combine(received.x, received.handle, sum_at="expert"))
        return results

    def normal():
        rows = ep.dispatch(x, ids, buffer=cluster)
        return [ep.combine(rows.x, rows.handle)]

    with cluster:
        graphs = [captured(lambda calls=calls: step(calls)) for calls in (1, 3)]
        generator = torch.Generator().manual_seed(0)
        for seed in range(40):
            fresh = inputs(seed)
            for static, new in zip((*x, *ids), (*fresh[0], *fresh[1]), strict=True):
                static.copy_(new)
            kind = int(torch.randint(4, (), generator=generator))
            if kind < 2:
                graph, results = graphs[kind]
                graph.replay()
            else:
                results = step(1) if kind == 2 else normal()
            torch.cuda.synchronize()
            for y in results:
                assert_thrice(y, x)
        cluster.synchronize()


def test_masks_in_a_graph():
    """Who is masked between two replays is left out by the second."""
    cluster, low_latency = cluster_of_four(nodes=1, on_dead_rank="mask")
    x, ids = inputs(0)

    @torch.no_grad()
    def step():
        received = low_latency.dispatch(x, ids)
        return low_latency.combine(received.x, received.handle)

    with cluster:
        graph, y = captured(step)
        for masked in ((), ((0, 1),), ((0, 1), (3, 2))):
            active = torch.ones(W, W, dtype=torch.int32)
            for rank, other in masked:
                low_latency.active_ranks[rank][other] = active[rank, other] = 0
            for _ in range(2):
                graph.replay()
            kept = reference.without_masked([idx.cpu() for idx in ids], list(active), E)
            for rank in range(W):
                choices = (kept[rank] >= 0).sum(dim=1, keepdim=True)
                assert torch.equal(y[rank].cpu(), choices * x[rank].cpu())
        cluster.synchronize()


@pytest.mark.parametrize("num_sms", [1, 16])
def test_beside_other_kernels(num_sms):
    """Matrix products fill the GPU from another stream."""
    cluster, low_latency = cluster_of_four(num_sms=num_sms)
    x, ids = inputs(3)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with cluster:
        for _ in range(10):
            with torch.cuda.stream(side):
                for _ in range(20):
                    a = (a @ a).clamp(-1, 1)
            received, hook = low_latency.dispatch(x, ids, return_recv_hook=True)
            hook()
            assert_thrice(low_latency.combine(received.x, received.handle), x)
        cluster.synchronize()
        torch.cuda.synchronize()


def test_no_synchronisation_of_torch():
    cluster, low_latency = cluster_of_four()
    x, ids = inputs(5)
    with cluster:
        torch.cuda.set_sync_debug_mode("error")
        try:
            received = low_latency.dispatch(x, ids)
            y = low_latency.combine(received.x, received.handle)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_thrice(y, x)


@pytest.mark.parametrize("bad", [E, -2, "twice"])
def test_wrong_ids_are_found(bad):
    cluster, low_latency = cluster_of_four()
    x, ids = inputs(6)
    wrong = [idx.clone() for idx in ids]
    wrong[2][4, 1] = wrong[2][4, 0] if bad == "twice" else bad
    with cluster:
        with pytest.raises(ep.EPAbortError, match="rank 2 refused its arguments"):
            low_latency.dispatch(x, wrong)
            cluster.synchronize()
        with pytest.raises(ep.EPAbortError, match="reset"):
            low_latency.dispatch(x, ids)
        cluster.reset()
        received = low_latency.dispatch(x, ids)
        assert_thrice(low_latency.combine(received.x, received.handle), x)

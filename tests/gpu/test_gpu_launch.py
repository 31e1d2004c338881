"""Launches on a GPU: streams, graphs, errors that leave the context alive, refusals before anything runs."""

import gc
import time

import pytest
import torch
from graphs import captured

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep.buffer import cuda
from megatron_ep.fabrics import gpu, p2p

T, H, K, E = 64, 256, 2, 16


def inputs(world, seed=0, tokens=T):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.rand(tokens, E, generator=generator).topk(K, dim=1).indices.cuda() for _ in range(world)]
    x = [torch.randn(tokens, H, generator=generator).bfloat16().cuda() for _ in range(world)]
    weights = [torch.rand(tokens, K, generator=generator).cuda() for _ in range(world)]
    return x, ids, weights


def free_bytes():
    """Of the GPU, once all that nobody holds has gone back."""
    gc.collect()
    cuda._forget_graphs_that_are_gone()
    gpu.run_deferred()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def config(**settings):
    return ep.Config(**{"num_experts": E, "timeout": 5, **settings})


@pytest.mark.parametrize("layout", ["grouped", "flat"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 4), (2, 2)])
@pytest.mark.parametrize(("local_pass", "num_sms"), [(None, 24), (True, 24), (True, 4)])
def test_graph_of_a_dispatch_without_counts(nodes, ranks_per_node, local_pass, num_sms, layout):
    """max_recv_tokens: captured once, replayed with other tokens and other experts. Where few SMs are busy the
    intra-rank pass is a branch of the graph."""
    world, size = nodes * ranks_per_node, T * nodes * ranks_per_node * K
    with ep.LocalCluster(
        nodes, ranks_per_node, config(num_sms=num_sms, tuning=ep.Tuning(local_pass=local_pass)), device="cuda"
    ) as cluster:
        x, ids, weights = inputs(world)
        options = {"buffer": cluster, "max_recv_tokens": size, "layout": layout}

        @torch.no_grad()
        def step():
            rows = ep.dispatch(x, ids, weights, **options)
            return rows, ep.dispatch(x, handle=rows.handle), ep.combine(rows.x, rows.handle)

        graph, (rows, again, y) = captured(step)
        for seed in range(1, 6):
            for now in (seed + 10, seed):  # twice with nothing between that is not of the graph
                for static, new in zip(
                    (*x, *ids, *weights), (t for part in inputs(world, now) for t in part), strict=True
                ):
                    static.copy_(new)
                graph.replay()
            torch.cuda.synchronize()
            expected = ep.dispatch(x, ids, weights, **options)
            for rank in range(world):
                end = int(expected.tokens_per_expert[rank].sum())
                if layout == "flat":
                    end = int((expected.topk_idx[rank] >= 0).any(dim=1).sum())
                    assert torch.equal(rows.topk_idx[rank], expected.topk_idx[rank])
                assert torch.equal(rows.x[rank][:end], expected.x[rank][:end])
                assert torch.equal(again.x[rank][:end], expected.x[rank][:end])
                assert torch.equal(rows.probs[rank][:end], expected.probs[rank][:end])
                assert torch.equal(rows.tokens_per_expert[rank], expected.tokens_per_expert[rank])
                assert torch.equal(again.tokens_per_expert[rank], expected.tokens_per_expert[rank])
            for a, b in zip(y, ep.combine(expected.x, expected.handle), strict=True):
                assert torch.equal(a, b)
            cluster.synchronize()
        for status in cluster._group._backend.rank_statuses():  # counted on the GPU, replays too
            assert status.entered == status.finished
            assert (status.entered["notify"], status.entered["transfer"]) == (1 + 5 * 3, 3 + 5 * 8)


@pytest.mark.parametrize("how", ["close", "collect"])
def test_a_graph_that_outlives_its_buffer_reads_nothing_that_was_freed(how):
    """What it needs stays as long as the graph, and a replay gives NaN; run it under compute-sanitizer, too."""
    cluster = ep.LocalCluster(1, 4, config(), device="cuda")
    x, ids, weights = inputs(4)
    handle = ep.dispatch(x, ids, weights, buffer=cluster).handle
    cluster.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        rows = ep.dispatch(x, topk_weights=weights, handle=handle)
        y = ep.combine(rows.x, handle)
    outputs = (*rows.x, *rows.probs, *y)
    graph.replay()
    torch.cuda.synchronize()
    assert all(part.isfinite().all() for part in outputs)
    if how == "close":
        cluster.close()
    del cluster, handle, rows
    gc.collect()
    gpu.run_deferred()
    assert len(cuda._replayable) == 1
    taken = torch.full((256 << 20,), 0x5A, dtype=torch.uint8, device="cuda")  # whatever was freed is somebody else's
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert all(part.isnan().all() for part in outputs)
    assert (taken == 0x5A).all()
    graph.reset()
    torch.cuda.synchronize()
    deadline = time.monotonic() + 10
    while cuda._replayable and time.monotonic() < deadline:  # CUDA tells on a thread of its own
        with ep.LocalCluster(1, 2, config(), device="cuda") as another:
            x, ids, weights = inputs(2)
            again = ep.dispatch(x, ids, weights, buffer=another)
            assert all(part.isfinite().all() for part in ep.combine(again.x, again.handle))
    assert not cuda._replayable


@pytest.mark.parametrize("has_low_latency", [False, True])
@pytest.mark.parametrize("state", ["open", "closed", "closed with a graph"])
def test_a_buffer_that_is_collected_does_not_end_a_capture(state, has_low_latency, gpu_alone):
    """The garbage collector runs whenever it likes, on whatever thread."""
    x, ids, weights = inputs(2)

    def use(cluster):
        rows = ep.dispatch(x, ids, weights, buffer=cluster)
        assert all(part.isfinite().all() for part in ep.combine(rows.x, rows.handle))
        low_latency = ep.LowLatency(cluster, max_tokens=T, hidden=H, topk=K) if has_low_latency else None
        if low_latency is not None:
            low_latency.dispatch(x, ids)
        cluster.synchronize()
        return rows, low_latency

    with ep.LocalCluster(1, 2, config(), device="cuda") as cluster:  # CUDA takes memory at first use
        use(cluster)
    del cluster
    free = free_bytes()
    cluster = ep.LocalCluster(1, 2, config(), device="cuda")
    rows, low_latency = use(cluster)
    mine = None
    if state == "closed with a graph":
        mine = torch.cuda.CUDAGraph()
        with torch.cuda.graph(mine), torch.no_grad():
            ep.dispatch(x, handle=rows.handle)
    if state != "open":
        cluster.close()
    heap = cluster._group.heap.bytes
    cycle = [cluster, low_latency]  # not with the graph, whose own end would end the capture
    cycle.append(cycle)
    del cluster, rows, low_latency, cycle
    z = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z.mul_(2)
        gc.collect()
        z.add_(1)
    graph.replay()
    assert z.tolist() == [3.0] * 8
    with ep.LocalCluster(1, 2, config(), device="cuda") as another:
        use(another)
    del another, mine, graph
    deadline = time.monotonic() + 10
    while free_bytes() < free - heap and time.monotonic() < deadline:  # CUDA tells of a graph's end a little later
        time.sleep(0.01)
    assert free_bytes() > free - heap, "both are given back"


def test_a_capture_whose_host_would_wait_is_refused():
    """The capture goes on, and nobody else is told: all ranks refuse alike."""
    with ep.LocalCluster(1, 2, config(), device="cuda") as cluster:
        x, ids, weights = inputs(2)
        handle = ep.dispatch(x, ids, weights, buffer=cluster).handle
        cluster.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            with pytest.raises(ValueError, match="max_recv_tokens is None, must be given while a CUDA graph"):
                ep.dispatch(x, ids, weights, buffer=cluster)
            rows = ep.dispatch(x, handle=handle)
        graph.replay()
        cluster.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(rows.x, ep.dispatch(x, handle=handle).x, strict=True))


def test_a_buffer_may_be_closed_in_a_capture():
    cluster = ep.LocalCluster(1, 2, config(), device="cuda")
    x, ids, weights = inputs(2)
    handle = ep.dispatch(x, ids, weights, buffer=cluster).handle
    cluster.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        rows = ep.dispatch(x, handle=handle)
        cluster.close()
    graph.replay()
    torch.cuda.synchronize()
    assert all(part.isfinite().all() for part in rows.x)
    gpu.run_deferred()
    graph.replay()
    torch.cuda.synchronize()
    assert all(part.isnan().all() for part in rows.x)


def test_no_synchronisation_of_torch():
    with ep.LocalCluster(2, 2, config(), device="cuda") as cluster:
        x, ids, weights = inputs(4)
        handle = ep.dispatch(x, ids, weights, buffer=cluster).handle
        torch.cuda.set_sync_debug_mode("error")
        try:
            ep.combine(ep.dispatch(x, handle=handle).x, handle)
            rows = ep.dispatch(x, ids, weights, buffer=cluster, max_recv_tokens=8 * T)
            ep.combine(rows.x, rows.handle)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        cluster.synchronize()


def test_launches_on_two_streams_keep_their_order():
    with ep.LocalCluster(1, 4, config(), device="cuda") as cluster:
        x, ids, weights = inputs(4)
        first = ep.dispatch(x, ids, weights, buffer=cluster)
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        results = []
        for i in range(10):
            with torch.cuda.stream(streams[i % 2]):
                results.append(ep.dispatch(x, handle=first.handle).x)
        torch.cuda.synchronize()
        for result in results:
            for a, b in zip(result, first.x, strict=True):
                assert torch.equal(a, b)


class LoneRank(ep.LocalCluster):
    """Rank 0 of two: the other one never comes."""

    def __init__(self, nodes, ranks_per_node):
        super().__init__(nodes, ranks_per_node, config(timeout=1), device="cuda")
        group = self._group
        group.ranks = [0]
        self._memories = [_C.DeviceMemory.create(self.device.index, group.heap.bytes) for _ in range(2)]
        sms = gpu.num_sms(self.config, self.device, 2)
        connection = p2p.over(self._memories, [0], group.heap, self.device, sms, self.config)
        group._backend = cuda.CudaBackend(connection, group.heap, self.device, sms)


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "waits_for"), [(1, 2, "a rank of this node"), (2, 1, "another node")]
)
def test_an_absent_rank_is_a_timeout_and_the_context_lives(nodes, ranks_per_node, waits_for):
    with LoneRank(nodes, ranks_per_node) as buffer:
        x, ids, weights = inputs(1)
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(ep.EPTimeoutError) as caught:
                ep.dispatch(x, ids, weights, buffer=buffer)
            assert 0.9 < time.monotonic() - started < 4
            assert "rank 0 timed out first, after 1 s: rank 1 has not entered notify 1 (it finished 0)" in str(
                caught.value
            )
            (incident,) = caught.value.incidents
            assert incident["role"] == "notify" and incident["peer"] == 1 and incident["outcome"] == "timeout"
            assert incident["waiting_for"] == f"counts from {waits_for}"
            assert (incident["seen"], incident["expected"]) == (0, 1)
            with pytest.raises(ep.EPTimeoutError):  # until somebody resets it
                ep.dispatch(x, ids, weights, buffer=buffer)
            buffer.reset()
        assert torch.equal(torch.ones(3, device="cuda") * 2, torch.full((3,), 2.0, device="cuda"))


def test_what_fails_without_a_wait_is_raised_by_the_next_call():
    with LoneRank(1, 2) as buffer:
        x, ids, weights = inputs(1)
        ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=T)  # returns at once
        with pytest.raises(ep.EPTimeoutError, match="rank 0 timed out first"):
            buffer.synchronize()
        with pytest.raises(ep.EPTimeoutError, match="rank 0 timed out first"):
            ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=T)


def test_the_handle_of_a_failed_dispatch_is_refused_after_a_reset():
    with LoneRank(1, 2) as buffer:
        x, ids, weights = inputs(1)
        handle = ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=T).handle
        with pytest.raises(ep.EPTimeoutError):
            buffer.synchronize()
        for call in (lambda: ep.dispatch(x, handle=handle), lambda: ep.combine(x, handle)):
            buffer.reset()
            with pytest.raises(ep.EPError, match="rank 0 used the handle of a dispatch that failed"):
                call()  # may hear of it already
                buffer.synchronize()


def test_wrong_ids_are_named_and_the_cluster_stays_usable():
    with ep.LocalCluster(2, 2, config(), device="cuda") as cluster:
        x, ids, weights = inputs(4)
        for value in (E, -2, 2**40 + 3):
            wrong = [t.clone() for t in ids]
            wrong[2][5:, 1] = value
            with pytest.raises(ValueError, match=r"topk_idx of rank 2 is \[.*\] at token 5, must hold distinct ids"):
                ep.dispatch(x, wrong, weights, buffer=cluster)
            rows = ep.dispatch(x, ids, weights, buffer=cluster)
            for a, b in zip(ep.combine(rows.x, rows.handle), x, strict=True):
                torch.testing.assert_close(a, K * b)


def test_arguments():
    with ep.LocalCluster(1, 2, config(), device="cuda") as cluster:
        x, ids, weights = inputs(2)
        with pytest.raises(ValueError, match="x is on cpu, must be on cuda:0"):
            ep.dispatch([t.cpu() for t in x], ids, weights, buffer=cluster)
        with pytest.raises(ValueError, match="topk_idx is on cpu"):
            ep.dispatch(x, [t.cpu() for t in ids], weights, buffer=cluster)


def test_what_cannot_run_at_once_is_refused():
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    with pytest.raises(ValueError, match=f"num_sms is {sms} for each of 2 ranks"):
        ep.LocalCluster(1, 2, config(num_sms=sms), device="cuda")
    with pytest.raises(ValueError, match="num_sms is 1, must be at least"):
        ep.LocalCluster(1, 2, config(num_sms=1, tuning=ep.Tuning(channels=64)), device="cuda")
    with pytest.raises(ValueError, match="33, at most 32"):
        ep.LocalCluster(1, 33, ep.Config(num_experts=33), device="cuda")
    with pytest.raises(ValueError, match="device is 'meta'"):
        ep.LocalCluster(1, 2, config(), device="meta")


def test_seconds():
    with ep.LocalCluster(1, 2, config(), device="cuda") as cluster:
        x, ids, weights = inputs(2)
        assert cluster._group.seconds == 0  # from now on launches are timed
        ep.dispatch(x, ids, weights, buffer=cluster)
        torch.cuda.synchronize()
        assert 0 < cluster._group.seconds < 5

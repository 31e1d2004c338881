"""The low-latency mode on a GPU: the same bits as on the host, which other tests hold to the reference."""

import functools
import gc

import left_out
import pytest
import torch
from low_latency_cases import LowLatencyCase

import megatron_ep as ep
from megatron_ep import float8

BLOCKS, CASES_PER_BLOCK = 8, 10


def to_gpu(tensors):
    return [tensor.cuda() for tensor in tensors]


def assert_same_bits(on_gpu, on_host):
    for rank, (a, b) in enumerate(zip(on_gpu, on_host, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"rank {rank}: {a.shape} {b.shape}"
        same = a.cpu().view(torch.uint8).equal(b.view(torch.uint8)) if a.numel() else True
        assert same, f"rank {rank} differs"


def rows_of_tokens(received, tensors):
    """Of each rank's tensor, laid out as what was received: the rows that hold a token."""
    handle = received.handle
    ends = 2 if handle.masked else 1
    return [
        tensor.flatten(0, ends - 1)[handle.is_row(rank)] for tensor, rank in zip(tensors, handle.ranks, strict=True)
    ]


def outputs(low_latency, case, x, ids, weights, out, row_weights):
    """Of a dispatch and of all forms of combine."""
    received = low_latency.dispatch(x, ids, weights, **case.dispatch_options())
    rows = (rows_of_tokens(received, received.x), rows_of_tokens(received, received.probs))
    assert not any(int(flag) for flag in received.overflow)
    shapes = [tensor.shape for tensor in received.x]
    out = [o.to(x[0].device).view(s) for o, s in zip(out, shapes, strict=True)]
    row_weights = [w.to(x[0].device).view(s[:-1]) for w, s in zip(row_weights, shapes, strict=True)]
    sums = [
        low_latency.combine(out, received.handle),
        low_latency.combine(out, received.handle, sum_at="expert"),
        low_latency.combine(out, received.handle, [w.to(case.wide()) for w in weights]),
        low_latency.combine(out, received.handle, row_weights=row_weights, sum_at="expert"),
    ]
    return (*rows, received.recv_counts, received.expert_starts, *sums)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_same_bits_as_on_the_host(block):
    for seed in range(block * CASES_PER_BLOCK, (block + 1) * CASES_PER_BLOCK):
        case = LowLatencyCase(seed, device="cuda")
        if seed % 2:  # rows for the copy engine
            case.hidden, case.max_tokens = case.random.choice([512, 520, 2052, 4096]), min(case.max_tokens, 40)
        with case.cluster() as host, case.cluster(device="cuda") as gpu:
            on_host, on_gpu = case.low_latency(host), case.low_latency(gpu)
            for _ in range(3):
                ids, weights, x = case.new_round()
                rows = [case.num_rows()] * case.world
                out, row_weights = case.reals(rows), case.row_weights(rows)
                expected = outputs(on_host, case, x, ids, weights, out, row_weights)
                ours = outputs(on_gpu, case, to_gpu(x), to_gpu(ids), to_gpu(weights), out, row_weights)
                for a, b in zip(ours, expected, strict=True):
                    assert_same_bits(a, b)
                gpu.synchronize()


@pytest.mark.parametrize("seed", range(8))
def test_max_recv_tokens(seed):
    case = LowLatencyCase(1000 + seed, max_tokens=40, device="cuda")
    case.masked, case.layout = False, "grouped"
    ids, _, x = case.new_round()
    with case.cluster() as host, case.cluster(device="cuda") as gpu:
        on_host, on_gpu = case.low_latency(host), case.low_latency(gpu)
        for limit in (1, 7, 60):
            options = case.dispatch_options() | {"max_recv_tokens": limit}
            expected, ours = on_host.dispatch(x, ids, **options), on_gpu.dispatch(to_gpu(x), to_gpu(ids), **options)
            assert [int(flag) for flag in ours.overflow] == [int(flag) for flag in expected.overflow]
            assert_same_bits(rows_of_tokens(ours, ours.x), rows_of_tokens(expected, expected.x))
            out = case.reals([limit] * case.world)
            for sum_at in ("token", "expert"):
                y = on_host.combine(out, expected.handle, sum_at=sum_at)
                assert_same_bits(on_gpu.combine(to_gpu(out), ours.handle, sum_at=sum_at), y)


def fp8_inputs(case):
    """With blocks of zeros, of subnormals, and with infinities and NaN."""
    ids, weights, x = case.new_round()
    for rows in x:
        kind = torch.rand(rows.shape, generator=case.generator)
        rows[kind < 0.01] = 0
        rows[::3] *= 1e-38
        rows[(kind > 0.9999)] = torch.nan
        rows[(kind < 0.0001)] = torch.inf
    return ids, weights, x


def without_nan_signs(tensors):
    return [t.view(torch.int32) if t.dtype == torch.int32 else t.float().cpu().nan_to_num(nan=12345.0) for t in tensors]


@pytest.mark.parametrize("block", range(6))
def test_fp8_same_bits_as_on_the_host(block):
    """Hidden sizes of the copy engine, of one chunk or several, and others; all formats and layouts of scales."""
    for seed in range(4 * block, 4 * block + 4):
        case = LowLatencyCase(5000 + seed, max_tokens=40, device="cuda")
        case.dtype = torch.bfloat16
        case.hidden = [7168, 200, 4096, 520, 3600, 7, 1024, 8192][seed % 8]
        with case.cluster() as host, case.cluster(device="cuda") as gpu:
            on_host, on_gpu = case.low_latency(host), case.low_latency(gpu)
            for fp8 in ("fp32", "pow2", "ue8m0"):
                ids, weights, x = fp8_inputs(case)
                column = fp8 != "ue8m0" or case.hidden % 512 == 0
                for layout in ("row", "column") if column else ("row",):
                    options = case.dispatch_options() | {"fp8": fp8, "scale_layout": layout}
                    expected = on_host.dispatch(x, ids, weights, **options)
                    ours = on_gpu.dispatch(to_gpu(x), to_gpu(ids), to_gpu(weights), **options)
                    for a, b in ((ours.x, expected.x), (ours.scales, expected.scales), (ours.probs, expected.probs)):
                        assert [t.stride() for t in a] == [t.stride() for t in b]
                        a, b = rows_of_tokens(ours, a), rows_of_tokens(expected, b)
                        assert_same_bits(without_nan_signs(a), without_nan_signs(b))
                gpu.synchronize()


def test_fp8_in_a_graph_and_backward():
    cluster, low_latency = cluster_of_four()
    x, ids = inputs(7)

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
                is_row = handle.is_row(handle.ranks[rank])
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


W, E, K, H, MAX = 4, 16, 3, 520, 32


def cluster_of_four(**settings):
    cluster = ep.LocalCluster(2, 2, ep.Config(**{"num_experts": E, "timeout": 10, **settings}), device="cuda")
    return cluster, ep.LowLatency(cluster, max_tokens=MAX, hidden=H, topk=K)


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = [MAX, 0, 5, 17]
    ids = [torch.rand(t, E, generator=generator).topk(K, dim=1).indices.cuda() for t in tokens]
    return [torch.randint(-8, 9, (t, H), generator=generator).bfloat16().cuda() for t in tokens], ids


def assert_thrice(y, x):
    for a, b in zip(y, x, strict=True):
        assert torch.equal(a, 3 * b)


def test_two_calls_of_a_kind_under_way():
    cluster, low_latency = cluster_of_four()
    with cluster:
        for seed in range(20):
            sent = [inputs(2 * seed + i) for i in range(2)]
            calls = [low_latency.dispatch(*s, return_recv_hook=True) for s in sent]
            with pytest.raises(ValueError, match="the dispatch before the last has not been received"):
                low_latency.dispatch(*sent[0])
            for _, hook in calls[:: 1 - 2 * (seed % 2)]:
                hook()
            back = [low_latency.combine(r.x, r.handle, return_recv_hook=True) for r, _ in calls]
            for _, hook in back[:: 2 * (seed % 2) - 1]:
                hook()
            for (y, _), (x, _) in zip(back, sent, strict=True):
                assert_thrice(y, x)
        cluster.synchronize()


def captured(step):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        result = step()
    return graph, result


def test_a_graph_outlives_the_buffer():
    """What it needs, the heap of the low-latency mode too, stays as long as the graph; a replay gives NaN."""
    cluster, low_latency = cluster_of_four()
    x, ids = inputs(0)

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


@pytest.mark.needs(left_out.not_summed(torch.float64))
def test_gradients():
    generator = torch.Generator().manual_seed(0)
    tokens = [3, 0, 2, 4]
    ids = [torch.rand(t, 8, generator=generator).topk(2, dim=1).indices.cuda() for t in tokens]
    x = [torch.randn(t, 3, generator=generator, dtype=torch.float64).cuda().requires_grad_() for t in tokens]
    w = [torch.rand(t, 2, generator=generator, dtype=torch.float64).cuda().requires_grad_() for t in tokens]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=8, timeout=20), device="cuda") as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=3, topk=2, dtype=torch.float64)

        def at_token(*leaves):
            rows = low_latency.dispatch(list(leaves[:4]), ids)
            return tuple(low_latency.combine([torch.tanh(r) for r in rows.x], rows.handle, list(leaves[4:])))

        def at_expert(*leaves):
            rows = low_latency.dispatch(list(leaves[:4]), ids, list(leaves[4:]), layout="grouped", expert_alignment=4)
            out = [torch.tanh(r) for r in rows.x]
            return tuple(low_latency.combine(out, rows.handle, row_weights=rows.probs, sum_at="expert"))

        assert torch.autograd.gradcheck(at_token, (*x, *w))
        assert torch.autograd.gradcheck(at_expert, (*x, *w))

"""Dispatch and combine on a GPU: the same bits as on the host, which other tests hold to the reference."""

from dataclasses import replace

import left_out
import pytest
import torch
from cases import Case
from process_cases import before
from torch.autograd import gradcheck

import megatron_ep as ep
from megatron_ep.buffer.rank_group import summable_dtypes

SUMMABLE = summable_dtypes("cuda")
BLOCKS, CASES_PER_BLOCK = 10, 10


def to_gpu(tensors):
    return None if tensors is None else [tensor.cuda() for tensor in tensors]


def assert_same_bits(on_gpu, on_host):
    for rank, (a, b) in enumerate(zip(on_gpu, on_host, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"rank {rank}: {a.shape} {b.shape}"
        same = a.detach().cpu().view(torch.uint8).equal(b.detach().view(torch.uint8)) if a.numel() else True
        assert same, f"rank {rank} differs"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_same_bits_as_on_the_host(block):
    for seed in range(block * CASES_PER_BLOCK, (block + 1) * CASES_PER_BLOCK):
        case = Case(seed, device="cuda")
        tokens = case.num_tokens()
        ids, weights, x, again = case.ids(tokens), case.weights(tokens), case.reals(tokens), case.reals(tokens)
        with case.cluster() as host, case.cluster(device="cuda") as gpu:
            expected = ep.dispatch(x, ids, weights, buffer=host, expert_alignment=case.alignment)
            ours = ep.dispatch(to_gpu(x), to_gpu(ids), to_gpu(weights), buffer=gpu, expert_alignment=case.alignment)
            assert_same_bits(ours.x, expected.x)
            assert_same_bits(ours.probs, expected.probs)
            assert_same_bits(ours.tokens_per_expert, expected.tokens_per_expert)
            assert not any(ours.overflow)
            assert_same_bits(ep.combine(ours.x, ours.handle), ep.combine(expected.x, expected.handle))
            cached = ep.dispatch(to_gpu(again), handle=ours.handle)
            assert_same_bits(cached.x, ep.dispatch(again, handle=expected.handle).x)
            gpu.synchronize()


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dtype", SUMMABLE)
def test_weighted_combine(seed, dtype):
    """Sums and both gradients, in rows for the copy engine, for vectors, and for neither."""
    case = Case(8000 + seed, max_tokens=60, device="cuda")
    case.dtype, case.hidden = dtype, case.random.choice([1, 33, 64, 520, 1000, 4096])
    if case.random.random() < 0.5:
        case.topk = min(case.topk, 2)  # single rows are multiplied, too
    tokens = case.num_tokens()
    ids, x = case.ids(tokens), case.reals(tokens)
    grads = case.reals(tokens)
    row_bytes = case.hidden * dtype.itemsize + 1024
    config = replace(
        case.config, tuning=replace(case.config.tuning, nvl_ring_bytes=3 * row_bytes, rdma_ring_bytes=4 * row_bytes)
    )
    results = []
    for device in ("cpu", "cuda"):
        with ep.LocalCluster(case.nodes, case.ranks_per_node, config, device=device) as cluster:
            sent, chosen = [t.to(device) for t in x], [t.to(device) for t in ids]
            rows = ep.dispatch(sent, chosen, buffer=cluster, expert_alignment=case.alignment)
            if not results:
                out, weights = case.reals([len(r) for r in rows.x]), case.row_weights([len(r) for r in rows.x])
            leaves = [t.detach().clone().to(device).requires_grad_() for t in (*out, *weights)]
            y = ep.combine(leaves[: case.world], rows.handle, leaves[case.world :])
            torch.autograd.backward(y, [grad.to(device) for grad in grads])
            cluster.synchronize()
        results.append(([t.detach() for t in y], [leaf.grad for leaf in leaves]))
    (host_y, host_grads), (gpu_y, gpu_grads) = results
    assert_same_bits(gpu_y, host_y)
    assert_same_bits(gpu_grads[: case.world], host_grads[: case.world])
    for ours, expected in zip(gpu_grads[case.world :], host_grads[case.world :], strict=True):
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-3)  # torch sums over H in another order


@pytest.mark.parametrize("seed", range(8))
def test_many_calls_on_one_buffer(seed):
    """Shapes, dtypes and K change from call to call; nothing is cleared between them."""
    case = Case(2000 + seed, max_tokens=60, device="cuda")
    row_bytes = 8 * 1000 + 1024
    config = ep.Config(
        num_experts=case.num_experts,
        timeout=20,
        tuning=ep.Tuning(channels=2, nvl_ring_bytes=2 * row_bytes, rdma_ring_bytes=3 * row_bytes),
    )
    with (
        ep.LocalCluster(case.nodes, case.ranks_per_node, config) as host,
        ep.LocalCluster(case.nodes, case.ranks_per_node, config, device="cuda") as gpu,
    ):
        handles = []
        for dtype in SUMMABLE[::-1] * (8 // len(SUMMABLE)):
            case.topk, case.hidden = case.random.randint(1, min(8, case.num_experts)), case.random.randint(8, 1000)
            case.dtype = dtype
            tokens = case.num_tokens()
            x, ids, weights = case.reals(tokens), case.ids(tokens), case.weights(tokens)
            expected = ep.dispatch(x, ids, weights, buffer=host)
            ours = ep.dispatch(to_gpu(x), to_gpu(ids), to_gpu(weights), buffer=gpu)
            assert_same_bits(ours.x, expected.x)
            handles.append((ours.handle, expected.handle))
            for gpu_handle, host_handle in handles[-3:]:
                num_rows = [rank.rows for rank in host_handle.ranks]
                out, row_weights = case.reals(num_rows), case.row_weights(num_rows)
                assert_same_bits(ep.combine(to_gpu(out), gpu_handle), ep.combine(out, host_handle))
                weighted = ep.combine(to_gpu(out), gpu_handle, to_gpu(row_weights))
                assert_same_bits(weighted, ep.combine(out, host_handle, row_weights))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [None, 7])
@pytest.mark.parametrize(("share", "slack"), [(0.1, 0), (0.4, 0), (0.9, 0), (1, -1), (1, 0), (1, 1), (1, 17)])
def test_max_recv_tokens(seed, share, slack, capacity):
    case = Case(4000 + seed, max_tokens=60, device="cuda")
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.integers(tokens)
    with_gradient = seed // 2 % 2 == 0  # then rows behind the last expert's are zeros, too
    x = [rows.requires_grad_(with_gradient) for rows in x]
    with case.cluster() as host, case.cluster(device="cuda") as gpu:
        rows = max(len(received) for received in ep.dispatch(x, ids, buffer=host).x)
        passing = max(tokens) if case.nodes > 1 else 1  # those that only pass through need room, too
        size = max(1, passing, int(share * rows) + slack)
        limits = {"expert_capacity": capacity, "max_recv_tokens": size}
        expected = ep.dispatch(x, ids, weights, buffer=host, **limits)
        ours = ep.dispatch(to_gpu(x), to_gpu(ids), to_gpu(weights), buffer=gpu, **limits)
        ends = [size if with_gradient else min(size, int(n.sum())) for n in expected.tokens_per_expert]
        assert_same_bits(before(ends, ours.x), before(ends, expected.x))
        assert_same_bits(ours.probs, expected.probs)
        assert_same_bits(ours.tokens_per_expert, expected.tokens_per_expert)
        assert [bool(flag) for flag in ours.overflow] == [bool(flag) for flag in expected.overflow]
        assert_same_bits(ep.combine(ours.x, ours.handle), ep.combine(expected.x, expected.handle))
        gpu.synchronize()


@pytest.mark.parametrize("seed", range(6))
def test_expert_capacity(seed):
    case = Case(5000 + seed, max_tokens=60, device="cuda")
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.reals(tokens)
    for capacity in (1, 7, 40):
        with case.cluster() as host, case.cluster(device="cuda") as gpu:
            expected = ep.dispatch(x, ids, weights, buffer=host, expert_capacity=capacity)
            ours = ep.dispatch(to_gpu(x), to_gpu(ids), to_gpu(weights), buffer=gpu, expert_capacity=capacity)
            assert_same_bits(ours.x, expected.x)
            assert_same_bits(ours.probs, expected.probs)
            assert [bool(flag) for flag in ours.overflow] == [bool(flag) for flag in expected.overflow]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("hidden", [8, 200, 1000, 7168])
def test_float8_with_scales(hidden, scale_dtype):
    generator = torch.Generator().manual_seed(hidden)
    tokens, experts, blocks = [5, 0, 17, 90], 8, -(-hidden // 128)
    ids = [torch.rand(t, experts, generator=generator).topk(3, dim=1).indices for t in tokens]
    x = [torch.randint(0, 255, (t, hidden), generator=generator, dtype=torch.uint8) for t in tokens]
    x = [rows.view(torch.float8_e4m3fn) for rows in x]
    scales = [torch.rand(t, blocks, generator=generator).to(scale_dtype) for t in tokens]
    weights = [torch.rand(t, 3, generator=generator) for t in tokens]
    config = ep.Config(num_experts=experts, timeout=20)
    results = []
    for device in ("cpu", "cuda"):
        leaves = [weight.clone().to(device).requires_grad_() for weight in weights]
        with ep.LocalCluster(2, 2, config, device=device) as cluster:
            rows = ep.dispatch(
                [t.to(device) for t in x],
                [t.to(device) for t in ids],
                leaves,
                scales=[t.to(device) for t in scales],
                buffer=cluster,
            )
            sum((p * torch.arange(len(p), device=device)).sum() for p in rows.probs).backward()
        results.append((rows, [leaf.grad for leaf in leaves]))
    (host, host_grads), (gpu, gpu_grads) = results
    assert_same_bits(gpu.x, host.x)
    assert_same_bits(gpu.scales, host.scales)
    assert_same_bits([p.detach() for p in gpu.probs], [p.detach() for p in host.probs])
    assert_same_bits(gpu_grads, host_grads)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 8), (2, 4)])
def test_whole_rows_with_the_default_channels(nodes, ranks_per_node):
    """Rows long enough for the copy engine, all SMs, rings that wrap around many times."""
    world, experts, topk, hidden = nodes * ranks_per_node, 64, 8, 7168
    generator = torch.Generator().manual_seed(0)
    tokens = [700 + 10 * rank for rank in range(world)]
    ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices for t in tokens]
    x = [torch.randn(t, hidden, generator=generator).bfloat16() for t in tokens]
    config = ep.Config(
        num_experts=experts, timeout=20, tuning=ep.Tuning(nvl_ring_bytes=64 << 10, rdma_ring_bytes=128 << 10)
    )
    with (
        ep.LocalCluster(nodes, ranks_per_node, config) as host,
        ep.LocalCluster(nodes, ranks_per_node, config, device="cuda") as gpu,
    ):
        expected = ep.dispatch(x, ids, buffer=host)
        y = ep.combine(expected.x, expected.handle)
        weights = [torch.randn(len(rows), generator=generator) for rows in expected.x]
        weighted = ep.combine(expected.x, expected.handle, weights)
        for _ in range(3):
            ours = ep.dispatch(to_gpu(x), to_gpu(ids), buffer=gpu)
            assert_same_bits(ours.x, expected.x)
            assert_same_bits(ep.combine(ours.x, ours.handle), y)
            assert_same_bits(ep.combine(ours.x, ours.handle, to_gpu(weights)), weighted)


@pytest.mark.needs(left_out.not_summed(torch.float64))
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 2)])
def test_gradients(nodes, ranks_per_node):
    world, experts, topk = nodes * ranks_per_node, 8, 2
    generator = torch.Generator().manual_seed(world)
    tokens = [3, 0, 2, 4][:world]
    ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices.cuda() for t in tokens]
    x = [torch.randn(t, 3, generator=generator, dtype=torch.float64).cuda().requires_grad_() for t in tokens]
    weights = [torch.rand(t, topk, generator=generator, dtype=torch.float64).cuda().requires_grad_() for t in tokens]
    with ep.LocalCluster(nodes, ranks_per_node, ep.Config(num_experts=experts, timeout=20), device="cuda") as cluster:

        def layer(*leaves):
            rows = ep.dispatch(list(leaves[:world]), ids, list(leaves[world:]), buffer=cluster)
            out = [torch.tanh(r) * p.unsqueeze(1) for r, p in zip(rows.x, rows.probs, strict=True)]
            return tuple(ep.combine(out, rows.handle))

        def weighted_layer(*leaves):
            rows = ep.dispatch(list(leaves[:world]), ids, list(leaves[world:]), buffer=cluster, expert_alignment=2)
            return tuple(ep.combine([torch.tanh(r) for r in rows.x], rows.handle, rows.probs))

        assert gradcheck(layer, (*x, *weights))
        assert gradcheck(weighted_layer, (*x, *weights))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_types_that_were_not_built_are_refused(dtype):
    if dtype in SUMMABLE:
        pytest.skip(f"this build sums {dtype}")
    x, ids = torch.ones(3, 8, dtype=dtype, device="cuda"), torch.arange(3, device="cuda").unsqueeze(1)
    with ep.LocalCluster(1, 1, ep.Config(num_experts=4, timeout=20), device="cuda") as cluster:
        rows = ep.dispatch([x], [ids], buffer=cluster)
        assert torch.equal(rows.x[0], x)  # moves bytes
        with pytest.raises(ValueError, match=f"x is {dtype}, must be one of .* MEGATRON_EP_DTYPES=all"):
            ep.combine(rows.x, rows.handle)

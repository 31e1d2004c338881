"""Flat rows on a GPU: the same bits as on the host, which other tests hold to the reference."""

import pytest
import torch
from cases import Case
from test_gpu_dispatch_combine import assert_same_bits, before, to_gpu

import megatron_ep as ep


@pytest.mark.parametrize("block", range(6))
def test_same_bits_as_on_the_host(block):
    for seed in range(block * 10, (block + 1) * 10):
        case = Case(seed, device="cuda")
        tokens = case.num_tokens()
        ids, weights, x, again = case.ids(tokens), case.weights(tokens), case.reals(tokens), case.reals(tokens)
        with case.cluster() as host, case.cluster(device="cuda") as gpu:
            expected = ep.dispatch(x, ids, weights, buffer=host, expert_alignment=case.alignment, layout="flat")
            ours = ep.dispatch(
                to_gpu(x), to_gpu(ids), to_gpu(weights), buffer=gpu, expert_alignment=case.alignment, layout="flat"
            )
            for name in ("x", "probs", "topk_idx", "tokens_per_expert"):
                assert_same_bits(getattr(ours, name), getattr(expected, name))
            assert not any(ours.overflow)
            out, row_weights = case.reals([len(r) for r in expected.x]), case.row_weights([len(r) for r in expected.x])
            assert_same_bits(ep.combine(to_gpu(out), ours.handle), ep.combine(out, expected.handle))
            weighted = ep.combine(to_gpu(out), ours.handle, to_gpu(row_weights))
            assert_same_bits(weighted, ep.combine(out, expected.handle, row_weights))
            cached = ep.dispatch(to_gpu(again), handle=ours.handle)
            assert_same_bits(cached.x, ep.dispatch(again, handle=expected.handle).x)
            gpu.synchronize()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("share", "slack"), [(0.4, 0), (1, -1), (1, 0), (1, 17)])
def test_max_recv_tokens(seed, share, slack):
    """Also in one launch with the counts, and with gradients."""
    case = Case(4000 + seed, max_tokens=60, device="cuda")
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.integers(tokens)
    results = []
    with case.cluster() as host, case.cluster(device="cuda") as gpu:
        rows = max(len(received) for received in ep.dispatch(x, ids, buffer=host, layout="flat").x)
        size = max(1, max(tokens) if case.nodes > 1 else 1, int(share * rows) + slack)
        out = case.integers([size] * case.world)
        for buffer, device in ((host, "cpu"), (gpu, "cuda")):
            leaves = [t.detach().to(device).requires_grad_() for t in (*x, *weights)]
            sent_ids = [t.to(device) for t in ids]
            given = (leaves[: case.world], sent_ids, leaves[case.world :])
            received = ep.dispatch(*given, buffer=buffer, layout="flat", max_recv_tokens=size)
            y = ep.combine([t.to(device) for t in out], received.handle)
            torch.autograd.backward([*received.x, *received.probs], [*received.x, *received.probs])
            results.append((received, y, [leaf.grad for leaf in leaves]))
            buffer.synchronize()
    (expected, y, grads), (ours, gpu_y, gpu_grads) = results
    for name in ("x", "probs", "topk_idx"):
        assert_same_bits([t.detach() for t in getattr(ours, name)], [t.detach() for t in getattr(expected, name)])
    assert_same_bits(gpu_y, y)
    assert_same_bits(gpu_grads, grads)
    assert [bool(flag) for flag in ours.overflow] == [bool(flag) for flag in expected.overflow]


def test_graph():
    """Captured with a fixed number of rows, and replayed on other tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens, experts = [40, 7, 0, 23], 8
    x = [torch.randn(t, 520, generator=generator).bfloat16().cuda() for t in tokens]
    ids = [torch.rand(t, experts, generator=generator).topk(3, dim=1).indices.cuda() for t in tokens]
    with ep.LocalCluster(1, 4, ep.Config(num_experts=experts, timeout=20), device="cuda") as cluster:

        def round_trip():
            rows = ep.dispatch(x, ids, buffer=cluster, layout="flat", max_recv_tokens=70)
            return rows.x, rows.topk_idx, ep.combine(rows.x, rows.handle)

        round_trip()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = round_trip()
        for replay in range(3):
            for part in x:
                part.normal_()
            for part in ids:
                part.copy_((part + replay) % experts)
            graph.replay()
            cluster.synchronize()
            expected = round_trip()
            counts = [int((i >= 0).any(dim=1).sum()) for i in expected[1]]
            assert_same_bits(before(counts, captured[0]), [t.cpu() for t in before(counts, expected[0])])
            for ours, theirs in zip(captured[1:], expected[1:], strict=True):
                assert_same_bits(ours, [t.cpu() for t in theirs])
        del graph

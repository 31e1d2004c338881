"""Flat rows, one a (token, rank): a limit, gradients, and that their sums are those of grouped rows. All else is in
test_dispatch_combine.py."""

import pytest
import torch
from cases import Case, assert_all_equal
from nightly import a_third
from torch.autograd import gradcheck, gradgradcheck

import megatron_ep as ep
from megatron_ep import reference


@pytest.mark.parametrize("seed", a_third(range(10)))
def test_sums_of_a_rank_s_experts_are_those_of_grouped_rows(seed, device, lines):
    """Where each expert gives the row that it got, times a power of two, every sum and gradient is exact."""
    case = Case(2000 + seed, max_tokens=60, device=device, lines=lines)
    tokens = case.num_tokens()
    ids, x, weights = map(case.there, (case.ids(tokens), case.integers(tokens), case.weights(tokens)))
    results = []
    with case.cluster() as cluster:
        for layout in ("flat", "grouped"):
            leaves = [t.clone().requires_grad_() for t in (*x, *weights)]
            rows = ep.dispatch(leaves[: case.world], ids, leaves[case.world :], buffer=cluster, layout=layout)
            if layout == "flat":
                times = [(i >= 0).sum(dim=1, keepdim=True) for i in rows.topk_idx]
                out = [(r * t).to(case.dtype) for r, t in zip(rows.x, times, strict=True)]
            else:
                out = rows.x
            y = ep.combine(out, rows.handle)
            torch.autograd.backward([*y, *rows.probs], [*x, *(2 * p.detach() for p in rows.probs)])
            results.append([t.detach().cpu() for t in (*y, *(leaf.grad for leaf in leaves))])
    assert_all_equal(*results)


@pytest.mark.parametrize("seed", a_third(range(12)))
@pytest.mark.parametrize(("share", "slack"), [(0.2, 0), (0.9, 0), (1, -1), (1, 0), (1, 17)])
def test_max_recv_tokens(seed, share, slack, device, lines, used_memory):
    case = Case(4000 + seed, max_tokens=60, device=device, lines=lines)
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.integers(tokens)
    with_gradient = seed % 2 == 0  # then rows behind the last are zeros, too
    x = [rows.requires_grad_(with_gradient) for rows in x]
    arriving = [len(reference.flat_rows(ids, rank, case.num_experts)) for rank in range(case.world)]
    size = max(1, int(share * max(arriving)) + slack)
    if device == "cuda" and case.nodes > 1:  # there must be room for rows that only pass through a rank
        size = max(size, *tokens)
    with case.cluster() as cluster:
        limits = {"expert_alignment": case.alignment, "max_recv_tokens": size}
        rows = ep.dispatch(*map(case.there, (x, ids, weights)), buffer=cluster, layout="flat", **limits)
        if not with_gradient:
            for row, ids_of_row in zip(rows.x, rows.topk_idx, strict=True):
                row[(ids_of_row < 0).all(1)] = 0
        expected = reference.flat_dispatch(x, ids, weights, case.num_experts, **limits)
        for ours, theirs in zip((rows.x, rows.topk_idx, rows.probs, rows.tokens_per_expert), expected, strict=True):
            assert_all_equal(ours, theirs)
        assert [bool(flag) for flag in rows.overflow] == [count > size for count in arriving]
        out = case.integers([size] * case.world)
        y = ep.combine(case.there(out), rows.handle)
        assert_all_equal(y, reference.flat_combine(out, ids, case.num_experts, size))


@pytest.mark.numerical
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (1, 3), (2, 2)])
def test_gradients(nodes, ranks_per_node, lines):
    world = nodes * ranks_per_node
    generator = torch.Generator().manual_seed(world)
    tokens, experts, topk = [3, 0, 2, 4][:world], 2 * world, 2
    ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices for t in tokens]
    ids[0][0, 0] = -1
    new = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    x, w = [torch.randn(t, 2, **new) for t in tokens], [torch.rand(t, topk, **new) for t in tokens]
    config = ep.Config(num_experts=experts, max_tokens=max(tokens) if lines else None)
    with ep.LocalCluster(*((1, world) if lines else (nodes, ranks_per_node)), config) as cluster:

        def layer(*inputs):
            rows = ep.dispatch(list(inputs[:world]), ids, list(inputs[world:]), buffer=cluster, layout="flat")
            factors = [p.sum(dim=1) for p in rows.probs]
            out = [torch.tanh(r) * f.unsqueeze(1) for r, f in zip(rows.x, factors, strict=True)]
            return tuple(
                a + b
                for a, b in zip(
                    ep.combine(out, rows.handle), ep.combine([r * r for r in rows.x], rows.handle, factors), strict=True
                )
            )

        assert gradcheck(layer, (*x, *w))
        if world < 4:
            assert gradgradcheck(layer, (*x, *w))


def test_wrong_arguments():
    x, ids = [torch.ones(2, 4)], [torch.tensor([[0], [1]])]
    with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:
        with pytest.raises(ValueError, match="layout is 'rows', must be 'grouped' or 'flat'"):
            ep.dispatch(x, ids, buffer=cluster, layout="rows")
        with pytest.raises(ValueError, match="expert_capacity is 3, must be None with layout 'flat'"):
            ep.dispatch(x, ids, buffer=cluster, layout="flat", expert_capacity=3)
        with pytest.raises(ValueError, match="must hold distinct ids"):
            ep.dispatch(x, [torch.tensor([[0, 1], [1, 1]])], buffer=cluster, layout="flat")
        handle = ep.dispatch(x, ids, buffer=cluster, layout="flat").handle
        with pytest.raises(ValueError, match="layout must not be given with a handle"):
            ep.dispatch(x, handle=handle, layout="flat")

"""Gradients: dispatch and combine are each other's transpose."""

import functools

import pytest
import torch
from cases import leaves, need_sums
from torch.autograd import gradcheck, gradgradcheck

import megatron_ep as ep
from megatron_ep.normal import cached_plans, plan

pytestmark = pytest.mark.numerical


def cluster_of(nodes, ranks_per_node, lines, device="cpu"):
    """Two experts a rank. By lines all ranks are in one node."""
    world = nodes * ranks_per_node
    config = ep.Config(num_experts=2 * world, max_tokens=4 if lines else None)
    return ep.LocalCluster(*((1, world) if lines else (nodes, ranks_per_node)), config, device=device)


@pytest.mark.parametrize("options", [{"expert_alignment": 2}, {"layout": "flat"}], ids=["grouped", "flat"])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (2, 1), (1, 4), (2, 2), (3, 2)])
def test_gradcheck_through_experts(nodes, ranks_per_node, options, device, lines):
    """The probs that come with the rows are used before a combine, and as the weights of another one."""
    world = nodes * ranks_per_node
    ids, x, w = leaves(world, 2 * world, min(3, 2 * world), device=device)
    with cluster_of(nodes, ranks_per_node, lines, device) as cluster:

        def layer(*inputs):
            rows = ep.dispatch(list(inputs[:world]), ids, list(inputs[world:]), buffer=cluster, **options)
            out, factors = [], rows.probs
            if "layout" in options:
                factors = [probs.sum(dim=1) for probs in rows.probs]  # of a row's experts
            for rank in range(world):
                scale = 1.3
                if "layout" not in options:
                    expert = torch.arange(2).repeat_interleave(rows.tokens_per_expert[rank].cpu())
                    scale += expert.unsqueeze(1).to(device)
                out.append(torch.tanh(rows.x[rank] * scale + 0.1 * rank))
            applied = [r * f.unsqueeze(1) for r, f in zip(out, factors, strict=True)]
            return *ep.combine(applied, rows.handle), *ep.combine(out, rows.handle, factors)

        assert gradcheck(layer, (*x, *w))
        if world == 2 and device == "cpu":
            assert gradgradcheck(layer, (*x, *w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_gradients_of_weighted_combine(dtype, needs, device, lines):
    """In which precision, and zeros for padding whatever it holds."""
    need_sums(dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ids, x, _ = leaves(4, 8, 3, hidden=70)
    generator = torch.Generator(device).manual_seed(0)
    with cluster_of(2, 2, lines, device) as cluster:
        ids, x = [idx.to(device) for idx in ids], [t.detach().to(device, dtype) for t in x]
        ones = [torch.ones(idx.shape, device=device) for idx in ids]
        received = ep.dispatch(x, ids, ones, buffer=cluster, expert_alignment=4)
        is_row = [p > 0 for p in received.probs]
        assert not all(rows.all() for rows in is_row)
        rows, weights = [], []
        for mask in is_row:
            rows.append(torch.randn(len(mask), 70, generator=generator, device=device).to(dtype))
            weights.append(torch.randn(len(mask), generator=generator, dtype=wide, device=device))
            rows[-1][~mask] = torch.nan
            weights[-1][~mask] = torch.inf
        for tensor, need in [*((r, needs[0]) for r in rows), *((w, needs[1]) for w in weights)]:
            tensor.requires_grad_(need)
        y = ep.combine(rows, received.handle, weights)
        grads = [torch.randn(t.shape, generator=generator, device=device).to(dtype) for t in y]
        torch.autograd.backward(y, grads)
        sent = ep.dispatch(grads, handle=received.handle).x
    for row, weight, grad, mask in zip(rows, weights, sent, is_row, strict=True):
        assert (row.grad is not None, weight.grad is not None) == needs
        if needs[0]:
            expected = (grad.to(wide) * weight.detach().unsqueeze(1)).to(dtype)
            assert torch.equal(row.grad, torch.where(mask.unsqueeze(1), expected, 0))
        if needs[1]:
            expected = (grad.to(wide) * row.detach().to(wide)).sum(dim=1)
            assert weight.grad.dtype == wide
            close = dict(rtol=0, atol=0) if device == "cpu" else dict(rtol=1e-4, atol=1e-3)  # a GPU's sum has no order
            torch.testing.assert_close(weight.grad, torch.where(mask, expected, 0), **close)


def test_only_one_input_needs_a_gradient(lines):
    ids, x, w = leaves(4, 8, 3)
    with cluster_of(2, 2, lines) as cluster:
        frozen = [tensor.detach() for tensor in x]
        rows = ep.dispatch(frozen, ids, w, buffer=cluster)
        sum((p**2).sum() for p in rows.probs).backward()
        for weight, idx in zip(w, ids, strict=True):
            assert torch.equal(weight.grad, torch.where(idx >= 0, 2 * weight, 0).detach())
        rows = ep.dispatch(x, ids, buffer=cluster)
        sum(r.sum() for r in rows.x).backward()
        for tensor, idx in zip(x, ids, strict=True):
            assert torch.equal(tensor.grad, (idx >= 0).sum(dim=1, keepdim=True).expand_as(tensor).double())


def test_neither_function_keeps_its_input(lines):
    ids, x, w = leaves(4, 8, 3)
    with cluster_of(2, 2, lines) as cluster:
        inputs = [tensor.detach().clone().requires_grad_() for tensor in x]
        rows = ep.dispatch(inputs, ids, w, buffer=cluster)
        y = ep.combine([r * 1 for r in rows.x], rows.handle)
        saved = {id(t) for output in (*rows.x, *y) for t in getattr(output.grad_fn, "saved_tensors", ())}
        assert not saved
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
        assert storages.isdisjoint(r.untyped_storage().data_ptr() for r in rows.x)


def calls_of(mode, cluster, tokens, hidden, topk, dtype):
    """Dispatch and combine through rings, or of the low-latency mode in a layout."""
    if mode == "normal":
        return functools.partial(ep.dispatch, buffer=cluster), ep.combine
    calls = ep.LowLatency(cluster, max_tokens=tokens, hidden=hidden, topk=topk, dtype=dtype)
    return functools.partial(calls.dispatch, layout=mode), calls.combine


@pytest.mark.parametrize("mode", ["normal", "masked", "grouped"])
def test_outputs_may_be_changed_in_place(mode):
    """Large outputs live in pooled memory; autograd must not take them for views."""
    x = [torch.randn(300, 1024, requires_grad=True)]
    ids = [torch.zeros(300, 1, dtype=torch.int64)]
    with ep.LocalCluster(1, 1, ep.Config(num_experts=1)) as cluster:
        dispatch, combine = calls_of(mode, cluster, 300, 1024, 1, torch.float32)
        rows = dispatch(x, ids)
        y = combine([rows.x[0].mul_(2)], rows.handle)
        y[0].add_(1).sum().backward()
    assert torch.equal(x[0].grad, torch.full_like(x[0], 2))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("ends", ["dispatch", "combine", "weighted"])
def test_others_hear_of_a_pass_that_fails(ends, backward, monkeypatch):
    """Or they would wait for this rank's call in it."""
    ids, x, _ = leaves(1, 2, 1)
    told = []
    with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:

        def run():
            received = ep.dispatch(x, ids, buffer=cluster)
            if ends == "dispatch":
                return received.x
            if not backward:
                monkeypatch.setattr(plan.CombinePlan, "run", lambda *_: 1 // 0)
            weights = [torch.ones(len(received.x[0]), dtype=torch.float64)]
            return ep.combine(received.x, received.handle, weights if ends == "weighted" else None)

        monkeypatch.setattr(type(cluster._group), "abort_peers", lambda group, error: told.append(error))
        if ends == "dispatch" and not backward:
            monkeypatch.setattr(plan.DispatchPlan, "run", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            y = run()
            monkeypatch.setattr(
                cached_plans, "combine_plan" if ends == "dispatch" else "dispatch_plan", lambda *_, **__: 1 // 0
            )
            y[0].sum().backward()
    assert len(told) == 1 and isinstance(told[0], ZeroDivisionError)


class Negated(torch.autograd.Function):
    """Its gradient is a view that negates lazily."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch._neg_view(grad.clone())


@pytest.mark.parametrize("mode", ["normal", "masked"])
def test_a_gradient_that_is_negated_lazily(mode):
    ids, x, w = leaves(1, 4, 2)
    with ep.LocalCluster(1, 1, ep.Config(num_experts=4)) as cluster:
        dispatch, combine = calls_of(mode, cluster, 4, 3, 2, torch.float64)
        rows = dispatch(x, ids, w)
        [y] = combine(rows.x, rows.handle)
        Negated.apply(y).sum().backward()
    choices = (ids[0] >= 0).sum(dim=1, keepdim=True).double()
    assert torch.equal(x[0].grad, -choices.expand_as(x[0]))

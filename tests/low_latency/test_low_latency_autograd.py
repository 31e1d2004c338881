"""Gradients of the low-latency mode: dispatch and combine are each other's transpose."""

import pytest
import torch
from cases import leaves
from torch.autograd import gradcheck, gradgradcheck

import megatron_ep as ep


@pytest.mark.parametrize("ends", ["dispatch", "combine", "weighted"])
def test_others_hear_of_a_backward_pass_that_fails(ends, monkeypatch):
    """Or they would wait for this rank's call in it."""
    ids, x, weights = leaves(1, 2, 1)
    with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=3, hidden=3, topk=1, dtype=torch.float64)
        rows = low_latency.dispatch(x, ids)
        y = (
            rows.x
            if ends == "dispatch"
            else low_latency.combine(rows.x, rows.handle, weights[: ends == "weighted"] or None)
        )
        told = []
        monkeypatch.setattr(type(cluster._group), "abort_peers", lambda group, error: told.append(error))
        plan = "plan_combine" if ends == "dispatch" else "plan"
        monkeypatch.setattr(low_latency._calls, plan, lambda *args, **kwargs: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            y[0].sum().backward()
        assert len(told) == 1 and isinstance(told[0], ZeroDivisionError)


LAYOUTS = ({"layout": "masked"}, {"layout": "grouped", "expert_alignment": 4})


@pytest.mark.parametrize("sum_at", ["token", "expert"])
@pytest.mark.parametrize("options", LAYOUTS)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 1), (1, 4), (2, 2)])
def test_gradcheck_through_experts(nodes, ranks_per_node, options, sum_at, device):
    world = nodes * ranks_per_node
    ids, x, w = leaves(world, 2 * world, min(3, 2 * world), device=device)
    with ep.LocalCluster(nodes, ranks_per_node, ep.Config(num_experts=2 * world), device=device) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=3, topk=3, dtype=torch.float64)

        def layer(*inputs):
            rows = low_latency.dispatch(list(inputs[:world]), ids, list(inputs[world:]), **options)
            out = [
                torch.tanh(r * (1.3 + 0.1 * i)) * p.unsqueeze(-1)
                for i, (r, p) in enumerate(zip(rows.x, rows.probs, strict=True))
            ]
            return tuple(low_latency.combine(out, rows.handle, sum_at=sum_at))

        def weights_at_token(*inputs):
            rows = low_latency.dispatch(list(inputs[:world]), ids, **options)
            out = [torch.tanh(r) for r in rows.x]
            return tuple(low_latency.combine(out, rows.handle, list(inputs[world:])))

        def weights_at_expert(*inputs):
            rows = low_latency.dispatch(list(inputs[:world]), ids, list(inputs[world:]), **options)
            out = [torch.tanh(r) for r in rows.x]
            return tuple(low_latency.combine(out, rows.handle, row_weights=rows.probs, sum_at="expert"))

        assert gradcheck(layer, (*x, *w))
        assert gradcheck(weights_at_token if sum_at == "token" else weights_at_expert, (*x, *w))
        if world == 1:
            assert gradgradcheck(weights_at_token if sum_at == "token" else weights_at_expert, (*x, *w))


@pytest.mark.parametrize("options", LAYOUTS)
def test_rows_without_a_token_get_zeros(options):
    """Whatever they hold, nothing of them reaches a gradient."""
    ids, x, w = leaves(4, 8, 3)
    w = [weight.detach().float().requires_grad_() for weight in w]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=8)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=3, topk=3, dtype=torch.float64)
        rows = low_latency.dispatch([tensor.detach().float() for tensor in x], ids, **options)
        out = []
        for rank in range(4):
            there = rows.handle.is_row(rank).view(rows.x[rank].shape[:-1])
            assert there.sum() == rows.recv_counts[rank].sum() < there.numel()
            noise = torch.where(there.unsqueeze(-1), torch.ones_like(rows.x[rank]), torch.nan)
            out.append(noise.requires_grad_())
        y = low_latency.combine(out, rows.handle, w)
        sum(t.sum() for t in y).backward()
        for rank in range(4):
            there = rows.handle.is_row(rank).view(rows.x[rank].shape[:-1])
            assert torch.equal(out[rank].grad != 0, there.unsqueeze(-1).expand_as(out[rank]))
            assert torch.equal(w[rank].grad, torch.where(ids[rank] >= 0, 3.0, 0.0))


@pytest.mark.parametrize("layout", ["masked", "grouped"])
def test_counts_may_be_changed_in_place(layout):
    """As users of masked GEMMs do, who limit them."""
    (ids, x, w), gradients = leaves(4, 8, 3), []
    with ep.LocalCluster(2, 2, ep.Config(num_experts=8)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=3, topk=3, dtype=torch.float64)
        for changed in (False, True):
            rows = low_latency.dispatch(x, ids, layout=layout)
            for part in (*rows.recv_counts, *rows.expert_starts) if changed else ():
                part.zero_()
            y = low_latency.combine([part.sin() for part in rows.x], rows.handle, topk_weights=w)
            gradients.append(torch.autograd.grad(sum(part.sum() for part in y), [*x, *w]))
    assert all(map(torch.equal, *gradients)) and any(part.any() for part in gradients[0])


def test_gradients_through_hooks():
    ids, x, w = leaves(2, 4, 2)
    with ep.LocalCluster(1, 2, ep.Config(num_experts=4)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=3, topk=2, dtype=torch.float64)

        def layer(*inputs):
            rows, hook = low_latency.dispatch(list(inputs[:2]), ids, return_recv_hook=True)
            hook()
            y, hook = low_latency.combine(
                [torch.sin(r) for r in rows.x], rows.handle, list(inputs[2:]), return_recv_hook=True
            )
            hook()
            return tuple(y)

        assert gradcheck(layer, (*x, *w))

"""torch.compile on a GPU: one graph, with the results and gradients of eager mode."""

import pytest
import torch

import megatron_ep as ep

EXPERTS = 8


@pytest.mark.parametrize("most", [64, None])
def test_one_graph(most):
    generator = torch.Generator("cuda").manual_seed(0)
    x = [torch.randn(9, 32, device="cuda", generator=generator, requires_grad=True) for _ in range(2)]
    ids = [torch.rand(9, EXPERTS, device="cuda", generator=generator).topk(2).indices for _ in range(2)]
    weights = [torch.rand(9, 2, device="cuda", generator=generator, requires_grad=True) for _ in range(2)]
    with ep.LocalCluster(2, 1, ep.Config(num_experts=EXPERTS, timeout=20), device="cuda") as cluster:

        def layer(x, weights):
            rows = ep.dispatch(x, ids, weights, buffer=cluster, max_recv_tokens=most)
            return ep.combine([torch.relu(row) for row in rows.x], rows.handle, weights=rows.probs)

        def outputs_and_gradients(function):
            outputs = function(x, weights)
            return [*outputs, *torch.autograd.grad(sum(out.square().sum() for out in outputs), [*x, *weights])]

        ours = outputs_and_gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"))
        assert all(map(torch.equal, ours, outputs_and_gradients(layer)))
        cluster.synchronize()

"""megatron_ep.overlap without a GPU: a call is over when it returns."""

import torch

import megatron_ep as ep
from megatron_ep import overlap


def test_a_call_on_the_host() -> None:
    with ep.LocalCluster(1, 2, ep.Config(num_experts=2)) as cluster:
        x, ids = [torch.ones(1, 3), torch.zeros(1, 3)], [torch.tensor([[1]]), torch.tensor([[0]])]
        pending = overlap.start(ep.dispatch, x, ids, buffer=cluster)
        assert pending.event is None
        rows = pending.wait()
        assert torch.equal(rows.x[1], x[0])
        y = overlap.start(ep.combine, rows.x, rows.handle).wait()
        assert all(map(torch.equal, y, x))

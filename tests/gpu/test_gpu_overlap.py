"""Dispatch and combine on the communication stream."""

import torch

import megatron_ep as ep
from megatron_ep import overlap


def test_same_result_and_gradients_as_on_the_current_stream():
    world, experts, generator = 4, 16, torch.Generator().manual_seed(0)
    ids = [torch.rand(256, experts, generator=generator).topk(3, dim=1).indices.cuda() for _ in range(world)]
    values = [torch.randn(256, 512, generator=generator).cuda() for _ in range(world)]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=experts, timeout=10), device="cuda") as cluster:

        def layer(call):
            x = [value.clone().requires_grad_() for value in values]
            rows = call(ep.dispatch, x, ids, buffer=cluster)
            y = call(ep.combine, [torch.tanh(r) for r in rows.x], rows.handle)
            sum(part.square().sum() for part in y).backward()
            return [part.detach() for part in y], [leaf.grad for leaf in x]

        expected = layer(lambda function, *args, **kwargs: function(*args, **kwargs))
        for _ in range(3):
            ours = layer(lambda function, *args, **kwargs: overlap.start(function, *args, **kwargs).wait())
            for a, b in zip((*ours[0], *ours[1]), (*expected[0], *expected[1]), strict=True):
                assert torch.equal(a, b)


def test_previous_event_orders_the_call():
    with ep.LocalCluster(1, 2, ep.Config(num_experts=2, timeout=10), device="cuda") as cluster:
        ids = [torch.zeros(64, 1, dtype=torch.int64, device="cuda") for _ in range(2)]
        x = [torch.zeros(64, 64, device="cuda") for _ in range(2)]
        handle = ep.dispatch(x, ids, buffer=cluster).handle
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)
            for part in x:
                part.fill_(1)
            ready = other.record_event()
        rows = overlap.start(ep.dispatch, x, handle=handle, previous_event=ready).wait()
        assert all(bool((part == 1).all()) for part in rows.x)

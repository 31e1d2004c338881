"""Layers and calls over a fabric between machines, which all ranks of `LocalRanks` run at once: the bits of one
machine. The machines are this one, under several names."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from cards import cards_with
from forced_machines import machines_of

import megatron_ep as ep

W = 4


def cards_in_any_order(fabric: str) -> AbstractContextManager[None]:
    """Cards whose writes become visible late, and in any order."""
    return nullcontext() if fabric == "tcp" else cards_with(seed=1 + dist.get_rank())


def between_machines(fabric: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) where every rank is on a machine by itself."""
    with machines_of(1, fabric):
        return function(*arguments)


def inputs(hidden: int, dtype: torch.dtype, tokens=(37, 0, 1, 130)):
    generator = torch.Generator().manual_seed(hidden)
    x = [torch.randn(t, hidden, generator=generator).to(dtype) for t in tokens]
    ids = [torch.rand(t, 16, generator=generator).topk(3, dim=1).indices for t in tokens]
    weights = [torch.rand(t, 3, generator=generator, dtype=torch.float64) for t in tokens]
    wide = dtype == torch.float64
    return x, ids, weights if wide else [w.float() for w in weights]


def layer(buffer, x, ids, weights):
    """Dispatch, something nonlinear, combine, and both backward passes."""
    lists = isinstance(x, list)
    leaves = [t.clone().requires_grad_() for t in (x if lists else [x])]
    scales = [t.clone().requires_grad_() for t in (weights if lists else [weights])]
    one = (lambda items: items) if lists else (lambda items: items[0])
    rows = ep.dispatch(one(leaves), ids, one(scales), buffer=buffer)
    out = [r.tanh() for r in rows.x] if lists else rows.x.tanh()
    y = ep.combine(out, rows.handle, weights=rows.probs)
    sum(part.double().square().sum() for part in (y if lists else [y])).backward()
    return [*(y if lists else [y])], [t.grad for t in leaves], [t.grad for t in scales]


def run_layers(per_machine: int, per_node: int, fabric: str = "tcp") -> None:
    rank = dist.get_rank()
    topology = ep.Topology(W // per_node, per_node)
    with cards_in_any_order(fabric), machines_of(per_machine, fabric):
        buffer = ep.Buffer(None, ep.Config(num_experts=16, timeout=20), topology)
        assert buffer.fabric == fabric and buffer._group.spans_machines
        for hidden, dtype in ((33, torch.float32), (7, torch.float64), (512, torch.bfloat16), (7168, torch.float16)):
            x, ids, weights = inputs(hidden, dtype)
            config = ep.Config(num_experts=16)
            with ep.LocalCluster(topology.nodes, per_node, config) as cluster:
                expected = [parts[rank] for parts in layer(cluster, x, ids, weights)]
            for _ in range(2):
                found = layer(buffer, x[rank], ids[rank], weights[rank])
                assert all(torch.equal(mine[0], theirs) for mine, theirs in zip(found, expected, strict=True))
            buffer.reset()
        buffer.close()


def run_low_latency(per_machine: int, fabric: str = "tcp") -> None:
    rank = dist.get_rank()
    x, ids, weights = inputs(64, torch.bfloat16, (8, 0, 3, 8))
    sizes = dict(max_tokens=8, hidden=64, topk=3, dtype=torch.bfloat16)
    topology, config = ep.Topology(W // per_machine, per_machine), ep.Config(num_experts=16, timeout=20)

    def call(low_latency, x, ids, weights):
        received = low_latency.dispatch(x, ids)
        return low_latency.combine(received.x, received.handle, weights)

    with ep.LocalCluster(topology.nodes, per_machine, config) as cluster:
        expected = call(ep.LowLatency(cluster, **sizes), x, ids, weights)[rank]
    with (
        cards_in_any_order(fabric),
        machines_of(per_machine, fabric),
        ep.Buffer(None, config, topology) as buffer,
    ):
        for _ in range(2):  # the second part is made while the network runs, after the first has gone
            low_latency = ep.LowLatency(buffer, **sizes)
            for _ in range(5):
                assert torch.equal(call(low_latency, x[rank], ids[rank], weights[rank]), expected)
            del low_latency
            dist.barrier()

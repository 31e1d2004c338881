"""Random plans of sequences, rows that go by them, and what the specification makes of these."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import megatron_ep as ep
from megatron_ep.buffer.arguments import summable_dtypes
from megatron_ep.sequences import reference
from megatron_ep.sequences.dispatcher import SequenceDispatcher
from megatron_ep.sequences.plan import SequencePlan, Shard

WIDTHS = ((4, 2, 8, 8), (2, 2, 3, 5), (8, 1, 64, 64), (3, 3, 24, 16))  # heads, KV heads, width of Q and K, of V


def random_plan(world: int, r: random.Random, max_rows: int = 12) -> SequencePlan:
    """Documents that are short or long, over all ranks or on one, some of their shards without rows."""
    shards = []
    for document in range(r.randint(0, 6)):
        home, attention = (r.choice([None, r.randrange(world)]) for _ in range(2))
        for index in range(r.choice([1, 2, r.randint(1, 2 * world + 2)])):
            ranks = (r.randrange(world) if rank is None else rank for rank in (home, attention))
            shards.append(Shard(document, index, *ranks, r.choice([0, 1, r.randint(1, max_rows)])))
    return SequencePlan.build(shards, world)


@dataclass
class Case:
    """A plan, a topology, and rows. Everything follows from the seed."""

    seed: int
    max_ranks_a_side: int = 4
    device: str = "cpu"  # where it runs, whose sums are of fewer types on a GPU
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.nodes, self.ranks_per_node = (r.randint(1, self.max_ranks_a_side) for _ in range(2))
        self.world = self.nodes * self.ranks_per_node
        self.plan = random_plan(self.world, r)
        self.dtype, self.widths = r.choice(summable_dtypes(self.device)), r.choice(WIDTHS)
        heads, kv_heads, width, v_width = self.widths
        self.shapes = ((heads, width), (kv_heads, width), (kv_heads, v_width))
        most = max(heads * width, kv_heads * (width + v_width)) * self.dtype.itemsize + 16 * self.plan.max_copies + 512
        widened = 2 * kv_heads * max(width, v_width) * 4 + 16 * self.plan.max_copies + 512
        self.config = ep.Config(
            num_experts=self.world * r.randint(1, 2),
            timeout=60,
            tuning=ep.Tuning(
                channels=r.randint(1, 4),
                nvl_ring_bytes=max(most, widened) * r.choice([1, 2, 8]),
                rdma_ring_bytes=max(most, widened) * r.choice([1, 3, 8]),
                rdma_chunk_tokens=r.choice([1, 2, 16]),
            ),
        )

    def cluster(self, **options) -> ep.LocalCluster:
        return ep.LocalCluster(self.nodes, self.ranks_per_node, self.config, device=self.device, **options)

    def rows(self, counts: torch.Tensor, *shape: int) -> list[torch.Tensor]:
        """For each rank."""
        return [
            torch.randn(n, *shape, dtype=torch.float64, generator=self.generator).to(self.dtype)
            for n in counts.tolist()
        ]

    def inputs(self) -> list[list[torch.Tensor]]:
        """q, k and v."""
        return [self.rows(self.plan.q_rows.sum(1), *shape) for shape in self.shapes]

    def gradients(self) -> list[list[torch.Tensor]]:
        """Of what a dispatch returns."""
        counts = (self.plan.q_rows.sum(0), self.plan.kv_rows.sum(0), self.plan.kv_rows.sum(0))
        return [self.rows(n, *shape) for n, shape in zip(counts, self.shapes, strict=True)]

    def expected_gradients(self, gradients: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        q, *kv = gradients
        return [
            reference.combine(q, self.plan),
            *(reference.sum_copies(copies, self.plan, self.ranks_per_node) for copies in kv),
        ]


def many_copies(nodes: int, ranks_per_node: int, dtype: torch.dtype, device: str = "cpu") -> Case:
    """A document whose first row goes to all ranks."""
    case = Case(0, device=device)
    case.nodes, case.ranks_per_node, case.dtype = nodes, ranks_per_node, dtype
    case.world = world = nodes * ranks_per_node
    shards = [Shard(0, i, world - 1 - i, i, 2) for i in range(world)] + [Shard(1, i, 0, i % 3, 1) for i in range(5)]
    case.plan = SequencePlan.build(shards, world)
    case.config = ep.Config(num_experts=world, tuning=ep.Tuning(channels=2))
    return case


def assert_equal(ours: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype and a.is_contiguous() and torch.equal(a.cpu(), b)


def check(case: Case, cluster: ep.LocalCluster, dispatcher: SequenceDispatcher) -> None:
    """A dispatch, a combine of other rows, and the gradients of both."""
    inputs, gradients = case.inputs(), case.gradients()
    leaves = [[x.to(cluster.device).requires_grad_() for x in tensors] for tensors in inputs]
    moved = dispatcher.dispatch(*leaves, case.plan)
    for ours, expected in zip(moved, reference.dispatch(*inputs, case.plan), strict=True):
        assert_equal(ours, expected)
    outputs = [x for tensors in moved for x in tensors]
    sent = [x.to(cluster.device) for tensors in gradients for x in tensors]
    grads = torch.autograd.grad(outputs, [x for tensors in leaves for x in tensors], sent)
    assert_equal(grads, [x for tensors in case.expected_gradients(gradients) for x in tensors])

    out = [x.to(cluster.device).requires_grad_() for x in gradients[0]]
    back = dispatcher.combine(out, case.plan)
    assert_equal(back, reference.combine(gradients[0], case.plan))
    grads = torch.autograd.grad(back, out, leaves[0])
    assert_equal(grads, reference.dispatch(inputs[0], inputs[0], inputs[0], case.plan)[0])

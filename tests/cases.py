"""Random shapes for the tests of dispatch and combine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

import megatron_ep as ep

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
META_BYTES = 16  # a row's tag on the wire


def slot_bytes(hidden: int, dtype: torch.dtype, topk: int) -> int:
    """An upper bound of a row in a ring: payload, tag, ids, indices and weights, rounded up to 16 or 128 bytes."""
    size = hidden * dtype.itemsize
    return size + META_BYTES + 16 * topk + (4 * 16 if size < 1024 else 2 * 128)


@dataclass
class Case:
    """A random case. Everything follows from the seed."""

    seed: int
    max_tokens: int = 300
    max_ranks_per_side: int = 4
    nodes: int = field(init=False)
    ranks_per_node: int = field(init=False)

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.random = r
        self.generator = torch.Generator().manual_seed(self.seed)
        self.nodes, self.ranks_per_node = r.randint(1, self.max_ranks_per_side), r.randint(1, self.max_ranks_per_side)
        self.world = self.nodes * self.ranks_per_node
        self.num_experts = r.randint(1, 64 // self.world) * self.world
        self.topk = r.choice([1, min(8, self.num_experts), r.randint(1, min(8, self.num_experts))])
        self.hidden = r.choice([8, 1000, r.randint(8, 1000), r.randint(8, 80)])
        self.dtype = r.choice(DTYPES)
        self.alignment = r.choice([1, 1, 4, 16])
        row = slot_bytes(self.hidden, self.dtype, self.topk)
        self.config = ep.Config(
            num_experts=self.num_experts,
            channels=r.randint(1, 8),
            timeout=60,
            nvl_ring_bytes=row * r.choice([1, 2, 3, 8]),
            rdma_ring_bytes=row * r.choice([1, 2, 5, 8]),
            rdma_chunk_tokens=r.choice([1, 2, 16]),
        )

    def num_tokens(self) -> list[int]:
        """Per rank: none, one, or anything."""
        r = self.random
        return [
            r.choice([0, 1, r.randint(0, self.max_tokens), r.randint(0, self.max_tokens)]) for _ in range(self.world)
        ]

    def ids(self, num_tokens: list[int]) -> list[torch.Tensor]:
        """Spread, all to the same experts, or with holes."""
        kind = self.random.choice(["spread", "same", "holes"])
        out = []
        for tokens in num_tokens:
            scores = torch.rand(tokens, self.num_experts, generator=self.generator)
            if kind == "same":
                scores[:, : self.topk] += 2
            ids = scores.topk(self.topk, dim=1).indices
            if kind == "holes":
                ids[torch.rand(ids.shape, generator=self.generator) < 0.4] = -1
            out.append(ids)
        return out

    def integers(self, num_tokens: list[int]) -> list[torch.Tensor]:
        """Rows whose sums are exact in every dtype."""
        return [torch.randint(-8, 9, (t, self.hidden), generator=self.generator).to(self.dtype) for t in num_tokens]

    def reals(self, num_tokens: list[int]) -> list[torch.Tensor]:
        return [
            torch.randn(t, self.hidden, generator=self.generator, dtype=torch.float64).to(self.dtype)
            for t in num_tokens
        ]

    def weights(self, num_tokens: list[int]) -> list[torch.Tensor]:
        return [torch.rand(t, self.topk, generator=self.generator) for t in num_tokens]

    def cluster(self, **options) -> ep.LocalCluster:
        return ep.LocalCluster(self.nodes, self.ranks_per_node, self.config, **options)

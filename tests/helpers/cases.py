"""Random shapes for the tests of dispatch and combine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.buffer.rank_group import summable_dtypes

META_BYTES = 16  # a row's tag on the wire


def slot_bytes(hidden: int, dtype: torch.dtype, topk: int) -> int:
    """An upper bound of a row in a ring: payload, tag, ids, indices and weights, rounded up to 16 or 128 bytes."""
    size = hidden * dtype.itemsize
    return size + META_BYTES + 16 * topk + (4 * 16 if size < 1024 else 2 * 128)


def summed_on_gpus(*rows: tuple[int, torch.dtype]) -> list[tuple[int, torch.dtype]]:
    """Of rows, elements and their type, those that this build sums."""
    return [row for row in rows if row[1] in summable_dtypes("cuda")]


@dataclass
class Case:
    """A random case. Everything follows from the seed."""

    seed: int
    max_tokens: int = 300
    max_ranks_per_side: int = 4
    device: str = "cpu"  # where it runs, whose sums are of fewer types on a GPU
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
        self.dtype = r.choice(summable_dtypes(self.device))
        self.alignment = r.choice([1, 1, 4, 16])
        row = slot_bytes(self.hidden, self.dtype, self.topk)
        self.config = ep.Config(
            num_experts=self.num_experts,
            timeout=60,
            tuning=ep.Tuning(
                channels=r.randint(1, 8),
                nvl_ring_bytes=row * r.choice([1, 2, 3, 8]),
                rdma_ring_bytes=row * r.choice([1, 2, 5, 8]),
                rdma_chunk_tokens=r.choice([1, 2, 16]),
                local_pass=self.seed % 2 == 1,
            ),
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

    def wide(self) -> torch.dtype:
        """What combine computes in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def row_weights(self, num_rows: list[int]) -> list[torch.Tensor]:
        """With all the bits that a weight can have."""
        return [torch.randn(r, generator=self.generator, dtype=self.wide()) for r in num_rows]

    def combine(
        self, rows: list[torch.Tensor], weights: list[torch.Tensor], ids: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The weighted combine bit by bit: the kernels' own order of products, sums and roundings."""
        products: dict[tuple[int, int], torch.Tensor] = {}
        all_terms, first = torch.cat(rows).to(self.wide()) * torch.cat(weights).unsqueeze(1), 0
        for expert in range(self.num_experts):
            token, k, padding = reference.expert_rows(ids, expert, self.alignment)
            for i, place in enumerate(zip(token.tolist(), k.tolist(), strict=True)):
                products[place] = all_terms[first + i]
            first += len(token) + padding

        def sum_by(terms: dict, key) -> dict:
            """Sums of the terms with the same key, in their order, rounded to the dtype in which they travel."""
            sums: dict = {}
            for place, term in terms.items():
                before = sums.pop(key(place), None)  # a sum takes the place of its last term
                sums[key(place)] = term if before is None else before + term
            return {place: total.to(self.dtype).to(self.wide()) for place, total in sums.items()}

        out, token = [], 0
        for source, idx in enumerate(ids):
            home = source // self.ranks_per_node
            y = torch.zeros(len(idx), self.hidden, dtype=self.dtype)
            for row, experts in enumerate(idx.tolist()):
                terms = {
                    (k, e * self.world // self.num_experts): products[token, k] for k, e in enumerate(experts) if e >= 0
                }
                by_rank = sum_by(terms, lambda place: place[1])
                others = {r: s for r, s in by_rank.items() if r // self.ranks_per_node != home}
                by_node = sum_by(others, lambda rank: rank // self.ranks_per_node)
                parts: dict = {}  # and a node that of its last rank
                for rank, total in by_rank.items():
                    node = rank // self.ranks_per_node
                    part = (node, rank) if node == home else node
                    parts.pop(part, None)
                    parts[part] = total if node == home else by_node[node]
                for total in sum_by(parts, lambda _: None).values():
                    y[row] = total
                token += 1
            out.append(y)
        return out

    def weights(self, num_tokens: list[int]) -> list[torch.Tensor]:
        return [torch.rand(t, self.topk, generator=self.generator) for t in num_tokens]

    def cluster(self, **options) -> ep.LocalCluster:
        return ep.LocalCluster(self.nodes, self.ranks_per_node, self.config, **options)

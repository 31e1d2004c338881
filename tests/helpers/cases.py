"""Random shapes for the tests of dispatch and combine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.buffer.arguments import summable_dtypes

META_BYTES = 16  # a row's tag on the wire


def slot_bytes(hidden: int, dtype: torch.dtype, topk: int) -> int:
    """An upper bound of a row in a ring: payload, tag, ids, indices and weights, rounded up to 16 or 128 bytes."""
    size = hidden * dtype.itemsize
    return size + META_BYTES + 16 * topk + (4 * 16 if size < 1024 else 2 * 128)


def assert_all_equal(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit by bit, a tensor per rank; ours may be on a GPU."""
    for rank, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a.detach().cpu(), b.detach()), f"rank {rank}"


def before(ends: list[int], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor[:end] for end, tensor in zip(ends, tensors, strict=True)]


def filled(rows: torch.Tensor, counts: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """The rows of a rank without the padding up to a capacity. counts: of each expert, without a limit."""
    if capacity is None:
        return rows
    expert, number = torch.arange(len(rows)) // capacity, torch.arange(len(rows)) % capacity
    last = len(counts) - 1
    return rows[((expert <= last) & (number < counts[expert.clamp(max=last)])).to(rows.device)]


def drawn(
    tokens: Sequence[int], experts: int, topk: int, hidden: int, seed: int = 0, is_whole: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Rows, ids and weights of ranks with so many tokens each. is_whole: rows whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(t, hidden, generator=generator) for t in tokens]
    if is_whole:
        x = [torch.randint(-8, 9, rows.shape, generator=generator).float() for rows in x]
    ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices for t in tokens]
    return x, ids, [torch.rand(t, topk, generator=generator) for t in tokens]


def need_sums(dtype: torch.dtype, device: str) -> None:
    if dtype not in summable_dtypes(device):
        pytest.skip(f"this build sums no {dtype} on GPUs")


def leaves(
    world: int, experts: int, topk: int, hidden: int = 3, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Ids, rows and weights of a few tokens, for gradients in float64."""
    need_sums(torch.float64, device)
    generator, tokens = torch.Generator().manual_seed(world), [3, 0, 2, 4, 1, 2][:world]
    ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices for t in tokens]
    ids[0][0, 0] = -1
    x = [torch.randn(t, hidden, generator=generator, dtype=torch.float64) for t in tokens]
    w = [torch.rand(t, topk, generator=generator, dtype=torch.float64) for t in tokens]
    return [i.to(device) for i in ids], *([t.to(device).requires_grad_() for t in part] for part in (x, w))


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
    lines: bool = False  # one node, whose dispatches go by lines
    nodes: int = field(init=False)
    ranks_per_node: int = field(init=False)

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.random = r
        self.generator = torch.Generator().manual_seed(self.seed)
        self.nodes, self.ranks_per_node = r.randint(1, self.max_ranks_per_side), r.randint(1, self.max_ranks_per_side)
        if self.lines:
            self.nodes, self.ranks_per_node = 1, self.nodes * self.ranks_per_node
        self.world = self.nodes * self.ranks_per_node
        self.num_experts = r.randint(1, 64 // self.world) * self.world
        self.topk = r.choice([1, min(8, self.num_experts), r.randint(1, min(8, self.num_experts))])
        self.hidden = r.choice([8, 1000, r.randint(8, 1000), r.randint(8, 80)])
        if self.device == "cuda" and self.seed % 2:  # rows for the copy engine
            self.hidden, self.max_tokens = r.choice([512, 520, 2052, 4096]), min(self.max_tokens, 60)
        self.dtype = r.choice(summable_dtypes(self.device))
        self.alignment = r.choice([1, 1, 4, 16])
        row = slot_bytes(self.hidden, self.dtype, self.topk)
        self.config = ep.Config(
            num_experts=self.num_experts,
            timeout=60,
            max_tokens=self.max_tokens if self.lines else None,
            row_bytes=self.hidden * self.dtype.itemsize if self.lines else None,
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
        cluster = ep.LocalCluster(self.nodes, self.ranks_per_node, self.config, device=self.device, **options)
        assert (cluster._group.one_hop is not None) == self.lines
        return cluster

    def there(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """On the case's device."""
        return [tensor.to(self.device) for tensor in tensors]

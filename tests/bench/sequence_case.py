"""What `tests/bench/run.py sequences` measures: documents, where they are at home, and who computes their attention.

W ranks. At home a rank has whole documents, and equally many tokens as every other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from megatron_ep.sequences.plan import SequencePlan, Shard
from megatron_ep.sequences.planner import RowBytes, balance

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def draw_documents(tokens: int, shortest: int, longest: int, world: int, seed: int) -> list[list[int]]:
    """Lengths of each rank's documents, of so many tokens together. Their logarithms are drawn evenly. They are
    multiples of 2 W, for Megatron's context parallelism cuts them into as many chunks. What is left at the end, if it
    would be shorter than `shortest`, belongs to the document before it.

    Raises ValueError for sizes that do not fit.
    """
    chunks, random = 2 * world, Random(seed)
    if tokens % chunks:
        raise ValueError(f"--tokens is {tokens}, must be a multiple of {chunks} for {world} ranks")
    if not chunks <= shortest <= longest <= tokens:
        raise ValueError(
            f"--documents is {shortest} {longest}, must be two of {chunks} to {tokens}, the shortest first"
        )
    documents: list[list[int]] = []
    for _ in range(world):
        lengths, left = [], tokens
        while left:
            drawn = math.exp(random.uniform(math.log(shortest), math.log(longest)))
            length = round(drawn / chunks) * chunks
            if left - length < max(shortest, chunks):
                length = left
            lengths.append(length)
            left -= length
        documents.append(lengths)
    return documents


@dataclass(frozen=True)
class Case:
    """documents: lengths of each rank's. num_sms: of each GPU, for rows that move; None: half of them."""

    documents: Sequence[Sequence[int]]
    query_heads: int
    kv_heads: int
    width: int
    dtype: str
    device: str
    num_sms: int | None = None

    @property
    def world_size(self) -> int:
        return len(self.documents)

    @property
    def row_bytes(self) -> RowBytes:
        q, kv = (heads * self.width * DTYPES[self.dtype].itemsize for heads in (self.query_heads, 2 * self.kv_heads))
        return RowBytes(q=q, kv=kv, out=q)

    def __str__(self) -> str:
        where = "GPUs" if self.device == "cuda" else "ranks"
        tokens, number = sum(self.documents[0]), sum(map(len, self.documents))
        sizes = f"T={tokens}, {number} documents, heads {self.query_heads}/{self.kv_heads} D={self.width}"
        sms = "" if self.num_sms is None else f" sms={self.num_sms}"
        return f"{self.world_size} {where} {sizes} {self.dtype}{sms}"


def plans_of(case: Case) -> dict[str, SequencePlan]:
    """Returns the plans by who computes what: each rank its own documents; balanced by the planner, from there; and
    with Megatron's context parallelism over all ranks, where a rank has the r-th chunk of each document and the r-th
    from its end, also at home."""
    world = case.world_size
    at_home, parallel, document = [], [], 0
    for rank, lengths in enumerate(case.documents):
        for length in lengths:
            at_home.append(Shard(document, 0, rank, rank, length))
            for index in range(2 * world):
                owner = min(index, 2 * world - 1 - index)
                parallel.append(Shard(document, index, owner, owner, length // (2 * world)))
            document += 1
    shards = {
        "at_home": at_home,
        "balanced": balance(at_home, world, row_bytes=case.row_bytes),
        "context_parallel": parallel,
    }
    return {name: SequencePlan.build(of_plan, world) for name, of_plan in shards.items()}


def load(plan: SequencePlan) -> float:
    """Attention of the busiest rank over the mean."""
    return float(plan.attention_pairs.max() / plan.attention_pairs.double().mean())

"""What a dispatch learned, kept for its combine, their backward passes and cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_ep.rank_group import RankGroup


def most_arrivals(max_recv_tokens: int, expert_capacity: int, num_tokens: int, world_size: int) -> int:
    """Tokens whose places a rank remembers when it does not ask how many arrive; those after them are left out.

    Without a capacity, so many fill max_recv_tokens rows. With one, most tokens of a busy expert may take no row: then
    it is all tokens, if no rank has more than this one.
    """
    return max_recv_tokens if expert_capacity == 0 else max(max_recv_tokens, world_size * num_tokens)


@dataclass(eq=False)
class RankHandle:
    """One rank's part of a handle. Users need only what `Handle` shows."""

    num_tokens: int  # T
    layout: torch.Tensor  # int32, as csrc/core/layout.h lays it out
    rows: int  # R, rows of the expert-grouped tensors, padding included
    tokens_per_expert: torch.Tensor  # int64 [L], padding included
    positions: torch.Tensor  # int32 [received rows, K]
    rail_experts: torch.Tensor  # int32 [rail rows, K]


@dataclass(eq=False)
class Handle:
    """The layout of one dispatch. Belongs to the buffer that made it and is useless once that is closed.

    topk: K of the dispatch that made it.
    """

    buffer: RankGroup
    topk: int
    ranks: list[RankHandle] = field(repr=False)

"""What a dispatch learned, kept for its combine, their backward passes and cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ep.backends.interface import RankHandle
from megatron_ep.rank_group import RankGroup


@dataclass(eq=False)
class Handle:
    """The layout of one dispatch. Belongs to the buffer that made it and is useless once that is closed.

    topk: K of the dispatch that made it.
    """

    buffer: RankGroup
    topk: int
    ranks: list[RankHandle] = field(repr=False)

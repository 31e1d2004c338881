"""The layout of a dispatch, for its combine, their backward passes and cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_ep.buffer.interface import RankHandle
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.meeting.processes import OfOneProcess


@dataclass
class CountsToAskFor:
    """Arguments of `megatron_ep.dispatch`. topk_idx: [T, K] a rank; expert_capacity: 0 for none.

    allows_repeats: whether a token may choose an expert twice, of which it has one row all the same.
    keeps_source_tokens: whether the handle is to know which token of its source each row is.
    has_fixed_sizes: with max_recv_tokens tables have room for the most even where the host knows how much they need.
    """

    topk_idx: Sequence[torch.Tensor]
    expert_alignment: int
    expert_capacity: int
    max_recv_tokens: int | None
    has_fixed_sizes: bool = False
    allows_repeats: bool = False
    keeps_source_tokens: bool = False


def shapes_of(owner: object, *names: str) -> str:
    """Returns a repr with the shapes and dtypes of these attributes; the host would have to wait for their values."""
    said = []
    for name in names:
        if (value := getattr(owner, name)) is not None:
            tensors = value if isinstance(value, list) else [value]
            sizes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            said.append(f"{name}: {sizes} {tensors[0].dtype}")
    return f"{type(owner).__name__}({', '.join(said)})"


@dataclass(eq=False, repr=False)
class Handle(OfOneProcess):
    """The layout of one dispatch. Belongs to the buffer that made it and is useless once that is closed.

    topk: K of the dispatch that made it.
    ranks: one entry per rank of this process; empty until the dispatch has exchanged counts.
    is_flat: whether rows are flat, see `megatron_ep.dispatch`.
    """

    group: RankGroup
    topk: int
    ranks: list[RankHandle]
    to_ask_for: CountsToAskFor | None = None
    is_flat: bool = False
    made_after_resets: int = field(init=False)

    def __post_init__(self) -> None:
        self.made_after_resets = self.group.resets

    def __repr__(self) -> str:
        sizes = "".join(f", {rank.num_tokens} tokens to {rank.rows} rows" for rank in self.ranks)
        return f"Handle({'flat' if self.is_flat else 'grouped'}, K = {self.topk}{sizes})"

    @property
    def looks(self) -> tuple[object, ...]:
        """The cache key of arguments: handles with equal keys fit the same tensors."""
        return (self.topk, self.is_flat, *[(rank.num_tokens, rank.rows) for rank in self.ranks])

    @property
    def age(self) -> int:
        """The number of buffer resets since the handle was made. A reset restarts the numbers that identify layouts."""
        return self.group.resets - self.made_after_resets

"""The layout of a low-latency dispatch, for its combines and backward passes."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.low_latency.plans import DispatchPlan, Pending
from megatron_ep.meeting.processes import OfOneProcess
from megatron_ep.normal.one_hop import OVERFLOW


class LowLatencyHandle(OfOneProcess):
    """The layout of a low-latency dispatch. Belongs to the `LowLatency` that made it.

    layouts: int32, one per rank of this process, laid out by csrc/core/low_latency_args.h, then numbers of calls. Empty
        until the dispatch is launched.
    made_on: stream of the dispatch, see `Backend.current_stream`.
    forward: in a backward pass the handle of the forward pass, whose ranks must not have been masked since.
    call: the dispatch.
    """

    def __init__(
        self,
        calls: Any,  # LowLatencyCalls
        plan: DispatchPlan,
        forward: LowLatencyHandle | None = None,
    ):
        self.calls, self.plan, self.forward = calls, plan, forward
        self.layouts: list[torch.Tensor] = []
        self.made_on = 0
        self.call: Pending | None = None
        self.resets: int = calls.resets  # when the dispatch was made

    @property
    def topk(self) -> int:
        """K of the dispatch."""
        return self.plan.topk

    @property
    def masked(self) -> bool:
        """Whether rows have the layout [L, W * max_tokens]."""
        return self.plan.masked

    @property
    def group(self) -> RankGroup:
        return self.calls.group

    def check(self) -> None:
        """Raises ValueError if a reset came after the dispatch, and it was given up or left out ranks that it has
        brought back."""
        if self.resets == self.calls.resets:
            return
        was_received = self.call is not None and self.call.was_received
        if not was_received or any(int(self.overflow(i)) == -1 for i in range(len(self.layouts))):
            found = "was given up"
        elif self.calls.masks is not None and any(not self.active(i).all() for i in range(len(self.layouts))):
            found = "left masked ranks out"
        else:
            return
        raise ValueError(f"handle is of a dispatch that {found} before the buffer's reset, must be of a later one")

    def check_received(self) -> None:
        """Raises ValueError if the hook of the dispatch was not called yet, because its rows are unknown before."""
        if self.call is not None and not self.call.received:
            raise ValueError("handle is of a dispatch that was not received yet: call its hook first")

    def in_backward(self) -> LowLatencyHandle:
        """Returns this handle for a combine in a backward pass."""
        same = LowLatencyHandle(self.calls, self.plan, self.forward or self)
        same.layouts, same.made_on, same.call, same.resets = self.layouts, self.made_on, self.call, self.resets
        return same

    def sent_ids(self) -> list[torch.Tensor]:
        """Returns topk_idx of the dispatch, int32 [T, K] per rank, with -1 for choices of ranks that were masked."""
        first, found = self.plan.offsets["experts"], []
        for layout, tokens in zip(self.layouts, self.plan.num_tokens, strict=True):
            ids = layout[first : first + tokens * self.topk].view(tokens, self.topk)
            found.append(ids if self.calls.masks is None else ids.clamp_min(-1))  # -2 - id if the rank was masked
        return found

    def active(self, rank: int) -> torch.Tensor:
        """Returns a view, int32 [W]: 1 for each rank that took part in both halves of the dispatch. Only with masks."""
        first = self.plan.offsets["active"]
        return self.layouts[rank][first : first + self.calls.group.topology.world_size]

    def counts(self, rank: int) -> torch.Tensor:
        """Returns a view, int32 [L]: rows per local expert, without padding."""
        first = self.plan.offsets["counts"]
        return self.layouts[rank][first : first + self.calls.group.num_local_experts]

    def starts(self, rank: int) -> torch.Tensor:
        """Returns a view, int32 [L + 1]: the first row of each local expert, and the end of the last one's rows."""
        first = self.plan.offsets["starts"]
        return self.layouts[rank][first : first + self.calls.group.num_local_experts + 1]

    def overflow(self, rank: int) -> torch.Tensor:
        """Returns a view, int32 [1]: not 0 if rows did not fit."""
        return self.layouts[rank][: OVERFLOW + 1]

    def rows_of_tokens(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int32 and bool [W, max_tokens, K]: the local row of each choice of all ranks' tokens, and whether it
        has one. Computed from tensors that users cannot write to, unlike counts and starts."""
        world, offsets = self.calls.group.topology.world_size, self.plan.offsets
        rows = self.layouts[rank][offsets["dst_rows"] : offsets["active"]].view(world, -1, self.topk)
        words = self.layouts[rank][offsets["present"] : offsets["dst_rows"]].view(world, -1, 1)
        bits = torch.arange(32, dtype=torch.int32, device=words.device)
        came = (words >> bits & 1).view(world, -1)[:, : rows.shape[1]] == 1
        if self.calls.masks is not None:
            came &= self.active(rank).view(world, 1) == 1
        return rows, came.unsqueeze(2) & (rows >= 0)

    def is_row(self, rank: int) -> torch.Tensor:
        """Returns bool [rows]: which rows hold a token."""
        rows, are_there = self.rows_of_tokens(rank)
        place = torch.where(are_there, rows, self.plan.rows).flatten().long()
        return are_there.new_zeros(self.plan.rows + 1).scatter_(0, place, True)[:-1]

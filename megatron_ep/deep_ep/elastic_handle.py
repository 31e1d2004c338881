"""The handle of DeepEP's V2."""

from __future__ import annotations

import functools

import torch

from megatron_ep.deep_ep.transfers import Routes

NONE = -1


def max_rows(tokens: int, topk: int, local_experts: int, alignment: int, is_flat: bool) -> int:
    """Returns R if it is fixed: room for all rows that may arrive. tokens: tokens of all ranks."""
    if is_flat:
        return tokens
    rows = tokens * min(topk, local_experts) + (alignment - 1) * local_experts
    return -(-rows // alignment) * alignment


class EPHandle:
    """The layout of a dispatch of `ElasticBuffer`. Attributes may be set; tensors are created on first access.

    do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: arguments of the dispatch.
    topk_idx: [T, K], the caller's tensor, or a copy.
    num_recv_tokens_per_expert_list: rows of each local expert, rounded up to the alignment; [] if the host did not
        wait.
    num_recv_tokens: tokens that this rank received, or R if it was fixed.
    num_expanded_tokens: rows of a dispatch with do_expand and this layout, or R of such a dispatch if it was fixed.
    num_unaligned_recv_tokens_per_expert: int32 [L], not rounded up.
    psum_num_recv_tokens_per_expert: int32 [L], the inclusive sum of the rounded numbers; with do_expand the end of each
        expert's rows without its padding.
    psum_num_recv_tokens_per_scaleup_rank: int32 [ranks of a node], inclusive sum of the tokens from each local rank.
    recv_src_metadata: int32 [tokens received, K + 2]: source rank * num_max_tokens_per_rank + token; local rank of the
        source * K + the last k that chose this rank; with do_expand the row of each k, else -1.
    dst_buffer_slot_idx: int32 [T, K]: at the last k that chose a rank, the number of earlier tokens of this rank that
        went there; else -1.
    """

    token_metadata_at_forward = None
    channel_linked_list = None

    def __init__(
        self,
        routes: Routes,
        topk_idx: torch.Tensor,
        *,
        do_expand: bool,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        has_counts: bool,
    ):
        self.routes = {not do_expand: routes}  # the key says whether rows are flat
        self.do_expand = do_expand
        self.num_experts = routes.group.config.num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens_per_expert_list = routes.tokens_per_expert.tolist() if has_counts else []
        came = len(routes.rank.dst_rows)
        self.num_recv_tokens = came if has_counts or not do_expand else routes.rank.rows
        if has_counts:
            self.num_expanded_tokens = sum(self.num_recv_tokens_per_expert_list)
        else:
            group, topk = routes.group, routes.handle.topk
            tokens = group.topology.world_size * num_max_tokens_per_rank
            self.num_expanded_tokens = max_rows(tokens, topk, group.num_local_experts, expert_alignment, is_flat=False)

    @property
    def _routes(self) -> Routes:
        return self.routes[not self.do_expand]

    def of_layout(self, is_flat: bool) -> Routes:
        """Returns the routes for flat rows, or for grouped ones."""
        if is_flat not in self.routes:
            self.routes[is_flat] = self.routes[not is_flat].of_layout(is_flat)
        return self.routes[is_flat]

    @functools.cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        return self._routes.rows_per_expert

    @functools.cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        counts, alignment = self._routes.rows_per_expert, self.expert_alignment
        aligned = counts + -counts % alignment
        ends = aligned.cumsum(0, dtype=torch.int32)
        return ends - aligned + counts if self.do_expand else ends

    @functools.cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        topology = self._routes.group.topology
        per_local_rank = self._routes.rows_per_rank.view(topology.nodes, topology.ranks_per_node)
        return per_local_rank.sum(0, dtype=torch.int32).cumsum(0, dtype=torch.int32)

    @functools.cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        routes = self._routes
        chosen = routes.local_ids >= 0
        tokens, topk = chosen.shape
        row = torch.arange(tokens, dtype=torch.int32, device=chosen.device)
        ends = routes.rows_per_rank.cumsum(0, dtype=torch.int32)
        # If R is fixed, rows after the last one that arrived have no source; the clamp keeps their index valid.
        source = torch.searchsorted(ends, row, right=True, out_int32=True).clamp_max(len(ends) - 1)
        last = topk - 1 - chosen.flip(1).int().argmax(dim=1)
        local_rank = source % routes.group.topology.ranks_per_node
        rows = torch.where(chosen, routes.rank.dst_rows, NONE) if self.do_expand else chosen.int().fill_(NONE)
        token = source * self.num_max_tokens_per_rank + routes.rank.source_tokens
        return torch.cat([token.unsqueeze(1), (local_rank * topk + last.int()).unsqueeze(1), rows], dim=1).int()

    @functools.cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        world, local_experts = self._routes.group.topology.world_size, self._routes.group.num_local_experts
        ranks = self.topk_idx.div(local_experts, rounding_mode="floor")
        goes = torch.stack([(ranks == rank).any(dim=1) for rank in range(world)], dim=1)
        number = goes.cumsum(0) - 1
        later = torch.ones(ranks.shape[1], ranks.shape[1], dtype=torch.bool, device=ranks.device).triu(1)
        again = ((ranks.unsqueeze(2) == ranks.unsqueeze(1)) & later).any(dim=2)
        return torch.where((ranks < 0) | again, NONE, number.gather(1, ranks.clamp_min(0))).int()

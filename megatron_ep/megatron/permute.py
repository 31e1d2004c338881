"""Megatron-Core's own way to group tokens by expert on one device, unfused, as `bench cuda` times it.

T tokens, H hidden, E experts, K choices of a token.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import permute, unpermute


class Permutation:
    """What a router of Megatron's says about T tokens.

    Args:
        ids: int64 [T, K], the experts of each token.
        weights: fp32 [T, K].
        num_experts: E.
    """

    def __init__(self, ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> None:
        self._shape = (ids.shape[0], num_experts)
        self._map = torch.zeros(self._shape, dtype=torch.bool, device=ids.device).scatter(1, ids, True)
        self._probs = torch.zeros(self._shape, dtype=torch.float32, device=ids.device).scatter(1, ids, weights)
        self._num_rows = ids.numel()

    def permute(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, H] to its rows [T * K, H], grouped by expert, and the token of each row, int64 [T * K]. The weights
        travel too, as in training."""
        rows, _, token_of_row, *_ = permute(x, self._map, probs=self._probs, num_out_tokens=self._num_rows)
        return rows, token_of_row

    def unpermute(self, rows: torch.Tensor, token_of_row: torch.Tensor) -> torch.Tensor:
        """The sums [T, H] of each token's rows, added up in their dtype."""
        return unpermute(rows, token_of_row, torch.Size((self._shape[0], rows.shape[1])))

"""`deep_ep.utils.gate`: scores whose best K are spread evenly over ranks, or not."""

from __future__ import annotations

import torch

TRIES = 20


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool = False
) -> torch.Tensor:
    """Returns float32 [T, E] on the current GPU, or the CPU without one. By the K largest scores of each token, rank 0
    gets about `ratio` times as many tokens as the other ranks get on average.

    precise: raises NotImplementedError unless the ratio is 1.
    """
    if precise and ratio != 1:
        raise NotImplementedError(f"precise is True with ratio {ratio}: megatron_ep.deep_ep has no exact ratios")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    local_experts = num_experts // num_ranks

    def scores_with(favour: float) -> torch.Tensor:
        scores = torch.rand(num_tokens, num_experts, dtype=torch.float32, device=device)
        scores[:, :local_experts] *= favour
        return scores

    def is_too_much(favour: float) -> bool:
        ranks = scores_with(favour).topk(num_topk, dim=1).indices // local_experts
        tokens = torch.nn.functional.one_hot(ranks, num_ranks).amax(dim=1).float().sum(0)
        return bool(tokens[0] > ratio * tokens[1:].mean())

    low, high = 1.0, 1.0 if ratio == 1 else 100.0
    for _ in range(TRIES if high > low else 0):
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_much(middle) else (middle, high)
    return scores_with(low)

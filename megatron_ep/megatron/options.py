"""Options of a model's dispatchers. They have the names of Megatron's newest TransformerConfig, or follow its style. A
recipe's section `dispatcher`, the `--ep-` flags of `megatron_ep.pretrain` and `configure` set them; a config that has a
field of that name sets it too."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from megatron_ep.config import MAX_LOW_LATENCY_TOKENS, is_number, require_int


@dataclass(frozen=True)
class Options:
    """Options of dispatchers. T tokens on this rank, K choices per token, TP ranks that share an expert.

    moe_expert_rank_capacity_factor: F. A rank has room for int(T * K * TP * F) rows, rounded up to the alignment of
        experts, and the host does not wait for counts. A perfectly balanced load needs F = 1. The experts must read
        tokens_per_expert on the device. None: room for all rows that arrive; the host waits for their number.
    moe_apply_probs_on_combine: combine multiplies the rows by their probabilities, and the experts receive ones.
        Saves their pass over the rows, and keeps the rows for the backward pass.
    moe_low_latency_max_tokens: `Config.max_tokens` of the layers' buffer, for steps in which Megatron's inference pads
        the experts to decode (moe_pad_experts_for_cuda_graph_inference): with at most this many tokens per rank they go
        in one hop. All other steps, and with None all steps, go through rings.
    moe_dispatch_fwd_dtype: "fp8": rows of bf16, fp16 or fp32 are sent to the experts as e4m3 with one scale per 128
        elements, and arrive in their own dtype. None: rows are sent unchanged.
    moe_combine_bwd_dtype: "fp8": gradients of the tokens are sent to the experts in the fp8 format in which Transformer
        Engine's blockwise recipe rounds them. None: they are sent unchanged.
    moe_chunks: 2: a layer's tokens are sent in two halves, each of which travels while the experts compute the other.
        1: at once.

    Raises ValueError for a value out of range.
    """

    moe_expert_rank_capacity_factor: float | None = None
    moe_apply_probs_on_combine: bool = False
    moe_dispatch_fwd_dtype: str | None = None
    moe_combine_bwd_dtype: str | None = None
    moe_low_latency_max_tokens: int | None = None
    moe_chunks: int = 1

    def __post_init__(self) -> None:
        factor = self.moe_expert_rank_capacity_factor
        if factor is not None and not (is_number(factor) and math.isfinite(factor) and factor > 0):
            raise ValueError(f"moe_expert_rank_capacity_factor is {factor!r}, must be a number over 0")
        if not isinstance(self.moe_apply_probs_on_combine, bool):
            raise ValueError(f"moe_apply_probs_on_combine is {self.moe_apply_probs_on_combine!r}, must be a bool")
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype"):
            if getattr(self, name) not in (None, "fp8"):
                raise ValueError(f"{name} is {getattr(self, name)!r}, must be 'fp8' or None")
        if self.moe_low_latency_max_tokens is not None:
            require_int("moe_low_latency_max_tokens", self.moe_low_latency_max_tokens, 1, MAX_LOW_LATENCY_TOKENS)
        require_int("moe_chunks", self.moe_chunks, 1, 2)


NAMES = tuple(field.name for field in fields(Options))

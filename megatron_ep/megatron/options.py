"""Options of a model's dispatchers. Their names are those of Megatron's TransformerConfig, in its newest version, or
follow its style. A recipe's section `dispatcher`, the `--ep-` flags of `megatron_ep.pretrain` and `configure`
set them; a config that has a field of that name sets it too."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from megatron_ep.config import MAX_LOW_LATENCY_TOKENS, is_number, require_int


@dataclass(frozen=True)
class Options:
    """T tokens on this rank, K choices of a token, TP ranks that share an expert.

    moe_expert_rank_capacity_factor: F. A rank makes room for int(T * K * TP * F) rows, rounded up to what experts are
        padded to, and the host waits for no counts: 1 is what every rank would get if the load were even. The experts
        must read tokens_per_expert on the device. None: as many rows as come, for whose number the host waits once.
    moe_apply_probs_on_combine: combine multiplies the rows by their probabilities, and the experts are given ones.
        Saves their pass over the rows, and keeps the rows for the backward pass.
    moe_low_latency_max_tokens: steps with at most this many tokens per rank use the low-latency mode if Megatron's
        inference pads the experts to decode (moe_pad_experts_for_cuda_graph_inference). All other steps use the normal
        mode. None: every step does.
    moe_dispatch_fwd_dtype: "fp8": rows of bf16, fp16 or fp32 travel to the experts as e4m3 with one scale per 128
        elements and arrive in their own dtype; gradients travel unchanged. None: rows travel unchanged.

    Raises ValueError for a value out of range.
    """

    moe_expert_rank_capacity_factor: float | None = None
    moe_apply_probs_on_combine: bool = False
    moe_dispatch_fwd_dtype: str | None = None
    moe_low_latency_max_tokens: int | None = None

    def __post_init__(self) -> None:
        factor = self.moe_expert_rank_capacity_factor
        if factor is not None and not (is_number(factor) and math.isfinite(factor) and factor > 0):
            raise ValueError(f"moe_expert_rank_capacity_factor is {factor!r}, must be a number over 0")
        if not isinstance(self.moe_apply_probs_on_combine, bool):
            raise ValueError(f"moe_apply_probs_on_combine is {self.moe_apply_probs_on_combine!r}, must be a bool")
        if self.moe_dispatch_fwd_dtype not in (None, "fp8"):
            raise ValueError(f"moe_dispatch_fwd_dtype is {self.moe_dispatch_fwd_dtype!r}, must be 'fp8' or None")
        if self.moe_low_latency_max_tokens is not None:
            require_int("moe_low_latency_max_tokens", self.moe_low_latency_max_tokens, 1, MAX_LOW_LATENCY_TOKENS)


NAMES = tuple(field.name for field in fields(Options))


def merged(options: Options, config: Any) -> Options:
    """Returns the options merged with the fields of a TransformerConfig that have the same names.

    Raises:
        ValueError: they contradict each other, or the config's value is not supported.
    """
    chosen = {}
    for name in NAMES:
        ours, theirs = getattr(options, name), getattr(config, name, None)
        if theirs is None or theirs is False or theirs == "bf16":  # Megatron's words for: nothing was asked for
            chosen[name] = ours
        elif ours is None or ours is False or ours == theirs:
            chosen[name] = theirs
        else:
            raise ValueError(f"{name} is {ours!r} for the dispatcher and {theirs!r} in Megatron's config: give one")
    return Options(**chosen)

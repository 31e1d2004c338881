"""Which rows and gradients of a layer travel as fp8 without a loss.

Transformer Engine's blockwise recipe rounds the rows of FC1, and the gradients of FC2, in blocks of 1 x 128 with scales
that are powers of two (`Float8BlockScaling`). Rows that were rounded so before they travel are rounded to themselves:
the products read the same numbers. With other experts the second rounding adds its error to the first.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron.options import Options

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
BACKWARD_OVERRIDE = "NVTE_BACKWARD_OVERRIDE"
GRADIENT_DTYPES = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}  # by TransformerConfig.fp8


def scales_for(config: TransformerConfig) -> str:
    """Returns the format of the scales of rows: "pow2" if experts round them as `float8.quantize` does with it, and the
    more accurate "fp32" otherwise."""
    return "fp32" if _other_rounding(config) or config.moe_apply_probs_on_input else "pow2"


def gradient_dtype(options: Options, config: TransformerConfig) -> torch.dtype | None:
    """Returns the dtype in which gradients travel from tokens to experts; None: in their own.

    Raises ValueError if moe_combine_bwd_dtype is set and experts do not round these gradients, and nothing else, as
    `float8.quantize(scales="pow2")` does.
    """
    if options.moe_combine_bwd_dtype is None:
        return None
    other = _other_rounding(config)
    if other is None and os.environ.get(BACKWARD_OVERRIDE):
        other = f"{BACKWARD_OVERRIDE} is {os.environ[BACKWARD_OVERRIDE]}"
    for name, source in (
        ("moe_apply_probs_on_combine", options),
        ("moe_apply_probs_on_input", config),
        ("add_bias_linear", config),  # the gradient of FC2's bias is a sum of unrounded rows
        ("first_last_layers_bf16", config),
    ):
        if getattr(source, name, False):
            other = other or f"{name} is {getattr(source, name)}"
    if other is not None:
        raise _refusal(options.moe_combine_bwd_dtype, other)
    return GRADIENT_DTYPES[config.fp8]


def check_experts(dispatcher: Any, experts: torch.nn.Module) -> None:
    """Lets rows of experts that are not Transformer Engine's have fp32 scales.

    Raises ValueError if the dispatcher would send them rounded gradients.
    """
    if any(_is_transformer_engines(module) for module in experts.modules()):
        return
    dispatcher.forward_scales = "fp32"
    if dispatcher.backward_dtype is not None:
        raise _refusal(
            dispatcher.options.moe_combine_bwd_dtype,
            f"the experts are {type(experts).__name__}, without a linear layer of Transformer Engine's",
        )


def _is_transformer_engines(module: torch.nn.Module) -> bool:
    """Returns whether a module is a Linear or GroupedLinear of Transformer Engine, which need not be installed."""
    return any(
        base.__name__ in ("Linear", "GroupedLinear") and base.__module__.partition(".")[0] == "transformer_engine"
        for base in type(module).__mro__
    )


def _other_rounding(config: TransformerConfig) -> str | None:
    """Returns what says that experts round rows in another way, or not at all; None if nothing does."""
    if config.fp8 not in GRADIENT_DTYPES:
        return f"fp8 (--fp8-format) is {config.fp8}"
    if config.fp8_recipe != "blockwise":
        return f"fp8_recipe is {getattr(config.fp8_recipe, 'value', config.fp8_recipe)}"
    if os.environ.get(FP32_SCALES, "0") == "1":
        return f"{FP32_SCALES} is 1"
    return "quant_recipe is set" if getattr(config, "quant_recipe", None) is not None else None


def _refusal(value: str | None, other: str) -> ValueError:
    return ValueError(
        f"moe_combine_bwd_dtype is {value!r} and {other}: it rounds gradients as Transformer Engine's linear layers do "
        "with fp8_recipe blockwise, and would change others; leave it out"
    )

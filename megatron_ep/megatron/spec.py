"""Layer specs by name, for frameworks that take a function: `--spec megatron_ep.megatron.spec gpt` of Megatron-LM's
pretrain_gpt.py from 0.19 on, and `transformer_layer_spec` of Megatron-Bridge's model providers.

Megatron-LM before 0.19 takes no function there: `python -m megatron_ep.pretrain` works with every version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_ep.megatron import plugin
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router


def gpt(
    config: Any,
    vp_stage: int | None = None,
    *,
    router: Callable[..., TopKRouter] | None = None,
    experts: str | None = None,
) -> TransformerBlockSubmodules:
    """Returns Megatron's decoder block for this model, with `EPTokenDispatcher` in its MoE layers.

    This function does not make the spec of a multi-token-prediction block. A model with mtp_num_layers needs
    `megatron_ep.megatron.plugin`, which `megatron_ep.pretrain` enables.

    config: a TransformerConfig, such as Bridge's providers, or an object with one as `transformer` (Megatron-LM).
    vp_stage: the virtual pipeline stage, if there are several.
    router, experts: see `ep_layer_spec`.

    Raises ValueError if the model has no experts, attention for which Megatron has another block, or mtp_num_layers
    without the plugin.
    """
    config = getattr(config, "transformer", config)
    if config.num_moe_experts is None:
        raise ValueError("num_moe_experts is None: a dense model has nothing to dispatch")
    if config.experimental_attention_variant is not None:
        raise ValueError(
            f"experimental_attention_variant is {config.experimental_attention_variant}, which needs another block: "
            "use python -m megatron_ep.pretrain or megatron_ep.megatron.plugin.enable()"
        )
    if config.mtp_num_layers and not plugin.is_enabled():
        raise ValueError(
            f"mtp_num_layers is {config.mtp_num_layers}, and the multi-token-prediction block takes no spec from here: "
            "use python -m megatron_ep.pretrain, or call megatron_ep.megatron.plugin.enable() before the model is built"
        )
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return ep_layer_spec(
        spec, router=router, required=False, experts=experts
    )  # a pipeline stage may have dense layers only


def gpt_fused_router(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Returns the block of `gpt` with the fused router instead of Megatron's."""
    return gpt(config, vp_stage, router=fused_router)


def gpt_grouped_experts(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Returns the block of `gpt` with grouped experts instead of Megatron's."""
    return gpt(config, vp_stage, experts="grouped")


def gpt_fused_router_grouped_experts(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Returns the block of `gpt` with the fused router and grouped experts instead of Megatron's."""
    return gpt(config, vp_stage, router=fused_router, experts="grouped")

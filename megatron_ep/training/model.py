"""Builds Megatron-Core's objects from a recipe: the model in its DDP wrapper, optimizer, learning-rate schedule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron_ep import Topology
from megatron_ep.megatron import shared_buffers
from megatron_ep.megatron.attention import sequence_spec, varlen_spec
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router
from megatron_ep.training.recipe import Recipe

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """Returns the recipe's model section as Megatron-Core's config, in fp32, without fused kernels.

    Declares alltoall to Megatron for the dispatcher `ep`, which replaces it in the layer.
    """
    model = recipe.model.model_dump(exclude_none=True, exclude={"rotary_base", "share_embeddings_and_output_weights"})
    model["activation_func"] = ACTIVATIONS[recipe.model.activation_func]
    kind = recipe.dispatcher.type
    return TransformerConfig(
        **model,
        expert_model_parallel_size=recipe.topology.world_size,
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall" if kind == "ep" else kind,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        deterministic_mode=recipe.train.device == "cuda",  # the host always is deterministic
    )


def build_model(recipe: Recipe, vocab_size: int) -> DistributedDataParallel:
    """Returns a GPTModel with the local spec in Megatron's DDP. Megatron finalises gradients.

    Every rank initialises from the recipe's seed (experts from Megatron's expert-parallel random state), with every
    dispatcher alike. Needs torch.distributed and Megatron's parallel state.
    """
    config = transformer_config(recipe)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    if recipe.dispatcher.type == "ep":
        topology = Topology(recipe.topology.nodes, recipe.topology.ranks_per_node)
        shared_buffers.configure(topology, **recipe.dispatcher.settings())
        router = fused_router if recipe.dispatcher.router == "fused" else None
        spec = ep_layer_spec(spec, router=router, experts=recipe.dispatcher.experts)
    if recipe.dataset.packed:
        spec = sequence_spec(spec) if recipe.dispatcher.sequences else varlen_spec(spec)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab_size,
        max_sequence_length=recipe.dataset.seq_length,
        position_embedding_type="rope",
        rotary_base=recipe.model.rotary_base,
        share_embeddings_and_output_weights=recipe.model.share_embeddings_and_output_weights,
    )
    model.to(recipe.train.device)  # Megatron leaves norms and routers on the host
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **recipe.ddp.model_dump())
    wrapped = DistributedDataParallel(config, ddp_config, model)
    config.no_sync_func = wrapped.no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(
    recipe: Recipe, model: DistributedDataParallel
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Returns Megatron's AdamW (decoupled weight decay, none for biases and norms) and its schedule, in steps."""
    config = OptimizerConfig(optimizer="adam", **recipe.optimizer.model_dump())
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.optimizer.lr,
        min_lr=recipe.optimizer.min_lr,
        lr_warmup_steps=recipe.scheduler.lr_warmup_iters,
        lr_decay_steps=recipe.scheduler.lr_decay_iters,
        lr_decay_style=recipe.scheduler.lr_decay_style,
        start_wd=recipe.optimizer.weight_decay,
        end_wd=recipe.optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler

"""A MoE layer of Megatron's on a GPU, in ranks that `LocalRanks` keeps: a process each, on a GPU each where there are
as many. Functions of a rank."""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron import shared_buffers
from megatron_ep.megatron.stand_ins import gpu_runtime


def join():
    """This process's GPU and Megatron's groups, with EP over all ranks; buffers are new. Idempotent."""
    if not parallel_state.is_initialized():
        os.environ["RANK"] = str(dist.get_rank())
        gpu_runtime.enable()
        torch.use_deterministic_algorithms(False)  # or torch waits for the host in some of them
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=dist.get_world_size(),
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    shared_buffers.close_buffers()


def make_config(**options):
    defaults = dict(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        moe_ffn_hidden_size=64,
        num_moe_experts=8,
        moe_router_topk=3,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        expert_tensor_parallel_size=1,
        params_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
    )
    return TransformerConfig(**{**defaults, **options})


def step(layer, x, grad):
    """Forward and backward: the output, and the gradients of x and of every parameter that has one."""
    output, _ = layer(x)
    output.backward(grad)
    return [output.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def fresh(layer, x):
    layer.zero_grad(set_to_none=True)
    x.grad = None

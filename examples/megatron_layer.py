"""Megatron-Core's MoE layer with this dispatcher and router in it, beside the layer as Megatron builds it.

    torchrun --standalone --nproc-per-node 2 examples/megatron_layer.py

Two ranks of expert parallelism on the host; `host_runtime` answers what Megatron asks of a GPU. Needs megatron-core.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router
from megatron_ep.megatron.shared_buffers import close_buffers
from megatron_ep.megatron.stand_ins import host_runtime

host_runtime.enable()
dist.init_process_group("gloo")
world = dist.get_world_size()
parallel_state.initialize_model_parallel(expert_model_parallel_size=world, create_gloo_process_groups=False)
model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=4,
    num_moe_experts=4 * world,
    moe_ffn_hidden_size=32,
    moe_router_topk=2,
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
    expert_model_parallel_size=world,
    add_bias_linear=False,
    use_cpu_initialization=True,
)

spec = get_moe_module_spec(use_te=False, num_experts=4 * world, moe_grouped_gemm=False)
theirs = spec(config=config)
ours = ep_layer_spec(spec, router=fused_router)(config=config)  # the one line
ours.load_state_dict(theirs.state_dict())

torch.manual_seed(dist.get_rank())
x, grad = torch.randn(2, 50, 1, config.hidden_size)  # sequence 50, batch 1
results = []
for layer in (ours, theirs):
    leaf = x.clone().requires_grad_()
    output, _ = layer(leaf)
    output.backward(grad)
    results.append([output.detach(), leaf.grad, layer.router.weight.grad])

torch.testing.assert_close(*results)
print(
    f"rank {dist.get_rank()}: {type(ours.token_dispatcher).__name__} gives Megatron's output and gradients", flush=True
)
close_buffers()
dist.destroy_process_group()

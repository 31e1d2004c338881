"""A GPT model with MoE layers in Megatron's DDP, with Megatron's optimizer, trained by a loop that fits on a page.

    torchrun --standalone --nproc-per-node 2 examples/training_loop.py

Two ranks of expert parallelism on the host; `host_runtime` answers what Megatron asks of a GPU. Needs megatron-core.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_ep as ep
from megatron_ep.megatron.dispatcher import close_buffers, configure
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router
from megatron_ep.megatron.stand_ins import host_runtime

STEPS, BATCH, LENGTH, VOCABULARY = 30, 4, 32, 64

host_runtime.enable()
dist.init_process_group("gloo")
world = dist.get_world_size()
parallel_state.initialize_model_parallel(expert_model_parallel_size=world, create_gloo_process_groups=False)
model_parallel_cuda_manual_seed(0)
sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "moe_ffn_hidden_size": 64}
experts = {"num_moe_experts": 4 * world, "moe_router_topk": 2, "expert_model_parallel_size": world}
config = TransformerConfig(**sizes, **experts, moe_token_dispatcher_type="alltoall", add_bias_linear=False)

configure(timeout=60)  # before the first step; fields of Config
spec = ep_layer_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=False), router=fused_router)
gpt = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope")
model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3), [model], use_gloo_process_groups=False)

torch.manual_seed(dist.get_rank())
losses = []
for _ in range(STEPS):
    start = torch.randint(VOCABULARY, (BATCH, 1))
    text = (start + torch.arange(LENGTH + 1)) % VOCABULARY  # the next token is the last one plus 1
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(input_ids=text[:, :-1], position_ids=None, attention_mask=None, labels=text[:, 1:]).mean()
    loss.backward()
    finalize_model_grads([model])
    ep.raise_if_failed()  # on a GPU a failed call is noticed here, before the parameters change
    optimizer.step()
    losses.append(float(loss.detach()))
assert losses[-1] < losses[0] / 2, losses
print(f"rank {dist.get_rank()}: the loss fell from {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)
close_buffers()
dist.destroy_process_group()

"""`python overflow_run.py TREE`: trains a GPTModel of that Megatron-LM tree on forked ranks of the host, its steps run
by the tree's own PagedStashRunner, which repeats those that were over the budget. Prints a line of figures."""

import json
import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist
from script_arguments import stand_in

WORLD, SEQUENCE, MICROBATCHES, FACTOR = 2, 16, 2, 1.3
VOCABULARY = (64, 64, 8, 64, 1, 8, 1)  # token ids in each step: the fewer, the less even is the load


def work(rank, store, factor):
    from counted_experts import CountedExperts
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.moe_layer import MoESubmodules
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner
    from megatron.core.transformer.transformer_config import TransformerConfig

    import megatron_ep as ep
    from megatron_ep.megatron.layer import ep_layer_spec, replaced

    def counted(node):
        return MoESubmodules(experts=CountedExperts, router=node.router) if isinstance(node, MoESubmodules) else None

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=WORLD)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    config = TransformerConfig(
        **dict(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, moe_ffn_hidden_size=24),
        **dict(num_moe_experts=8, moe_router_topk=2, moe_router_dtype="fp64", moe_router_load_balancing_type="none"),
        **dict(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep", params_dtype=torch.float32),
        **dict(expert_model_parallel_size=WORLD, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0),
        use_cpu_initialization=True,
    )
    config.moe_expert_rank_capacity_factor = factor  # its own check asks for Transformer Engine's experts
    spec = ep_layer_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    model = GPTModel(config, replaced(spec, counted), 64, SEQUENCE, position_embedding_type="rope")
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    config.no_sync_func, config.grad_scale_func = ddp.no_sync, None
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.2, sgd_momentum=0.0), [ddp])
    run, repeats, suggested = get_forward_backward_func(), [], []
    if factor is not None:
        run = PagedStashRunner(config, False, [ddp], optimizer, run)
        prepare = run.prepare_for_rerun

        def prepare_for_rerun(*args, **kwargs):
            repeats.append(run._required_recv_capacity)
            suggested.append(run._required_capacity_factor)
            prepare(*args, **kwargs)

        run.prepare_for_rerun = prepare_for_rerun

    def forward(data, model):
        tokens = next(data)
        output = model(tokens, torch.arange(SEQUENCE).unsqueeze(0), None, labels=tokens.roll(-1, 1))
        return output, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})

    losses = []
    for step, ids in enumerate(VOCABULARY):
        generator = torch.Generator().manual_seed(10 * step + rank)
        batches = [torch.randint(ids, (1, SEQUENCE), generator=generator) for _ in range(MICROBATCHES)]
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        reports = run(
            forward_step_func=forward,
            data_iterator=iter(batches) if factor is None else [iter(batches)],
            model=[ddp],
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        ep.raise_if_failed()
        optimizer.step()
        losses.append(float(torch.stack([report["loss"] for report in reports]).mean()))
    return {"losses": losses, "repeats": repeats, "suggested": suggested}


def ranks(factor):
    """`work` of all of them, each in a process."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(WORLD) as processes:
        return processes.starmap(work, [(rank, f"{folder}/store", factor) for rank in range(WORLD)], 1)


if __name__ == "__main__":
    stand_in()
    sys.path.insert(0, sys.argv[1])
    torch.set_num_threads(1)
    from megatron_ep.megatron.stand_ins import host_runtime

    host_runtime.enable()
    print("FIGURES", json.dumps({str(factor): ranks(factor) for factor in (None, FACTOR)}))

"""CUDA graphs of Transformer Engine's that hold the router and what comes before dispatch, as public flag sets of
DeepSeek-V3, Qwen3 and Nemotron capture them, with recomputation of layernorms. A TransformerLayer is replayed with
other tokens, against the same layer without a graph. Two ranks, a process each, on two GPUs where there are two."""

import pytest
import torch
from skips import missing

pytestmark = pytest.mark.needs(missing("megatron.core", "transformer_engine"))

W, LENGTH, HIDDEN = 2, 64, 256
PREPROCESS = ("moe_router", "moe_preprocess")
SHARED = {"moe_shared_expert_intermediate_size": 128}


def make_layer(scope, modules, options):
    """A layer of Transformer Engine's; scope: of its graph, None: it has none."""
    from gpu_layers import make_config
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import enums

    from megatron_ep.megatron.layer import ep_layer_spec

    config = make_config(
        **{"params_dtype": torch.bfloat16, "bf16": True, "moe_grouped_gemm": True, "normalization": "RMSNorm"},
        **{"hidden_size": HIDDEN, "hidden_dropout": 0.0, "attention_dropout": 0.0, **options},
        **({"recompute_granularity": "selective", "recompute_modules": modules} if scope and modules else {}),
    )
    if scope:
        config.cuda_graph_impl = "transformer_engine"
        is_new = hasattr(enums, "CudaGraphModule")
        parts = enums.CudaGraphModule if is_new else enums.CudaGraphScope
        setattr(config, "cuda_graph_modules" if is_new else "cuda_graph_scope", [parts[name] for name in scope])
    spec = ep_layer_spec(get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=True))
    return spec.module(config, spec.submodules, layer_number=1).cuda().train()


def capture(layer):
    """As Megatron's TECudaGraphHelper does it, for one layer and microbatch."""
    from megatron.core.transformer import cuda_graphs
    from transformer_engine.pytorch import make_graphed_callables

    arguments = layer.get_layer_static_inputs(LENGTH, 1)
    cuda_graphs._set_capture_start()
    try:
        graphs = make_graphed_callables(
            (layer,),
            [(arguments.pop("hidden_states"),)],
            sample_kwargs=[arguments],
            num_warmup_iters=3,
            allow_unused_input=True,
            fp8_enabled=False,
            _order=[1, -1],
            _num_layers_per_chunk=[1],
        )
    finally:
        cuda_graphs._set_capture_end()
    torch.cuda.synchronize()
    layer.cuda_graphs, layer.cuda_graph_manual_hooks = list(graphs), []


def step(layer, x, grad):
    """The output, and the gradients of x and of every parameter that has one."""
    layer.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    output, _ = layer(leaf, attention_mask=None)
    output.backward(grad)
    parts = {name: parameter.grad.clone() for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return {"output": output.detach().clone(), "x": leaf.grad, **parts}


def replay_with_other_tokens(scope, modules, options):
    import torch.distributed as dist
    from gpu_layers import join
    from megatron.core import tensor_parallel
    from shared_settings import configured

    import megatron_ep as ep

    join()
    tensor_parallel.model_parallel_cuda_manual_seed(1, te_rng_tracker=True, force_reset_rng=True)
    with configured(num_sms=4, timeout=30.0):
        eager, layer = make_layer(None, modules, options), make_layer(scope, modules, options)
        layer.load_state_dict(eager.state_dict())
        capture(layer)
        generator, routes = torch.Generator().manual_seed(dist.get_rank()), set()
        for _ in range(5):
            x, grad = torch.randn(2, LENGTH, 1, HIDDEN, generator=generator).to("cuda", torch.bfloat16)
            actual, expected = step(layer, x, grad), step(eager, x, grad)
            assert actual.keys() == expected.keys()
            for name, value in expected.items():
                distance = (actual[name].float() - value.float()).norm() / value.float().norm()
                assert distance < 2e-2, f"{name}: {distance}"
            routes.add(tuple(layer.mlp.token_dispatcher.topk_idx.flatten().tolist()))
        ep.raise_if_failed()
        assert len(routes) == 5, "the routing did not change"


@pytest.mark.parametrize("modules", [None, ["layernorm"]], ids=["", "layernorm"])
@pytest.mark.parametrize("options", [{}, SHARED], ids=["", "shared experts"])
@pytest.mark.parametrize("scope", [PREPROCESS, ("attn", *PREPROCESS), ("moe_router",)], ids=" ".join)
def test_a_replayed_part_of_a_layer(ranks, scope, options, modules):
    ranks.run(replay_with_other_tokens, scope, modules, options)

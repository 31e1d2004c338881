"""Megatron's inference engine on GPUs with our dispatcher: it decodes in the low-latency mode, in its own CUDA graphs.

Two ranks, a process each, on two GPUs where there are two.
"""

import functools

import pytest
import torch
from graphs import captured
from run_on import run_on
from skips import missing

pytestmark = pytest.mark.needs(missing("megatron.core"))

W, BATCH, NEW, MOST = 2, 4, 8, "moe_low_latency_max_tokens"


def prompts():
    rank = torch.distributed.get_rank()
    return [" ".join(str((7 * i + 3 * rank + j) % 64) for j in range(9)) for i in range(BATCH)]


def config_of(**options):
    from generation import MODEL
    from gpu_layers import make_config

    return make_config(**MODEL, moe_router_enable_expert_bias=False, **options)


def configured(**settings):
    import shared_settings

    return shared_settings.configured(num_sms=4, timeout=30.0, **settings)


@run_on("ranks")
def test_the_engine_decodes_in_its_own_graphs():
    from generation import counted, generate, make_engine, make_model
    from gpu_layers import join
    from megatron.core import tensor_parallel
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    join()
    theirs = make_model(config_of(), ours=False)  # by its all-to-all
    expected, weights = generate(make_engine(theirs, BATCH), prompts(), NEW), theirs.state_dict()
    options = {"cuda_graph_impl": "local", "flash_decode": True}
    with configured(**{MOST: BATCH}), counted() as calls:
        model = make_model(config_of(**options), ours=True, weights=weights, inference_rng_tracker=True)
        engine = make_engine(model, BATCH)
        # Before it captures, Megatron tries a step out, and spoils the cache of the first prompts.
        generate(engine, prompts(), NEW)
        captured = calls.one_hop
        results = [generate(engine, prompts(), NEW) for _ in range(2)]
        managers = [module.cudagraph_manager for module in model.modules() if hasattr(module, "cudagraph_manager")]
        graphs = [runner for manager in managers for runner in manager.cudagraph_runners]
        assert graphs and all(runner.fwd_graph is not None for runner in graphs)
        assert results == [expected] * 2
        assert (calls.rings, calls.one_hop) == (3 * 2, captured), "the prefills alone, two layers each"
        assert captured > 0
        torch.cuda.synchronize()
        del graphs, managers, engine, model
        delete_cuda_graphs()
        torch.cuda.set_stream(torch.cuda.default_stream())  # Megatron captures on another one
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)


@pytest.mark.parametrize(
    "settings", [{}, {"moe_apply_probs_on_combine": True}, {"moe_dispatch_fwd_dtype": "fp8"}], ids=str
)
@pytest.mark.parametrize("kind", ["megatron", "fused"])
@run_on("ranks")
def test_a_layer_decodes_in_a_graph(kind, settings):
    """A decoding step of one layer, captured once and replayed with other tokens: the bits of the normal mode."""
    from generation import counted
    from gpu_layers import join
    from megatron.core.inference import utils
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    import megatron_ep as ep
    from megatron_ep.megatron.layer import ep_layer_spec
    from megatron_ep.megatron.router import fused_router

    join()
    config = config_of(params_dtype=torch.bfloat16, bf16=True)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    steps = torch.randn(4, BATCH, 1, config.hidden_size, generator=generator).to("cuda", torch.bfloat16)

    def make_layer(weights=None):
        layer = ep_layer_spec(spec, router=fused_router if kind == "fused" else None)(config=config).cuda().eval()
        if weights is not None:
            layer.load_state_dict(weights)
        utils.moe_layer_cache = None  # Megatron looks for the layers of one model only
        utils.set_decode_expert_padding(layer, True, capacity_factor=config.num_moe_experts / config.moe_router_topk)
        return layer

    def run(layer, x):
        with torch.inference_mode(), counted() as calls:
            return layer(x)[0], (calls.rings, calls.one_hop)

    with configured(**settings):
        layer = make_layer()
        expected = []
        for x in steps:
            output, calls = run(layer, x)
            assert calls == (1, 0)
            expected.append(output.clone())
        utils.set_decode_expert_padding(layer, False)
    with configured(**settings, **{MOST: BATCH}):
        layer, x = make_layer(layer.state_dict()), steps[0].clone()
        graph, (output, calls) = captured(functools.partial(run, layer, x))
        assert calls == (0, 1)
        for step, result in zip(steps, expected, strict=True):
            x.copy_(step)
            graph.replay()
            torch.cuda.synchronize()
            assert result.abs().sum() > 0 and torch.equal(output, result)
        utils.set_decode_expert_padding(layer, False)
        ep.raise_if_failed()
        del graph, output

"""A whole MoE layer of Megatron's, router and experts included, without a wait of the host, and in a CUDA graph.

Two ranks, a process each, on two GPUs where there are two.
"""

import pytest
import torch
from graphs import captured
from run_on import run_on
from skips import missing

pytestmark = pytest.mark.needs(missing("megatron.core"))

W, T, FACTOR = 2, 96, "moe_expert_rank_capacity_factor"


def configured(**settings):
    import shared_settings

    return shared_settings.configured(num_sms=4, timeout=30.0, **settings)


def make_layer(kind, config, router="megatron"):
    import counted_experts
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    from megatron_ep.megatron.layer import ep_layer_spec
    from megatron_ep.megatron.router import fused_router

    builder = fused_router if router == "fused" else None
    if kind == "CountedExperts":
        return counted_experts.make_layer(config, router=builder).cuda()
    spec = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    experts = "grouped" if kind == "GroupedExperts" else None
    layer = ep_layer_spec(spec, router=builder, experts=experts)(config=config).cuda()
    assert type(layer.experts).__name__ == kind
    return layer


def inputs(config, seed):
    generator = torch.Generator().manual_seed(10 * seed + torch.distributed.get_rank())
    x = torch.randn(T, 1, config.hidden_size, generator=generator) * (1 + seed % 3)
    return x.to("cuda", config.params_dtype)


def capture(layer, x, grad):
    from gpu_layers import fresh, step

    def whole_step():
        results = step(layer, x, grad)
        fresh(layer, x)
        return results

    return captured(whole_step, 2)


def replay_with_other_tokens(kind, router, factors, settings, options):
    """factors: of the rank's capacity, of the layer without a graph that each replay is compared with."""
    from gpu_layers import fresh, join, make_config, step

    from megatron_ep import raise_if_failed

    join()
    with configured(**settings):
        config = make_config(**options)
        layer = make_layer(kind, config, router)
        x, grad = inputs(config, 0).requires_grad_(), inputs(config, 100)
        graph, outputs = capture(layer, x, grad)
        manager, counts = layer.token_dispatcher._comm_manager, set()
        # bf16; or what is left of products of fp32, which Transformer Engine computes in TF32
        tolerance = 2e-2 if kind == "GroupedExperts" else 1e-3 if missing("transformer_engine") is None else 1e-4
        for seed in range(1, 6):
            with torch.no_grad():
                x.copy_(inputs(config, seed))
            graph.replay()
            torch.cuda.synchronize()
            results = [part.clone() for part in outputs]
            for factor in factors:
                manager.moe_expert_rank_capacity_factor = factor
                leaf = x.detach().clone().requires_grad_()
                fresh(layer, leaf)
                expected = step(layer, leaf, grad)
                if factor == factors[0]:
                    counts.add(tuple(manager.tokens_per_expert.tolist()))
                for ours, theirs in zip(results, expected, strict=True):
                    assert ours.isfinite().all() and ours.abs().sum() > 0
                    scale = theirs.float().abs().max().item()
                    torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance * scale)
                torch.cuda.synchronize()
        raise_if_failed()
        assert len(counts) == (1 if kind == "SequentialMLP" else 5), "the routing did not change, or the padding did"
        del graph, outputs


WITHOUT_COUNTS = (4.0, None)  # without a graph; and with rows as many as come


@pytest.mark.parametrize("router", ["megatron", "fused"])
@pytest.mark.parametrize("kind", ["CountedExperts", "GroupedExperts"])
def test_a_layer_is_replayed_with_other_routing(ranks, kind, router):
    if kind == "GroupedExperts" and not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no grouped product")
    options = {"params_dtype": torch.bfloat16, "bf16": True} if kind == "GroupedExperts" else {}
    ranks.run(replay_with_other_tokens, kind, router, WITHOUT_COUNTS, {FACTOR: 4.0}, options)


@pytest.mark.parametrize("settings", [{"moe_apply_probs_on_combine": True}, {"moe_dispatch_fwd_dtype": "fp8"}])
def test_a_layer_with_other_options_in_a_graph(ranks, settings):
    ranks.run(replay_with_other_tokens, "CountedExperts", "fused", WITHOUT_COUNTS, {FACTOR: 4.0, **settings}, {})


def test_drop_and_pad_with_megatrons_experts_in_a_graph(ranks):
    """Every expert's rows are its capacity, which the host knows."""
    padded = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
    ranks.run(replay_with_other_tokens, "SequentialMLP", "megatron", (None,), {}, padded)


def overflow_in_a_graph(factor):
    from gpu_layers import join, make_config

    import megatron_ep as ep

    join()
    with configured(**{FACTOR: factor}):
        config = make_config()
        layer = make_layer("CountedExperts", config)
        x, grad = inputs(config, 0).requires_grad_(), inputs(config, 100)
        graph, outputs = capture(layer, x, grad)
        dispatcher = layer.token_dispatcher
        torch.cuda.synchronize()
        dispatcher.reset_over_budget()
        torch.distributed.barrier()
        graph.replay()
        torch.cuda.synchronize()
        over = bool(dispatcher.check_over_budget())
        assert outputs[0].isnan().any(), "of some tokens, wherever the rows were too few"
        torch.distributed.barrier()
        try:
            ep.raise_if_failed()
        except (ep.EPOverflowError, ep.EPAbortError) as error:
            assert "moe_expert_rank_capacity_factor makes room for" in str(error)
            told = True
        else:
            told = False
        assert told or not over
        torch.distributed.barrier()
        if not told:
            with pytest.raises(ep.EPAbortError):
                ep.raise_if_failed()
        del graph, outputs
    return over


def test_an_overflow_in_a_graph_is_told(ranks):
    # a rank with fewer rows than that leaves more to the other one
    assert any(ranks.run(overflow_in_a_graph, 0.9))


def test_an_overflow_of_all_ranks_in_a_graph_is_told_once(ranks):
    assert all(ranks.run(overflow_in_a_graph, 0.5))


@pytest.mark.parametrize("router", ["megatron", "fused"])
@pytest.mark.parametrize("kind", ["SequentialMLP", "CountedExperts"])
@run_on("ranks")
def test_torch_waits_for_nothing(kind, router):
    """SequentialMLP takes the counts that the host has by notify, which is the one wait of a layer, and not torch's."""
    from gpu_layers import fresh, join, make_config, step

    from megatron_ep import raise_if_failed

    join()
    with configured(**{FACTOR: 4.0} if kind == "CountedExperts" else {}):
        config = make_config()
        layer = make_layer(kind, config, router)
        x, grad = inputs(config, 0).requires_grad_(), inputs(config, 100)
        step(layer, x, grad)
        torch.cuda.set_sync_debug_mode("error")
        try:
            fresh(layer, x)
            step(layer, x, grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        raise_if_failed()

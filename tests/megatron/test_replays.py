"""A replay of a layer, of it alone or inside of a checkpoint around it, takes the layout of its forward pass; one of it
alone combines nothing."""

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from counted_experts import make_layer
from host_backends import Launches
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from shared_settings import configured

import megatron_ep as ep
from megatron_ep.megatron import shared_buffers
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router

pytestmark = pytest.mark.numerical

W = 4
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True}


def _inputs(config, passes):
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = 12 if config.moe_pad_expert_input_to_capacity else 11 + dist.get_rank()
    return torch.randn(2, passes, tokens, 1, config.hidden_size, generator=generator).to(config.params_dtype)


def _backward(layer, x, grad, between=lambda: None):
    """All forward passes come first. Outputs and gradients, and the calls of both."""
    leaves = [part.clone().requires_grad_() for part in x]
    layer.zero_grad()
    with Launches() as calls:
        outputs = [layer(leaf)[0] if isinstance(layer, MoELayer) else layer(leaf, None) for leaf in leaves]
        between()
        for output, part in zip(outputs, grad, strict=True):
            output.backward(part)
    return [*outputs, *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in layer.parameters())], calls.counts


@pytest.mark.parametrize(
    ("settings", "options", "router"),
    [
        ({}, {}, None),
        ({}, {}, fused_router),
        ({}, {"moe_apply_probs_on_combine": True}, None),
        ({}, {"moe_expert_rank_capacity_factor": 4.0}, fused_router),
        ({"params_dtype": torch.float32, "hidden_size": 128}, {"moe_dispatch_fwd_dtype": "fp8"}, None),
        (SHARED, {}, None),
        (CAPACITY, {}, None),
    ],
)
@run_on("four_ranks")
def test_a_replay_asks_for_no_counts_and_combines_nothing(settings, options, router):
    join_layout(1, W)
    with configured(**options):
        plain = make_layer(make_config(**settings), router=router)
        replayed = make_layer(make_config(**settings, **RECOMPUTE), router=router)
        replayed.load_state_dict(plain.state_dict())
        x, grad = _inputs(plain.config, 2)
        expected, (counts, dispatches, combines) = _backward(plain, x, grad)
        actual, calls = _backward(replayed, x, grad)
        assert calls == [counts, dispatches + 2, combines], "of two passes: no counts and no combine more"
        # Not bit by bit: the first pass of a replay needs no gradient, and torch then multiplies in another order.
        off = 1e-12 if plain.config.params_dtype is torch.float64 else 1e-5
        torch.testing.assert_close(actual, expected, rtol=off, atol=off)
        assert not any(replayed.token_dispatcher._replays._layouts.values())
        ep.raise_if_failed()


@run_on("four_ranks")
def test_where_the_forward_pass_is_not_known_the_replay_asks():
    join_layout(1, W)
    layer = make_layer(make_config(**RECOMPUTE))
    x, grad = _inputs(layer.config, 2)
    expected, [counts, *_] = _backward(layer, x, grad)
    assert counts == 2
    closed, [counts, *_] = _backward(layer, x, grad, shared_buffers.close_buffers)
    assert counts == 4, "the layouts were those of a buffer that is closed"
    torch.testing.assert_close(closed, expected, rtol=0, atol=0)
    with torch.no_grad():  # of which there is no replay
        layer(x[0])
    assert not any(layer.token_dispatcher._replays._layouts.values())
    layer.token_dispatcher.trusts_router = False  # ranks may then split tokens or not
    _, [counts, *_] = _backward(layer, x, grad)
    assert counts == 4


@pytest.mark.parametrize(("method", "number"), [("uniform", 1), ("uniform", 2), ("block", 3)])
@run_on("four_ranks")
def test_a_replay_of_layers_around_asks_for_no_counts(method, number):
    """Of four layers in a checkpoint, which are called twice, with the same input, before the first is replayed."""
    join_layout(1, W)
    model_parallel_cuda_manual_seed(1)
    rest = {"num_layers": 4, "params_dtype": torch.float32, "moe_router_dtype": "fp32"}
    blocks = []
    full = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
    for recompute in ({}, full):
        config = make_config(**rest, **recompute)
        spec = ep_layer_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
        blocks.append(TransformerBlock(config, spec, post_process=False))
    blocks[1].load_state_dict(blocks[0].state_dict())
    x, grad = _inputs(blocks[0].config, 2)
    x[1] = x[0]
    results = []
    for block in blocks:
        model_parallel_cuda_manual_seed(1)
        results.append(_backward(block, x, grad))
    (expected, (counts, dispatches, combines)), (actual, calls) = results
    replays = 2 * (3 if method == "block" else 4)
    assert calls == [counts, dispatches + replays, combines + replays], "no counts more"
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@run_on("four_ranks")
def test_a_replay_that_chooses_other_experts_is_no_number():
    join_layout(1, W)
    layer = make_layer(make_config(**RECOMPUTE))
    x, grad = _inputs(layer.config, 1)

    def another_router():
        layer.router.weight.data.neg_()

    gradients, _ = _backward(layer, x, grad, another_router)
    assert gradients[1].isnan().any(), "gradients of other experts than the output's are no number"

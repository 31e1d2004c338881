"""Rows and gradients that travel as fp8 to experts that round them so: layers have the bits that they have without.

A test is a function that runs on all four ranks.
"""

import contextlib
from unittest import mock

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from blockwise_experts import BlockwiseExperts, te_rounded
from counted_experts import CountedExperts, make_layer
from shared_settings import configured

import megatron_ep as ep
from megatron_ep.megatron import fp8_rows
from megatron_ep.megatron.equivalence import join_layout, make_config, make_dispatcher
from megatron_ep.normal import autograd

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("no_other_buffers")]

W = 4
ROWS, GRADIENTS = {"moe_dispatch_fwd_dtype": "fp8"}, {"moe_combine_bwd_dtype": "fp8"}
BOTH = {**ROWS, **GRADIENTS}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def blockwise(fp8="e4m3", fp8_recipe="blockwise", **settings):
    config = make_config(
        **{
            "hidden_size": 320,  # its last block has 64 elements
            "moe_ffn_hidden_size": 256,
            "params_dtype": torch.bfloat16,
            "bf16": True,
            "moe_router_dtype": "fp32",
            **settings,
        }
    )
    config.fp8, config.fp8_recipe = fp8, fp8_recipe  # Megatron's check of them wants Transformer Engine
    return config


def inputs(config, tokens=40):
    """Tokens and gradients of many sizes, some of them zero."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(2, tokens, 1, config.hidden_size, generator=generator)
    x *= torch.exp(3 * torch.randn(2, tokens, 1, 1, generator=generator))
    x[:, 3], x[1, 5, :, :128] = 0, 0
    return x.to(config.params_dtype)


def run(layer, x, grad):
    leaf = x.clone().requires_grad_()
    with contextlib.ExitStack() as stack:
        if layer.config.recompute_granularity:  # Megatron's checkpoint with fp8 is Transformer Engine's
            stack.enter_context(mock.patch.object(layer.config, "fp8", None))
        output, _ = layer(leaf)
        output.backward(grad)
    return output.detach(), leaf.grad, [parameter.grad.clone() for parameter in layer.experts.parameters()]


def dtypes_sent(monkeypatch):
    """The dtypes, and formats of scales, in which rows are rounded from now on."""
    sent, rounded = [], autograd.quantized

    def noted(xs, scales, dtype):
        sent.append((scales, dtype))
        return rounded(xs, scales, dtype)

    monkeypatch.setattr(autograd, "quantized", noted)
    return sent


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize(
    ("tp", "ep_size", "settings", "options", "topology"),
    [
        (1, 4, {}, ROWS, None),
        (1, 4, {}, GRADIENTS, None),
        (1, 4, {}, BOTH, None),
        (2, 2, {}, BOTH, None),
        (1, 4, {}, BOTH, ep.Topology(2, 2)),
        (1, 4, RECOMPUTE, BOTH, None),
        (1, 4, {"params_dtype": torch.float16, "bf16": False, "fp16": True}, BOTH, None),
        (1, 4, {"params_dtype": torch.float32, "bf16": False}, BOTH, None),
        (1, 4, {}, {**BOTH, "moe_chunks": 2}, None),
    ],
)
@run_on("four_ranks")
def test_same_bits(tp, ep_size, settings, options, topology, fp8):
    join_layout(tp, ep_size)
    config = blockwise(fp8=fp8, **settings)
    x, grad = inputs(config)
    if config.fp16:
        x, grad = x.clamp(-100, 100), grad.clamp(-100, 100)
    chunks = {key: value for key, value in options.items() if key == "moe_chunks"}
    with configured(topology=topology, **chunks):
        plain = make_layer(config, BlockwiseExperts)
        expected = run(plain, x, grad)
    with configured(topology=topology, **options), pytest.MonkeyPatch.context() as patch:
        sent = dtypes_sent(patch)
        layer = make_layer(config, BlockwiseExperts)
        layer.load_state_dict(plain.state_dict())
        output, dx, weights = run(layer, x, grad)
    assert torch.equal(output, expected[0]) and torch.equal(dx, expected[1]) and output.any() and dx.any()
    for ours, theirs in zip(weights, expected[2], strict=True):  # sums of other roundings
        assert (ours - theirs).double().norm() <= 0.1 * theirs.double().norm()
    of_gradients = torch.float8_e4m3fn if fp8 == "e4m3" else torch.float8_e5m2
    assert {dtype for _, dtype in sent} == {
        *((torch.float8_e4m3fn,) if "moe_dispatch_fwd_dtype" in options else ()),
        *((of_gradients,) if "moe_combine_bwd_dtype" in options else ()),
    }
    assert {scales for scales, _ in sent} == {"pow2"}


@run_on("four_ranks")
def test_scales_that_lose_nothing_are_needed():
    """Scales that fit the largest of a block exactly, as other experts have them, are another rounding."""
    join_layout(1, W)
    config = blockwise()
    x, grad = inputs(config)
    plain = make_layer(config, BlockwiseExperts)
    expected = run(plain, x, grad)
    with configured(**ROWS):
        layer = make_layer(config, BlockwiseExperts)
        layer.load_state_dict(plain.state_dict())
        layer.token_dispatcher.forward_scales = "fp32"
        assert not torch.equal(run(layer, x, grad)[0], expected[0])


@pytest.mark.parametrize(
    ("settings", "experts", "variable"),
    [
        ({"fp8": None}, BlockwiseExperts, None),
        ({"fp8_recipe": "tensorwise"}, BlockwiseExperts, None),
        ({}, CountedExperts, None),
        ({}, BlockwiseExperts, fp8_rows.FP32_SCALES),
    ],
)
@run_on("four_ranks")
def test_rows_of_other_experts_keep_fp32_scales(settings, experts, variable):
    join_layout(1, W)
    with configured(**ROWS), pytest.MonkeyPatch.context() as patch:
        if variable is not None:
            patch.setenv(variable, "1")
        config = blockwise(**settings)
        sent = dtypes_sent(patch)
        run(make_layer(config, experts), *inputs(config))
    assert sent == [("fp32", torch.float8_e4m3fn)]


@pytest.mark.parametrize(
    ("settings", "options", "variables", "words"),
    [
        ({"fp8": None}, {}, {}, r"fp8 \(--fp8-format\) is None"),
        ({"fp8_recipe": "tensorwise"}, {}, {}, "fp8_recipe is tensorwise"),
        ({"fp8_recipe": "mxfp8"}, {}, {}, "fp8_recipe is mxfp8"),
        ({}, {}, {fp8_rows.FP32_SCALES: "1"}, f"{fp8_rows.FP32_SCALES} is 1"),
        ({}, {}, {fp8_rows.BACKWARD_OVERRIDE: "dequantized"}, f"{fp8_rows.BACKWARD_OVERRIDE} is dequantized"),
        ({}, {"moe_apply_probs_on_combine": True}, {}, "moe_apply_probs_on_combine is True"),
        ({"moe_apply_probs_on_input": True, "moe_router_topk": 1}, {}, {}, "moe_apply_probs_on_input is True"),
        ({"add_bias_linear": True}, {}, {}, "add_bias_linear is True"),
        ({"first_last_layers_bf16": True}, {}, {}, "first_last_layers_bf16 is True"),
        ({"quant_recipe": object()}, {}, {}, "quant_recipe is set"),
    ],
)
@run_on("four_ranks")
def test_where_gradients_would_lose(settings, options, variables, words):
    join_layout(1, W)
    config = blockwise()
    for name, value in settings.items():  # also those that Megatron refuses together
        setattr(config, name, value)
    with configured(**GRADIENTS, **options), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(ValueError, match=f"moe_combine_bwd_dtype is 'fp8' and {words}: it rounds gradients"):
            make_dispatcher("ours", config)


@run_on("four_ranks")
def test_gradients_of_other_experts_are_refused():
    join_layout(1, W)
    words = "moe_combine_bwd_dtype is 'fp8' and the experts are CountedExperts, without a linear layer of Transformer"
    with configured(**GRADIENTS), pytest.raises(ValueError, match=words):
        make_layer(blockwise(), CountedExperts)


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@run_on("four_ranks")
def test_step_by_step_as_1f1b_overlap_runs_it(fp8):
    """Experts in a graph of their own round the rows and gradients that reach them to the same numbers."""
    join_layout(1, W)
    config = blockwise(fp8=fp8, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    config.overlap_moe_expert_parallel_comm = True
    x, grad = (part.squeeze(1) for part in inputs(config))
    generator = torch.Generator().manual_seed(dist.get_rank())
    routing_map = torch.rand(len(x), 8, generator=generator).argsort(dim=1) < 2
    found = []
    for options in ({}, BOTH):
        with configured(**options):
            dispatcher = make_dispatcher("ours", config)
            tokens, weights = dispatcher.dispatch_preprocess(x.clone().requires_grad_(), routing_map, routing_map / 2)
            rows, _ = dispatcher.token_dispatch(tokens, weights)
            output = (rows.detach() * 2).requires_grad_()
            combined = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(output)))
            combined.backward(grad)
            found.append((rows.detach(), output.grad))
    of_gradients = torch.float8_e4m3fn if fp8 == "e4m3" else torch.float8_e5m2
    for plain, rounded, dtype in zip(*found, (torch.float8_e4m3fn, of_gradients), strict=True):
        assert not torch.equal(plain, rounded) and torch.equal(te_rounded(plain, dtype), te_rounded(rounded, dtype))

"""Two chunks of a layer's tokens, and weight gradients beside the backward pass of dispatch: the gradients of the layer
without them, and the calls that they take.

A test is a function that runs on all four ranks.
"""

import copy
import itertools
import warnings
from unittest import mock

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from counted_experts import CountedExperts, make_layer
from delayed_experts import DelayedExperts
from host_backends import Launches
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from shared_settings import configured

from megatron_ep.megatron import chunks
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import EPMoELayer
from megatron_ep.megatron.options import Options
from megatron_ep.normal import autograd

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("no_other_buffers")]

W = 4
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def _routed(layer, x, probs, ids, grad):
    """The part of the layer behind the router, which lets no rank be without tokens."""
    layer.zero_grad()
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    layer.token_dispatcher.trusts_router = True
    sent, weights = layer.token_dispatcher.dispatch_preprocess(x, ids, probs)
    rows, row_probs = layer.dispatch(sent, weights)
    output = layer.token_dispatcher.combine_postprocess(layer.combine(layer.routed_experts_compute(rows, row_probs)[0]))
    output.backward(grad)
    return [output.detach(), x.grad, probs.grad, *(weight.grad for weight in layer.experts.parameters())]


def _given(config, tokens):
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, grad = torch.randn(2, tokens, config.hidden_size, generator=generator).to(config.params_dtype)
    scores = torch.rand(tokens, config.num_moe_experts, generator=generator)
    return x, *scores.topk(config.moe_router_topk), grad


def _pair(config, experts=CountedExperts, **settings):
    """A layer without chunks and one with them, of equal parameters."""
    join_layout(1, W)
    config = make_config(**config)
    plain = make_layer(config, experts=CountedExperts)
    with configured(**settings):
        chunked = make_layer(config, experts=experts)
    chunked.load_state_dict(plain.state_dict())
    return plain, chunked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [(16, 16, 16, 16), (24, 7, 1, 0), (0, 0, 5, 0), (0, 0, 0, 0)])
@run_on("four_ranks")
def test_two_chunks_equal_one(dtype, tokens):
    plain, chunked = _pair({"params_dtype": dtype}, moe_chunks=2)
    x, probs, ids, grad = _given(plain.config, tokens[dist.get_rank()])
    for _ in range(2):  # the second pass expects rows
        expected, actual = (_routed(layer, x, probs, ids, grad) for layer in (plain, chunked))
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if number < 3 and dtype is torch.bfloat16:
            assert torch.equal(ours, theirs), "no sum is made of both chunks"
            continue
        off = (ours - theirs).abs().max() / theirs.abs().max() if theirs.any() else ours.abs().sum()
        assert off <= {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype], (number, off)


# ---- calls


@run_on("four_ranks")
def test_calls_of_two_chunks_and_of_one():
    """What is called when, forward and backward."""
    plain, chunked = _pair({}, moe_chunks=2)
    assert not {"dispatch", "combine", "routed_experts_compute"} & {*vars(plain)}, "off: Megatron's own methods"
    x, probs, ids, grad = _given(plain.config, 8)
    found = []
    with Launches() as calls:
        _routed(plain, x, probs, ids, grad)
    assert calls.counts == [1, 2, 2], "counts, dispatches and combines of both passes"
    of = {}  # the chunk of a handle
    dispatch, combine = autograd.DispatchFunction, autograd.CombineFunction

    def noted(function, word):
        backward = function.backward

        def run(ctx, *grads):
            found.append(f"{word}{of[id(ctx.handle)]}")
            return backward(ctx, *grads)

        return mock.patch.object(function, "backward", staticmethod(run))

    def forward(name, word):
        call = getattr(chunked.token_dispatcher.__class__, name)

        def run(dispatcher, *given):
            handle = dispatcher._handle  # dispatch makes it, combine takes it
            result = call(dispatcher, *given)
            handle = handle or dispatcher._handle
            found.append(f"{word}{of.setdefault(id(handle), len(of))}")
            return result

        return mock.patch.object(chunked.token_dispatcher.__class__, name, run)

    experts, numbers = chunked.experts.forward, itertools.count()

    def compute(rows, *given):
        number = next(numbers)
        found.append(f"E{number}")
        output, bias = experts(rows, *given)
        output.register_hook(lambda _: found.append(f"E{number}"))
        return output, bias

    chunked.experts.forward = compute
    with (
        noted(dispatch, "D"),
        noted(combine, "C"),
        forward("token_dispatch", "D"),
        forward("token_combine", "C"),
        Launches() as calls,
    ):
        _routed(chunked, x, probs, ids, grad)
    assert found == ["D0", "D1", "E0", "C0", "E1", "C1", "C1", "E1", "C0", "E0", "D1", "D0"]
    # The second chunk's counts come with a dispatch of a few bytes of each row, which has no backward pass.
    assert calls.counts == [2, 5, 4]


@run_on("four_ranks")
def test_a_replay_takes_the_layouts_of_both_chunks():
    plain, chunked = _pair({**RECOMPUTE}, moe_chunks=2)
    x = torch.randn(9 + dist.get_rank(), 1, 32, dtype=torch.float64)
    results = []
    for layer in (plain, chunked):
        leaf = x.clone().requires_grad_()
        with Launches() as calls:
            outputs = [layer(leaf)[0] for _ in range(2)]
            assert calls.counts == ([2, 2, 2] if layer is plain else [4, 6, 4])
            sum(output.square().sum() for output in outputs).backward()
        # Each chunk's replay dispatches, and combines nothing; then the two calls of its backward pass.
        assert calls.counts == ([2, 6, 4] if layer is plain else [4, 14, 8])
        results.append([*outputs, leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@run_on("four_ranks")
def test_a_pass_of_inference_has_one_chunk():
    _, chunked = _pair({}, moe_chunks=2)
    given = _given(chunked.config, 6)
    expected = _routed(chunked, *given)
    twin = copy.deepcopy(chunked.experts), chunked.routed_experts_compute.__self__
    assert twin[1]._layer is chunked
    with torch.no_grad():  # inference of Megatron pads: then the layer's own steps run
        chunked.token_dispatcher.drop_and_pad = True
        chunked.token_dispatcher.moe_expert_capacity_factor = 8.0
        x, probs, ids, _ = given
        with Launches() as calls:
            rows = chunked.dispatch(*chunked.token_dispatcher.dispatch_preprocess(x, ids, probs))
            output = chunked.combine(chunked.routed_experts_compute(*rows)[0])
        assert calls.counts[1:] == [1, 1]
    torch.testing.assert_close(output, expected[0], rtol=1e-12, atol=1e-12)


# ---- weight gradients beside the backward pass of dispatch


@pytest.mark.parametrize("fuses", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("number", [1, 2])
@run_on("four_ranks")
def test_delayed_weight_gradients_are_ddps_in_the_same_step(number, fuses):
    """Under Megatron's DDP, with two microbatches a step: every gradient is in main_grad when a step's passes end."""
    settings = {"params_dtype": torch.float32, "moe_router_dtype": "fp32"}
    join_layout(1, W)
    config, delaying = make_config(**settings), make_config(**settings)
    setattr(delaying, chunks.DELAYS, True)
    plain = make_layer(config)
    with configured(moe_chunks=number):
        layer = make_layer(delaying, experts=DelayedExperts)
    layer.load_state_dict(plain.state_dict())
    layer.experts.fuses = fuses
    models = []
    for module in (plain, layer):
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
        models.append(DistributedDataParallel(module.config, ddp, module))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        x = torch.randn(2, 7 + dist.get_rank(), 1, 32, generator=generator)
        grads = []
        layer.experts.is_first_microbatch = True  # as Megatron's schedules do before a step
        for model in models:
            model.zero_grad_buffer()
            with model.no_sync():
                model(x[0].clone().requires_grad_())[0].square().sum().backward()
            model(x[1].clone().requires_grad_())[0].square().sum().backward()
            model.finish_grad_sync()
            grads.append({name: parameter.main_grad.clone() for name, parameter in model.named_parameters()})
        for name, theirs in grads[0].items():
            assert theirs.any()
            # In fp32, summed in another order; a gradient that is missing is off by its whole size.
            torch.testing.assert_close(grads[1][name], theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
        assert not layer.experts.later
    assert "".join(layer.experts.told) == ("E" * number + "W" * number) * 4


@run_on("four_ranks")
def test_delayed_weight_gradients_are_added_up():
    """Without DDP gradients are added to those that are there."""
    plain, _ = _pair({})
    config = make_config()
    setattr(config, chunks.DELAYS, True)
    layer = make_layer(config, experts=DelayedExperts)
    layer.load_state_dict(plain.state_dict())
    given = _given(config, 6)
    expected = _routed(plain, *given)[3:]
    _routed(layer, *given)
    with mock.patch.object(layer, "zero_grad"):
        for twice, once in zip(_routed(layer, *given)[3:], expected, strict=True):
            torch.testing.assert_close(twice, 2 * once, rtol=1e-12, atol=1e-12)


# ---- what is refused

PADS = "moe_pad_expert_input_to_capacity"
OVERLAPPED_SHARED_EXPERT = {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_overlap": True}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
OVERLAPPED_MICROBATCHES = {**FLEX, "overlap_moe_expert_parallel_comm": True}


@pytest.mark.parametrize(
    ("fields", "settings", "with_what"),
    [
        ({PADS: True}, {}, f"{PADS}: give"),
        ({}, {"moe_expert_rank_capacity_factor": 2.0}, "moe_expert_rank_capacity_factor: give"),
        (OVERLAPPED_SHARED_EXPERT, {}, "moe_shared_expert_overlap: give"),
        (OVERLAPPED_MICROBATCHES, {}, "overlap_moe_expert_parallel_comm"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, {}, "a CUDA graph that holds the experts"),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, {}, "delayed fp8 scaling"),
        ({chunks.DELAYS: True, PADS: True}, {"moe_chunks": 1}, f"{PADS}: give"),
    ],
)
@run_on("four_ranks")
def test_what_two_chunks_do_not_go_with(fields, settings, with_what):
    what = f"{chunks.DELAYS} is True" if chunks.DELAYS in fields else "moe_chunks is 2"
    join_layout(1, W)
    config = make_config(num_moe_experts=W, moe_router_topk=1, moe_router_pre_softmax=True)
    for name, value in fields.items():
        setattr(config, name, value)
    with configured(**{"moe_chunks": 2, **settings}), pytest.raises(ValueError, match=f"{what} with {with_what}"):
        make_layer(config)


@pytest.mark.parametrize("number", [0, 3, 2.0, True, None])
def test_numbers_of_chunks(number):
    with pytest.raises(ValueError, match=rf"moe_chunks is {number}, must be an int in \[1, 2\]"):
        Options(moe_chunks=number)


@run_on("four_ranks")
def test_a_layer_with_other_steps_is_refused():
    join_layout(1, W)
    with (
        configured(moe_chunks=2),
        mock.patch.object(EPMoELayer, "combine", lambda layer, output: output),
        pytest.raises(ValueError, match="moe_chunks is 2 with a EPMoELayer that is not Megatron's: give one"),
    ):
        make_layer(make_config())


@pytest.mark.parametrize(("held", "wrong"), [(["moe_router", "attn"], False), (["moe"], True), ([], True)])
def test_graphs_that_hold_the_experts(held, wrong):
    config = mock.Mock(cuda_graph_impl="transformer_engine", cuda_graph_modules=held, cuda_graph_scope=None)
    assert chunks._has_graphed_experts(config) is wrong
    config.cuda_graph_impl = "none"
    assert not chunks._has_graphed_experts(config)


@run_on("four_ranks")
def test_sums_in_bf16_are_warned_of():
    for dtype, count in ((torch.bfloat16, 1), (torch.float32, 0)):
        with configured(moe_chunks=2), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            join_layout(1, W)
            make_layer(make_config(params_dtype=dtype))
        told = [str(warning.message) for warning in caught if "gradient_accumulation_fusion" in str(warning.message)]
        assert len(told) == count and all("are added in torch.bfloat16, which rounds once more" in t for t in told)

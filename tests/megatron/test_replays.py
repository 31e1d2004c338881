"""A replay of a layer, of it alone or inside of a checkpoint around it, takes the layout of its forward pass, whatever
the router would choose now; one of it alone combines nothing. Other functions that call a layer again dispatch anew."""

import gc
import itertools
import sys
import types
import warnings
from unittest import mock

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from counted_experts import make_layer
from host_backends import Launches
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import checkpoint, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from nightly import at_night
from shared_settings import configured
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import megatron_ep as ep
from megatron_ep.megatron import checkpoints, replays, shared_buffers
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


def _kept(layer):
    """The passes whose replay may come."""
    gc.collect()
    return len(layer.token_dispatcher._replays._passes)


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
        del actual
        assert not _kept(replayed)
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
    del expected, closed
    assert not _kept(layer)
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


class TransformerEngine:
    """What Transformer Engine's module has that a layer's checkpoint uses."""

    class _CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run_function, *inputs):
            ctx.run_function = run_function
            ctx.save_for_backward(*inputs)
            with torch.no_grad():
                return run_function(*inputs)

        @staticmethod
        def backward(ctx, *grads):
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                outputs = ctx.run_function(*inputs)
            torch.autograd.backward(outputs, *grads)
            return None, *(x.grad for x in inputs)


TransformerEngine._CheckpointFunction.__module__ = "transformer_engine.pytorch.distributed"


def _reentrant(function, x):
    return torch_checkpoint(function, x, use_reentrant=True)


def _not_reentrant(function, x):
    return torch_checkpoint(function, x, use_reentrant=False)


def _megatrons(function, x):
    return checkpoint(function, False, x)


def _transformer_engines(function, x):
    return TransformerEngine._CheckpointFunction.apply(function, x)


def _inside(outer, inner):
    return lambda function, x: outer(lambda y: inner(function, y), x)


def _itself(function, x):
    return function(x)


CHECKPOINTS = {
    "the layer's": _itself,
    "Megatron's": _megatrons,
    "Transformer Engine's": _transformer_engines,
    "torch's, reentrant": _reentrant,
    "torch's": _not_reentrant,
    "one inside one": _inside(_megatrons, _megatrons),
    "torch's inside Megatron's": _inside(_megatrons, _not_reentrant),
    "torch's inside torch's": _inside(_not_reentrant, _not_reentrant),
    "the layer's inside torch's": _not_reentrant,
}
GROUPS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
}
FLIPS = {
    "dense": ({}, {}, None),
    "ids": ({}, {}, fused_router),
    "dense, groups and bias": (GROUPS, {}, None),
    "ids, groups and bias": (GROUPS, {}, fused_router),
    "tokens are dropped": ({"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"}, {}, None),
    "two chunks": ({}, {"moe_chunks": 2}, None),
    "shared experts": (SHARED, {}, fused_router),
}


def _flip(layer, is_replay):
    """Gives each token two experts whose scores are next to equal, and which change places where `is_replay` says."""
    gating = layer.router.gating

    def logits_of(x):
        logits = gating(x)
        best = logits.detach().topk(3).indices
        # of one group of experts, so that groups do not change
        second, third = best[..., 1:2], (best[..., 1:2] // 4) * 4 + (best[..., 1:2] + 1) % 4
        third = torch.where(third == best[..., :1], (third // 4) * 4 + (third + 1) % 4, third)
        near = logits.gather(-1, second) + (1e-9 if is_replay() else -1e-9)
        return logits.scatter(-1, third, near)

    layer.router.gating = logits_of


@pytest.mark.parametrize(
    ("case", "how"),
    [
        *(("dense", how) for how in CHECKPOINTS),
        *(("ids", how) for how in ("the layer's", "Megatron's", "torch's", "torch's inside torch's")),
        *(("dense, groups and bias", how) for how in ("the layer's", "torch's")),
        *itertools.starmap(at_night, itertools.product(list(FLIPS)[3:], ("the layer's", "Megatron's", "torch's"))),
        ("tokens are dropped", "Megatron's"),
        ("two chunks", "Megatron's"),
    ],
)
@run_on("four_ranks")
def test_gradients_are_those_of_the_experts_of_the_forward_pass(case, how):
    """Every token changes one of its experts in every replay."""
    join_layout(1, W)
    settings, options, router = FLIPS[case]
    rest = {"hidden_size": 32, **settings}
    runs = []
    with (
        configured(**options),
        mock.patch.dict(sys.modules, {"transformer_engine.pytorch.distributed": TransformerEngine}),
    ):
        checkpoints._known.cache_clear()
        plain = make_layer(make_config(**rest), router=router)
        replayed = make_layer(make_config(**rest, **(RECOMPUTE if "the layer's" in how else {})), router=router)
        replayed.load_state_dict(plain.state_dict())
        is_replay = lambda: torch._C._current_graph_task_id() != -1  # noqa: E731
        _flip(plain, lambda: False)
        _flip(replayed, is_replay)
        x, grad = _inputs(plain.config, 2)
        for layer, wrap in ((plain, _itself), (replayed, CHECKPOINTS[how])):
            leaves, first = [part.clone().requires_grad_() for part in x], layer
            with warnings.catch_warnings(), Launches() as calls:
                warnings.simplefilter("error", UserWarning)
                outputs = [wrap(lambda y, layer=first: layer(y)[0], leaf) for leaf in leaves]
                for output, part in zip(reversed(outputs), reversed(grad), strict=True):
                    output.backward(part)
            runs.append([*outputs, *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in layer.parameters())])
            runs.append(calls.counts[0])
    checkpoints._known.cache_clear()
    torch.testing.assert_close(runs[2], runs[0], rtol=1e-6, atol=1e-6)
    assert runs[3] == runs[1], "no replay asks for counts"
    del outputs, output, runs
    assert not _kept(replayed)


@run_on("four_ranks")
def test_a_choice_that_a_router_cannot_be_given_is_lost_with_one_warning():
    join_layout(1, W)
    layer = make_layer(make_config(moe_enable_routing_replay=True, **RECOMPUTE))  # whose RouterReplay does nothing
    _flip(layer, lambda: torch._C._current_graph_task_id() != -1)
    x, grad = _inputs(layer.config, 2)
    with pytest.warns(UserWarning, match=f"^{len(x[0])} choices of experts differ between a forward pass") as caught:
        gradients, _ = _backward(layer, x, grad)
    assert sum("choices of experts" in str(one.message) for one in caught) == 1
    assert all(part.isfinite().all() for part in gradients)


def test_lost_choices_are_counted_without_a_wait(device):
    lost = replays.LostChoices()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            lost.note(torch.tensor([[True, False], [True, True]], device=device))
            if device == "cuda":
                torch.cuda.synchronize()  # a later replay knows
    assert [str(one.message)[:17] for one in told] == ["3 choices of expe"]


def test_weights_follow_their_experts(device):
    topk_idx = torch.tensor([[5, 2, -1], [0, 1, 2], [-1, -1, 3]], device=device)
    chosen = torch.tensor([[2, 5, -1], [2, 4, 0], [3, -1, -1]], device=device)
    weights = torch.arange(1.0, 10, device=device).view(3, 3).requires_grad_()
    found, lost = replays.weights_of(topk_idx, chosen, weights)
    assert found.tolist() == [[2, 1, 0], [6, 0, 4], [0, 0, 7]]
    assert lost.tolist() == [[False] * 3, [False, True, False], [False] * 3]
    found.backward(torch.arange(10.0, 19, device=device).view(3, 3))
    assert weights.grad.tolist() == [[11, 10, 0], [15, 0, 13], [18, 0, 0]]


class Pieces(torch.autograd.Function):
    """Runs a function on pieces of x without gradients; its backward pass runs them again, in an order of its own."""

    @staticmethod
    def forward(ctx, function, order, x):
        ctx.function, ctx.order = function, order
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([function(part) for part in x.chunk(3)])

    @staticmethod
    def backward(ctx, grad):
        parts = [part.detach().requires_grad_() for part in ctx.saved_tensors[0].chunk(3)]
        for i in ctx.order:
            parts[i].grad = None
            with torch.enable_grad():
                output = ctx.function(parts[i])
            output.backward(grad.chunk(3)[i])
        return None, None, torch.cat([torch.zeros_like(part) if part.grad is None else part.grad for part in parts])


@pytest.mark.parametrize("wrap", [_itself, _megatrons, at_night(_not_reentrant)])
@run_on("four_ranks")
def test_other_functions_that_call_a_layer_again_dispatch_anew(wrap):
    """In the same order, in another, some calls only or repeatedly, inside of a checkpoint, too."""
    join_layout(1, W)
    layer = make_layer(make_config(recompute_granularity="selective", recompute_modules=["core_attn"]))
    (x,), (grad,) = _inputs(layer.config, 1)
    for order in ((0, 1, 2), (2, 1, 0), (1,), (0, 0, 2, 1, 1)):
        leaf, again = x.clone().requires_grad_(), x.clone().requires_grad_()
        layer(leaf)[0].backward(grad)
        wrap(lambda y, order=order: Pieces.apply(lambda part: layer(part)[0], order, y), again).backward(grad)
        for i, (actual, expected) in enumerate(zip(again.grad.chunk(3), leaf.grad.chunk(3), strict=True)):
            torch.testing.assert_close(actual, expected if i in order else 0 * expected, rtol=1e-9, atol=1e-9)
    assert not _kept(layer)


@pytest.mark.parametrize("wrap", [_megatrons, _reentrant, _not_reentrant])
@run_on("four_ranks")
def test_each_replay_begins_with_the_first_pass(wrap):
    """With passes of evaluation and other micro-batches between, of a graph that is kept, and after a replay that has
    stopped in between."""
    join_layout(1, W)
    layer = make_layer(make_config())
    x, grad = _inputs(layer.config, 3)
    fails = []

    def twice(y):
        y = layer(y)[0]
        if fails:
            raise RuntimeError(fails.pop())
        return layer(y)[0]

    expected = []
    for part, of in zip(x, grad, strict=True):
        leaf = part.clone().requires_grad_()
        twice(leaf).backward(of)
        expected.append(leaf.grad)
    leaves = [part.clone().requires_grad_() for part in x]
    with Launches() as calls:
        fails.append("in the forward pass")
        with pytest.raises(RuntimeError, match="in the forward pass"):
            wrap(twice, leaves[0])
        first, second = (wrap(twice, leaf) for leaf in leaves[:2])
        with torch.no_grad():
            layer(x[0])
        second.backward(grad[1])
        third = wrap(twice, leaves[2])
        fails.append("in the replay")
        with pytest.raises(RuntimeError, match="in the replay"):
            first.backward(grad[0], retain_graph=True)
        for _ in range(2):
            first.backward(grad[0], retain_graph=True)
        layer.eval()(x[1])
        layer.train()
        third.backward(grad[2])
    expected[0] *= 2
    torch.testing.assert_close([leaf.grad for leaf in leaves], expected, rtol=1e-12, atol=1e-12)
    assert calls.counts[0] == 1 + 3 * 2 + 2, "one for each pass that is no replay"
    del first, second, third
    assert not _kept(layer)


@pytest.mark.parametrize("wrap", [_megatrons, _not_reentrant])
@run_on("four_ranks")
def test_a_function_that_does_something_else_the_second_time_is_named(wrap):
    join_layout(1, W)
    layer = make_layer(make_config())
    x = torch.randn(6, 1, layer.config.hidden_size, dtype=torch.float64)
    is_first = dist.get_rank() == 0

    def fewer_tokens(y):
        is_replay = torch._C._current_graph_task_id() != -1
        return layer(y[: 4 if is_replay and is_first else 6])[0].sum()

    def more_passes(y):
        is_replay = torch._C._current_graph_task_id() != -1
        return sum(layer(y)[0].sum() for _ in range(2 if is_replay else 1))

    where = r"test_a_function_that_does_something_else_the_second_time_is_named\.<locals>\."
    output = wrap(fewer_tokens, x.clone().requires_grad_())
    says = rf"the recomputation of {where}fewer_tokens passes 4 tokens to a MoE layer, its forward pass passed 6"
    with pytest.raises(*((ValueError,) if is_first else (ep.EPAbortError,)), match=says):
        output.backward()
    shared_buffers.close_buffers()
    if wrap is _megatrons:  # torch's other checkpoint stops once it has what it needs
        output = wrap(more_passes, x.clone().requires_grad_())
        with pytest.raises(ValueError, match=rf"{where}more_passes calls a MoE layer more than 1 times"):
            output.backward()
        shared_buffers.close_buffers()


@run_on("four_ranks")
def test_what_is_kept_is_for_checkpoints_that_hold_the_layer():
    join_layout(1, W)
    layer = make_layer(make_config())
    x, _ = _inputs(layer.config, 1)
    x.requires_grad_()
    beside = _megatrons(torch.sin, x[0])
    output = layer(beside)[0]
    with torch.no_grad():
        layer(x[0])
    assert not _kept(layer)
    held = _not_reentrant(lambda y: layer(y)[0], x[0])
    assert _kept(layer) == 1
    del output, held
    assert not _kept(layer)


def test_the_checkpoints_of_these_versions_are_known():
    checkpoints._known.cache_clear()
    found = [kind for kind, _ in checkpoints._known().values()]
    assert set(found) == {"forward", "backward", "checkpoint", "unpack", "end"}
    assert found.count("forward") == found.count("backward") == 2, "Megatron's and torch's"
    other = types.SimpleNamespace(CheckpointFunction=type("CheckpointFunction", (CheckpointFunction,), {}))
    with mock.patch.dict(sys.modules, {CheckpointFunction.__module__: other}):  # one that took its name
        checkpoints._known.cache_clear()
        assert sum(kind == "forward" for kind, _ in checkpoints._known().values()) == 1
    checkpoints._known.cache_clear()

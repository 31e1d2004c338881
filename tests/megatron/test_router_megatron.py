"""The fused gate against Megatron's functions, and `EPTopKRouter` against Megatron's `TopKRouter`.

T tokens, E experts, K choices of a token. Where whole results are compared, scores are far enough apart that no
rounding decides a choice; what holds of choices in general has its own tests.
"""

import inspect

import pytest
import router_accuracy
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, get_updated_expert_bias
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_ep.megatron import shared_buffers
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import ROUNDS_SCORES, EPTopKRouter, fused_router
from megatron_ep.router.api import grouped_topk

pytestmark = pytest.mark.numerical

W = 2


# ---- functions


def distinct_logits(generator, num_tokens, num_experts, bias=None):
    """[T, E] with sigmoid(logits) + bias in random order on a jittered grid."""
    grid = torch.arange(num_experts) + torch.rand(num_tokens, num_experts, generator=generator) * 0.3
    choice = 0.1 + 0.8 * (grid + 0.5) / num_experts
    choice = choice.gather(1, torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1))
    return torch.logit((choice - (0 if bias is None else bias)).double()).float()


CASES = {
    "DeepSeek-V3": (256, 8, dict(num_groups=8, group_topk=4, scaling_factor=2.5), "sigmoid", True),
    "sigmoid": (64, 6, {}, "sigmoid", False),
    "one expert": (64, 1, dict(scaling_factor=2.5), "sigmoid", True),
    "groups of an odd size": (120, 6, dict(num_groups=5, group_topk=3), "sigmoid", True),
    "best group's one": (96, 4, dict(num_groups=12, group_topk=4), "sigmoid", False),
    "all groups": (64, 8, dict(num_groups=4, group_topk=4), "sigmoid", True),
    "384 experts, one group": (384, 8, dict(num_groups=1, group_topk=1, scaling_factor=2.872), "sigmoid", True),
    "softmax of the chosen": (128, 8, {}, "softmax", False),
    "softmax of the chosen, groups": (128, 8, dict(num_groups=4, group_topk=2), "softmax", False),
    "softmax of all": (128, 8, dict(use_pre_softmax=True, scaling_factor=16.0), "softmax", False),
    "softmax of all, groups": (160, 6, dict(use_pre_softmax=True, num_groups=8, group_topk=3), "softmax", False),
    "E = 1024, K = 32": (1024, 32, dict(num_groups=16, group_topk=8), "sigmoid", True),
}


def compare_with_megatron(logits, k, score_function, bias, rounding, **options):
    theirs, ours = logits.clone().float().requires_grad_(), logits.clone().requires_grad_()
    probs, routing_map = moe_utils.topk_routing_with_score_function(
        theirs, k, score_function=score_function, expert_bias=bias, **options
    )
    options["pre_softmax"] = options.pop("use_pre_softmax", False)
    routing = grouped_topk(ours, k, score_function=score_function, expert_bias=bias, **options, dense=True)
    assert torch.equal(routing.routing_map, routing_map)
    assert torch.equal(routing.tokens_per_expert, routing_map.sum(dim=0))
    torch.testing.assert_close(routing.probs.float(), probs, rtol=rounding, atol=1e-9)
    torch.testing.assert_close(routing.weights, probs.gather(1, routing.ids), rtol=3e-6, atol=1e-9)

    grad = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.dtype)
    probs.backward(grad.float())
    routing.probs.backward(grad)
    atol = 3e-6 * float(theirs.grad.abs().max())
    torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=rounding, atol=atol)


@pytest.mark.parametrize(("num_experts", "k", "options", "score_function", "biased"), CASES.values(), ids=CASES)
def test_equals_megatrons_function(num_experts, k, options, score_function, biased):
    generator = torch.Generator().manual_seed(num_experts + k)
    bias = (torch.rand(num_experts, generator=generator) - 0.5) / 10 if biased else None
    logits = distinct_logits(generator, 64, num_experts, bias)
    compare_with_megatron(logits, k, score_function, bias, rounding=3e-6, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("score_function", "options"), [("sigmoid", dict(num_groups=8, group_topk=4)), ("softmax", {})]
)
def test_16_bit_logits_equal_megatrons_function_in_fp32(score_function, options, dtype):
    """Megatron-Core 0.16 rounds scores to the logits' dtype, later versions do not: both agree on fp32 logits."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.rand(64, 128, generator=generator).argsort(dim=1) / 32 - 2).to(dtype)  # exact, all different
    bias = torch.linspace(-0.001, 0.001, 128) if score_function == "sigmoid" else None
    compare_with_megatron(logits, 8, score_function, bias, rounding=2 * torch.finfo(dtype).eps, **options)


# ---- the router module, on two data-parallel ranks

ROUTERS = {
    "DeepSeek-V3": dict(
        moe_router_score_function="sigmoid",
        moe_router_num_groups=8,
        moe_router_group_topk=2,
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.01,
    ),
    "softmax, auxiliary loss, z-loss": dict(
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001
    ),
    "softmax of all, global auxiliary loss": dict(
        moe_router_pre_softmax=True, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.01
    ),
    "several auxiliary losses": dict(
        moe_router_score_function="sigmoid",
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[0.01, 0.02, 0.03],
        calculate_per_token_loss=True,
    ),
    "no balancing": dict(moe_router_score_function="sigmoid"),
    "capacity": dict(
        moe_router_score_function="sigmoid", moe_expert_capacity_factor=0.6, moe_router_enable_expert_bias=True
    ),
    "drop and pad": dict(moe_expert_capacity_factor=0.6, moe_pad_expert_input_to_capacity=True),
    "a scaling factor of 0 is none": dict(moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=0.0),
}
SPARSE = [name for name, options in ROUTERS.items() if "moe_expert_capacity_factor" not in options]


def make_routers(options, **of_ours):
    """Megatron's router and ours with the same parameters and buffers, and inputs [S, B, H] of this rank."""
    join_layout(1, W)
    defaults = dict(
        params_dtype=torch.float32, moe_router_dtype="fp32", num_moe_experts=32, moe_router_topk=4, hidden_size=64
    )
    config = make_config(**{**defaults, **options})
    torch.manual_seed(0)
    routers = (
        TopKRouter(config, get_default_pg_collection()),
        EPTopKRouter(config, get_default_pg_collection(), **of_ours),
    )
    if config.moe_router_enable_expert_bias:
        routers[0].expert_bias.copy_(torch.randn(32) / 20)
    routers[1].load_state_dict(routers[0].state_dict())
    for router in routers:
        router.set_layer_number(1)
        if config.params_dtype == torch.float32:  # 16-bit logits tie anyway
            router_accuracy.refuse_near_ties(router)
    x = torch.randn(12, 3, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    return config, *routers, x


def run_router(router, x, padding_mask=None):
    """Probs [T, E], map [T, E], gradients of input and weight, and the counts with what becomes of the bias. Of padding
    Megatron's router has experts, too, which are left out."""
    leaf = x.clone().requires_grad_()
    probs, chosen = router(leaf, padding_mask)
    if chosen.dtype == torch.int64:
        experts = router.config.num_moe_experts
        wide, column = probs.new_zeros(len(probs), experts + 1), chosen.masked_fill(chosen < 0, experts)
        probs, chosen = wide.scatter(1, column, probs)[:, :-1], wide.bool().scatter(1, column, True)[:, :-1]
    if padding_mask is not None:
        valid = ~padding_mask.reshape(-1, 1)
        assert isinstance(router, EPTopKRouter) <= bool((chosen <= valid).all()), "padding is not sent"
        probs, chosen = probs * valid, chosen & valid
    grad = torch.randn(probs.shape, generator=torch.Generator().manual_seed(3)) * chosen
    probs.backward(grad)
    counts = router.local_tokens_per_expert
    result = dict(probs=probs.detach(), map=chosen, x=leaf.grad, weight=router.weight.grad)
    if counts is not None:
        result["counts"] = counts.clone()
        result["bias"] = get_updated_expert_bias(counts.clone(), router.expert_bias, 1e-3)
    if router.global_tokens_per_expert is not None:
        result["global_tokens_per_expert"] = router.global_tokens_per_expert.clone()
    router.weight.grad = None
    return result


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if expected.is_floating_point():
            atol = 5e-6 * float(expected.abs().max())
            torch.testing.assert_close(
                ours[name], expected, rtol=5e-6, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert torch.equal(ours[name], expected), name


@pytest.mark.parametrize(("name", "sparse"), [*((name, False) for name in ROUTERS), *((name, True) for name in SPARSE)])
@run_on("ranks")
def test_router_equals_megatrons(name, sparse):
    _, theirs, ours, x = make_routers(ROUTERS[name], sparse=sparse)
    for _ in range(2):  # counts add up
        assert_same(run_router(ours, x), run_router(theirs, x))
    theirs.eval(), ours.eval()
    with torch.no_grad():
        counts = None if ours.local_tokens_per_expert is None else ours.local_tokens_per_expert.clone()
        probs, _ = ours(x)
        assert not probs.requires_grad
        if counts is not None:
            assert torch.equal(counts, ours.local_tokens_per_expert), "no counting without gradients"


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["DeepSeek-V3", "softmax, auxiliary loss, z-loss", "several auxiliary losses"])
@run_on("ranks")
def test_padding_mask(name, sparse):
    _, theirs, ours, x = make_routers(ROUTERS[name], sparse=sparse)
    mask = torch.rand(12, 3, generator=torch.Generator().manual_seed(4)) < 0.4
    if ours.enable_expert_bias:  # Megatron's counting takes no [T] mask, so the map says what to expect
        result = run_router(ours, x, mask)
        expected = result["map"].sum(dim=0)
        assert torch.equal(result["counts"], expected.float())
        theirs.enable_expert_bias = ours.enable_expert_bias = False
        ours.local_tokens_per_expert.zero_()
    assert_same(run_router(ours, x, mask), run_router(theirs, x, mask))


BF16 = dict(params_dtype=torch.bfloat16, bf16=True, moe_router_dtype=None)


@pytest.mark.parametrize("sparse", [False, True])
@run_on("ranks")
def test_bf16_logits(sparse):
    _, _, ours, x = make_routers({**ROUTERS["DeepSeek-V3"], **BF16}, sparse=sparse)
    ours.expert_bias.data = ours.expert_bias.data.bfloat16()  # as Float16Module does
    probs, _ = ours(x.bfloat16())
    assert ours.expert_bias.dtype == torch.float32
    assert probs.dtype == torch.bfloat16
    probs.sum().backward()
    assert ours.weight.grad.dtype == torch.bfloat16 and ours.weight.grad.isfinite().all()
    assert ours.local_tokens_per_expert.sum() == 12 * 3 * 4


@pytest.mark.parametrize("name", SPARSE)
@run_on("ranks")
def test_the_first_steps_in_bf16_equal_megatrons(name):
    """Three steps of SGD of layers with our dispatcher, with Megatron's router and with ours: outputs and weights."""
    join_layout(1, W)
    config = make_config(**{**dict(num_moe_experts=32, moe_router_topk=4, hidden_size=64), **BF16, **ROUTERS[name]})
    spec = get_moe_module_spec(use_te=False, num_experts=32)
    layers = []
    for router in (None, fused_router):
        model_parallel_cuda_manual_seed(7)
        layers.append(ep_layer_spec(spec, router=router)(config=config, layer_number=1))
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in layers]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(3 if ROUNDS_SCORES else 1):  # of equal logits each takes others, and the weights part
        x, grad = torch.randn(2, 40, 2, 64, generator=generator).bfloat16()
        outputs = [layer(x)[0] for layer in layers]
        for output, optimizer in zip(outputs, optimizers, strict=True):
            output.backward(grad)
            optimizer.step()
            optimizer.zero_grad()
        if ROUNDS_SCORES:
            assert torch.equal(*outputs), step
        else:
            assert ((outputs[0] - outputs[1]).abs() < 0.05 * outputs[0].abs().max()).float().mean() > 0.95, step
    if ROUNDS_SCORES:
        for ours, theirs in zip(*(layer.parameters() for layer in layers), strict=True):
            assert torch.equal(ours, theirs)
    shared_buffers.close_buffers()


@pytest.mark.parametrize("sparse", [False, True])
@run_on("ranks")
def test_recompute(sparse):
    _, _, ours, x = make_routers(ROUTERS["DeepSeek-V3"], sparse=sparse)
    plain = run_router(ours, x)
    ours.local_tokens_per_expert.zero_()
    leaf = x.clone().requires_grad_()

    def weighted(leaf):
        weights, chosen = ours(leaf)
        grad = torch.randn(12 * 3, 32, generator=torch.Generator().manual_seed(3))
        return (weights * (grad.gather(1, chosen) if sparse else grad * chosen)).sum()

    torch.utils.checkpoint.checkpoint(weighted, leaf, use_reentrant=True).backward()
    assert torch.equal(leaf.grad, plain["x"]) and torch.equal(ours.weight.grad, plain["weight"])
    assert torch.equal(ours.local_tokens_per_expert, plain["counts"]), "counted once"


@pytest.mark.parametrize("sparse", [False, True])
@run_on("ranks")
def test_replay(sparse):
    RouterReplay.clear_global_router_replay_instances()
    options = {**ROUTERS["DeepSeek-V3"], "moe_enable_routing_replay": True}
    _, theirs, ours, x = make_routers(options, sparse=sparse)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    assert_same(run_router(ours, x), run_router(theirs, x))
    recorded = RouterReplay.get_recorded_data()
    assert torch.equal(recorded[0].sort(dim=1).values, recorded[1].sort(dim=1).values)

    RouterReplay.set_replay_data([recorded[0], recorded[0]])
    other = x.flip(0)
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        RouterReplay.set_global_router_replay_action(action)
        assert_same(run_router(ours, other), run_router(theirs, other))

    ids = recorded[0].clone()  # as other routers record them: an expert may come twice
    ids[::2, 1], ids[::3, -1] = ids[::2, 0], ids[::3, 0]
    RouterReplay.set_replay_data([ids, ids])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    actual, expected = run_router(ours, other), run_router(theirs, other)
    assert int(expected["map"].sum()) < ids.numel()
    assert_same(actual, expected)
    RouterReplay.clear_global_router_replay_instances()


@run_on("ranks")
def test_what_the_router_cannot_do_is_refused():
    join_layout(1, W)
    groups = get_default_pg_collection()
    for options, named in [
        (dict(moe_router_load_balancing_type="sinkhorn"), "sinkhorn"),
        (dict(moe_router_topk=33, num_moe_experts=64), "moe_router_topk is 33"),
        (dict(moe_router_topk=9), "moe_router_topk is 9, must be at most 8"),
        (dict(moe_router_num_groups=4, moe_router_group_topk=3), "moe_router_group_topk is 3, must divide"),
        (
            dict(moe_router_topk=4, moe_router_num_groups=4, moe_router_group_topk=1),
            "moe_router_topk is 4, must be at most the 2 experts of 1 groups",
        ),
        (dict(moe_expert_capacity_factor=1.0), "moe_expert_capacity_factor"),
    ]:
        with pytest.raises(ValueError, match=named):
            EPTopKRouter(make_config(**options), groups, sparse=True)
    for name, value in (("moe_router_fusion", True), ("moe_router_score_function", "sqrtsoftplus")):
        config = make_config()
        setattr(config, name, value)
        with pytest.raises(ValueError, match=name):
            EPTopKRouter(config, groups)
    options = dict(is_mtp_layer=True) if "is_mtp_layer" in inspect.signature(TopKRouter).parameters else {}
    assert fused_router(config=make_config(), pg_collection=groups, **options).sparse
    assert not fused_router(config=make_config(moe_expert_capacity_factor=1.0), pg_collection=groups, **options).sparse

"""`grouped_topk` against the specification in plain torch, on every device at hand.

The experts are compared for equality. So that a rounding in exp cannot decide a choice, the specification takes the
scores themselves from the kernel, as weights of a choice of one expert of one, and their accuracy has its own test.
T tokens, E experts, K choices of a token.
"""

import math
import random
import subprocess
import sys

import pytest
import skips
import torch
from nightly import a_third

from megatron_ep.router.api import Routing, grouped_topk

pytestmark = pytest.mark.numerical

EPSILON = 1e-20
TOLERANCE = {
    torch.float32: dict(rtol=2e-6, atol=1e-9),
    torch.float64: dict(rtol=1e-13, atol=1e-18),
    torch.bfloat16: dict(rtol=8e-3, atol=1e-9),
    torch.float16: dict(rtol=2e-3, atol=1e-6),
}


# ---- the specification


def real(dtype):
    return torch.promote_types(dtype, torch.float32)


def specified_scores(logits, score_function, pre_softmax):
    if score_function == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, dim=1) if pre_softmax else logits


def kernel_scores(logits, score_function, pre_softmax):
    if score_function == "sigmoid":
        return grouped_topk(logits.reshape(-1, 1), 1).weights.view(logits.shape)
    return grouped_topk(logits, 1, score_function="softmax", aux=True).aux_scores if pre_softmax else logits


def order(scores):
    """Best first, NaN best of all, the lowest id first among equals, which torch on a GPU sorts by their bits."""
    scores = torch.where(scores.isnan(), torch.nan, scores) + 0.0
    return scores.sort(dim=-1, descending=True, stable=True)


def specified_ids(scores, k, num_groups, group_topk, expert_bias):
    choice = scores if expert_bias is None else scores + expert_bias
    kept = torch.ones_like(choice, dtype=torch.bool)
    if group_topk:
        best = order(choice.unflatten(1, (num_groups, -1))).values
        group_score = torch.zeros_like(best[..., 0])
        for i in range(k // group_topk):
            group_score = group_score + best[..., i]
        groups = torch.zeros_like(group_score, dtype=torch.bool)
        groups.scatter_(1, order(group_score).indices[:, :group_topk], True)
        kept = groups.repeat_interleave(choice.shape[1] // num_groups, dim=1)
    by_score = order(choice).indices
    kept_first = order(kept.gather(1, by_score).int()).indices
    return by_score.gather(1, kept_first)[:, :k]


def specified_weights(logits, ids, score_function, pre_softmax, renormalize, scaling_factor):
    exists, index = ids >= 0, ids.clamp(min=0)
    picked = specified_scores(logits, score_function, pre_softmax).gather(1, index)
    if score_function == "softmax" and not pre_softmax:
        weights = torch.softmax(picked.masked_fill(~exists, -math.inf), dim=1)
    else:
        weights = picked.masked_fill(~exists, 0)
        if ids.shape[1] > 1 and (score_function == "sigmoid" if renormalize is None else renormalize):
            weights = weights / (weights.sum(dim=1, keepdim=True) + EPSILON)
    return (weights * (scaling_factor or 1)).masked_fill(~exists, 0)


def specified_aux(logits, padding_mask, score_function):
    scores = torch.sigmoid(logits) if score_function == "sigmoid" else torch.softmax(logits, dim=1)
    if score_function == "sigmoid":
        scores = scores / (scores.sum(dim=1, keepdim=True) + EPSILON)
    return scores if padding_mask is None else scores.masked_fill(padding_mask.unsqueeze(1), 0)


def specification(
    logits,
    k,
    num_groups=None,
    group_topk=None,
    score_function="sigmoid",
    expert_bias=None,
    scaling_factor=None,
    pre_softmax=False,
    renormalize=None,
    padding_mask=None,
    replay_ids=None,
) -> Routing:
    dtype, logits = logits.dtype, logits.to(real(logits.dtype))
    scores = kernel_scores(logits.detach(), score_function, pre_softmax)
    ids = specified_ids(scores, k, num_groups, group_topk, expert_bias) if replay_ids is None else replay_ids
    if padding_mask is not None:
        ids = ids.masked_fill(padding_mask.unsqueeze(1), -1)
    weights = specified_weights(logits, ids, score_function, pre_softmax, renormalize, scaling_factor)
    ids, weights = merged(ids, weights)
    num_experts = logits.shape[1]
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    column = ids.masked_fill(ids < 0, num_experts)  # a column to throw away
    wide = logits.new_zeros(logits.shape[0], num_experts + 1)
    probs = wide.scatter(1, column, weights)[:, :-1].to(dtype)
    routing_map = wide.bool().scatter(1, column, True)[:, :-1]
    aux_scores = specified_aux(logits, padding_mask, score_function)
    return Routing(ids, weights, counts, probs, routing_map, aux_scores, None)


def merged(ids, weights):
    """The first of equal ids stands for all: it keeps its weight, and they all get the gradient of that."""
    same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & (ids >= 0).unsqueeze(1)  # [T, K, K]
    repeated = same.tril(-1).any(dim=2)
    others = (weights - weights.detach()).unsqueeze(1).expand_as(same).masked_fill(~(same & repeated.unsqueeze(1)), 0)
    weights = (weights + others.sum(dim=2)).masked_fill(repeated, 0)
    return ids.masked_fill(repeated, -1), weights


# ---- cases


def make_logits(generator, num_tokens, num_experts, dtype, values):
    if values == "continuous":
        logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64) * 3
    else:
        logits = torch.randint(-3, 4, (num_tokens, num_experts), generator=generator).double() * 0.7
    if values == "special" and logits.numel():
        special = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 90.0, -95.0, -0.0], dtype=torch.float64)
        where = torch.rand(logits.shape, generator=generator) < 0.2
        pick = torch.randint(len(special), logits.shape, generator=generator)
        logits = torch.where(where, special[pick], logits)
    return logits.to(dtype)


def random_case(seed, values=("continuous", "tied", "special")):
    """Logits and options of grouped_topk; everything follows from the seed."""
    r = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_groups = r.choice([1, 1, 2, 3, 4, 5, 8, 16, 33])
    group_size = r.choice([1, 2, 3, 4, 7, 8, 20, 32, 33, 48])
    num_experts = num_groups * group_size
    group_topk = r.randint(1, min(num_groups, 32))
    k = r.randint(group_topk, min(32, group_topk * group_size))
    score = r.choice([("sigmoid", False), ("softmax", False), ("softmax", True)])
    num_tokens = r.choice([0, 1, 2, 17])
    logits = make_logits(generator, num_tokens, num_experts, r.choice(tuple(TOLERANCE)), r.choice(values))
    options = dict(k=k, score_function=score[0], pre_softmax=score[1])
    if r.random() < 0.5:
        options |= dict(num_groups=num_groups, group_topk=group_topk)
    if score[0] == "sigmoid" and r.random() < 0.5:
        options["expert_bias"] = torch.randint(-4, 5, (num_experts,), generator=generator) / 16
    if r.random() < 0.5:
        options["scaling_factor"] = r.choice([2.5, 0.125, 1.0])
    if score != ("softmax", False):
        options["renormalize"] = r.choice([None, True, False])
    if r.random() < 0.5:
        options["padding_mask"] = torch.rand(num_tokens, generator=generator) < 0.3
    if r.random() < 0.25:
        ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :k]
        if r.random() < 0.5:
            ids = ids.gather(1, torch.randint(k, ids.shape, generator=generator))  # an expert again, and again
        options["replay_ids"] = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.1, -1)
    return logits, options


def on(device, logits, options):
    moved = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    return logits.to(device), moved


def assert_equal(name, ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}")


def assert_close(name, ours, expected, dtype=None):
    tolerance = TOLERANCE[dtype or ours.dtype]
    torch.testing.assert_close(ours, expected, **tolerance, equal_nan=True, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("seed", a_third(range(400)))
def test_equals_the_specification(device, seed):
    logits, options = on(device, *random_case(seed))
    ours = grouped_topk(logits, **options, dense=True, aux=True)
    expected = specification(logits, **options)
    assert_equal("ids", ours.ids, expected.ids)
    assert_equal("tokens_per_expert", ours.tokens_per_expert, expected.tokens_per_expert)
    assert_equal("routing_map", ours.routing_map, expected.routing_map)
    assert_close("weights", ours.weights, expected.weights)
    assert_close("probs", ours.probs, expected.probs)
    assert_close("aux_scores", ours.aux_scores, expected.aux_scores)
    best = specified_ids(ours.aux_scores, options["k"], None, None, None)
    aux_map = torch.zeros_like(ours.aux_map).scatter(1, best, True)
    if "padding_mask" in options:
        aux_map &= ~options["padding_mask"].unsqueeze(1)
    assert_equal("aux_map", ours.aux_map, aux_map)


@pytest.mark.parametrize("seed", a_third(range(200)))
def test_gradients_equal_the_specification(device, seed):
    logits, options = on(device, *random_case(1000 + seed, values=("continuous", "tied")))
    names = ["weights", "probs", "aux_scores"]
    use = set(random.Random(seed).sample(names, 1 + seed % 3))
    ours, theirs = logits.clone().requires_grad_(), logits.to(real(logits.dtype)).requires_grad_()
    routing = grouped_topk(ours, **options, dense=True, aux=True)
    # The choice is taken from ours: 16-bit logits are compared through a specification that never rounds to them.
    expected = specification(theirs, **dict(replay_ids=routing.ids) | options)
    generator = torch.Generator().manual_seed(0)
    outputs = [(getattr(routing, name), getattr(expected, name)) for name in sorted(use)]
    grads = [torch.randn(a.shape, generator=generator).to(device, a.dtype) for a, _ in outputs]
    torch.autograd.backward([a for a, _ in outputs], grads)
    torch.autograd.backward([b for _, b in outputs], [g.to(b.dtype) for (_, b), g in zip(outputs, grads, strict=True)])
    assert ours.grad.dtype == logits.dtype
    # Terms of the size of the outputs' gradients cancel in fp32 on both sides; 16-bit results are rounded once more.
    terms = max((float(grad.abs().amax()) for grad in grads if grad.numel()), default=0.0)
    terms *= options.get("scaling_factor", 1.0) if use != {"aux_scores"} else 1.0
    rounding = 2 * torch.finfo(logits.dtype).eps
    atol = 32 * torch.finfo(theirs.dtype).eps * max(terms, 1e-30)
    torch.testing.assert_close(ours.grad.to(theirs.dtype), theirs.grad, rtol=rounding, atol=atol)


@pytest.mark.parametrize("name", ["weights", "probs", "aux_scores"])
def test_second_derivatives_are_refused_and_not_left_out(device, name):
    logits = torch.randn(5, 12, dtype=torch.float64).to(device).requires_grad_()
    output = getattr(grouped_topk(logits, 4, dense=True, aux=True), name).square().sum()
    torch.autograd.grad(output, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="grouped_topk has no second derivatives"):
        torch.autograd.grad(output, logits, create_graph=True)


# ---- single properties


def test_the_factor_is_of_the_dtype_that_is_computed_in(device):
    logits = torch.zeros(2, 8, dtype=torch.float64, device=device)
    for factor in (-1e39, 1e-60):
        assert grouped_topk(logits, 2, scaling_factor=factor).weights.tolist() == [[factor / 2] * 2] * 2


def test_sigmoid_is_accurate(device):
    logits = torch.cat(
        [torch.linspace(-88, 40, 200_001), torch.logspace(-30, 1, 10_001), -torch.logspace(-30, 1, 10_001)]
    )
    scores = grouped_topk(logits.to(device).unsqueeze(1), 1).weights.squeeze(1).cpu().double()
    true = torch.sigmoid(logits.double())
    ulp = 2.0 ** (torch.frexp(true).exponent - 24).clamp(min=-149).double()
    assert ((scores - true).abs() / ulp).max() < 4


@pytest.mark.parametrize(
    "num_experts, k, groups", [(384, 8, 1), (384, 8, 12), (1000, 32, 1), (1023, 7, 3), (2500, 32, 50), (5000, 32, 4)]
)
def test_many_experts(device, num_experts, k, groups):
    generator = torch.Generator().manual_seed(num_experts)
    for values in ("continuous", "tied"):
        logits = make_logits(generator, 9, num_experts, torch.float32, values).to(device)
        options = dict(k=k, expert_bias=(torch.rand(num_experts, generator=generator) / 4).to(device))
        if groups > 1:
            options |= dict(num_groups=groups, group_topk=groups // 2)
        ours, expected = grouped_topk(logits, **options, aux=True), specification(logits, **options)
        assert_equal("ids", ours.ids, expected.ids)
        assert_close("weights", ours.weights, expected.weights)
        assert_close("aux_scores", ours.aux_scores, expected.aux_scores)


def test_zeros_of_both_signs_tie(device):
    logits = torch.zeros(1, 40, device=device)
    logits[:, 0] = -0.0
    assert grouped_topk(logits, 3, score_function="softmax").ids.tolist() == [[0, 1, 2]]


def test_logits_that_are_negated_lazily(device):
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(device)
    negated, lazily = grouped_topk(-logits, 2), grouped_topk(torch._neg_view(logits), 2)
    assert torch.equal(negated.ids, lazily.ids) and torch.equal(negated.weights, lazily.weights)


@pytest.mark.needs(skips.no_gpu())
def test_replayed_ids_that_are_none_are_no_number_on_a_gpu():
    """Where no host looks at them."""
    ids = torch.tensor([[0, 1], [7, 8], [-2, 3]], device="cuda")
    routing = grouped_topk(torch.zeros(3, 8, device="cuda"), 2, replay_ids=ids)
    assert torch.equal(routing.ids, ids), "dispatch refuses them"
    assert routing.weights.isnan().any(dim=1).tolist() == [False, True, True]


def test_noncontiguous_arguments(device):
    wide = torch.randn(20, 64, generator=torch.Generator().manual_seed(6)).to(device)
    bias = torch.linspace(0, 1, 64, device=device)
    logits = wide.detach()[:, ::2].requires_grad_()
    routing = grouped_topk(logits, 4, expert_bias=bias[::2])
    assert_equal(
        "ids", routing.ids, grouped_topk(logits.detach().contiguous(), 4, expert_bias=bias[::2].contiguous()).ids
    )
    routing.weights[:, 0].sum().backward()  # a gradient that is no contiguous tensor either
    assert logits.grad.isfinite().all()


def test_a_forked_process_does_not_wait_for_threads_it_does_not_have():
    script = """
import os, signal, torch
from megatron_ep import grouped_topk
torch.set_num_threads(2)
logits = torch.randn(4096, 256)
ids = grouped_topk(logits, 8).ids
if not (child := os.fork()):
    signal.alarm(20)
    os._exit(not torch.equal(grouped_topk(logits, 8).ids, ids))
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_threads_change_nothing():
    logits = torch.randn(3001, 256, generator=torch.Generator().manual_seed(8))
    grad = torch.randn(3001, 8, generator=torch.Generator().manual_seed(9))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            leaf = logits.clone().requires_grad_()
            routing = grouped_topk(leaf, 8, 8, 4, dense=True, aux=True)
            routing.weights.backward(grad)
            results.append([*routing, leaf.grad])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for ours, expected in zip(other, results[0], strict=True):
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(logits=torch.zeros(4)), "logits"),
        (dict(logits=torch.zeros(4, 8, dtype=torch.int32)), "logits"),
        (dict(logits=torch.zeros(4, 8, device="meta")), "logits"),
        (dict(k=0), "k is 0"),
        (dict(k=9), "k is 9"),
        (dict(logits=torch.zeros(4, 64), k=33), "k is 33"),
        (
            dict(logits=torch.zeros(1, 1).expand(1, 2**30 + 1)),
            "logits has 1073741825 experts, must have at most 1048576",
        ),
        (dict(logits=[[0.0] * 8]), "logits is list"),
        (dict(k="2"), "k is '2'"),
        (dict(k=2.0), "k is 2.0"),
        (dict(k=True), "k is True"),
        (dict(num_groups="2", group_topk=1), "num_groups is '2'"),
        (dict(num_groups=2, group_topk=1.0), "group_topk is 1.0"),
        (dict(scaling_factor="2.5"), "scaling_factor is '2.5'"),
        (dict(expert_bias=[0.0] * 8), "expert_bias is list"),
        (dict(num_groups=2), "group_topk"),
        (dict(group_topk=2), "num_groups"),
        (dict(num_groups=3, group_topk=1), "num_groups is 3"),
        (dict(num_groups=0, group_topk=1), "num_groups is 0"),
        (dict(num_groups=4, group_topk=5), "group_topk is 5"),
        (dict(k=2, num_groups=4, group_topk=3), "group_topk is 3"),
        (dict(k=4, num_groups=4, group_topk=1), "k is 4"),
        (dict(score_function="relu"), "score_function"),
        (dict(pre_softmax=True), "pre_softmax"),
        (dict(score_function="softmax", pre_softmax="no"), "pre_softmax is 'no', must be a bool"),
        (dict(score_function="softmax", renormalize=0), "renormalize is 0, must be a bool or None"),
        (dict(score_function="softmax", renormalize=False), "renormalize"),
        (dict(scaling_factor=0.0), "scaling_factor"),
        (dict(scaling_factor=math.nan), "scaling_factor"),
        (dict(scaling_factor=-math.inf), "scaling_factor is -inf"),
        (dict(scaling_factor=10**400), "scaling_factor is 1000"),
        (dict(scaling_factor=1e39), r"scaling_factor is 1e\+39, must be a number of size 1.2e-38 to 3.4e\+38"),
        (dict(scaling_factor=1e-60), "scaling_factor is 1e-60"),
        (dict(logits=torch.zeros(4, 8, dtype=torch.bfloat16), scaling_factor=1e39), "scaling_factor"),
        (dict(expert_bias=torch.zeros(8, dtype=torch.bfloat16)), "expert_bias"),
        (dict(expert_bias=torch.zeros(7)), "expert_bias"),
        (dict(expert_bias=torch.zeros(8), score_function="softmax"), "expert_bias"),
        (dict(padding_mask=torch.zeros(4)), "padding_mask"),
        (dict(padding_mask=torch.zeros(5, dtype=torch.bool)), "padding_mask"),
        (dict(replay_ids=torch.zeros(4, 2, dtype=torch.int32)), "replay_ids"),
        (dict(replay_ids=torch.tensor([[0, 8]] * 4)), "replay_ids"),
        (dict(replay_ids=torch.tensor([[-2, 0]] * 4)), "replay_ids"),
    ],
)
def test_wrong_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        grouped_topk(**dict(logits=torch.zeros(4, 8), k=2) | arguments)

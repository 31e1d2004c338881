"""Choices of Megatron's function and of the fused gate: the same, but where rounding decides; there both are right."""

import pytest
import router_accuracy

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_ep.router.api import grouped_topk

pytestmark = pytest.mark.numerical

TOKENS, EXPERTS, K = 2000, 128, 8
SCORES = {
    "sigmoid": dict(score_function="sigmoid"),
    "softmax of all": dict(score_function="softmax", pre_softmax=True),
    "softmax of the chosen": dict(score_function="softmax"),
}


@pytest.mark.parametrize("kind", ["random", "near ties"])
@pytest.mark.parametrize("groups", [{}, dict(num_groups=16, group_topk=8), dict(num_groups=8, group_topk=4)])
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_the_same_choice_but_for_near_ties(score, groups, kind):
    sigmoid = score["score_function"] == "sigmoid"
    bias = torch.linspace(-0.1, 0.1, EXPERTS) if sigmoid else None
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    if kind == "near ties":
        logits = router_accuracy.near_tied_logits(generator, TOKENS, EXPERTS, **score, expert_bias=bias)
    options = score | groups | dict(expert_bias=bias)
    ours = grouped_topk(logits, K, **options, dense=True)
    theirs_options = {"use_pre_softmax" if name == "pre_softmax" else name: value for name, value in options.items()}
    probs, routing_map = topk_routing_with_score_function(logits, K, **theirs_options)

    scores = router_accuracy.exact_scores(logits, **score)
    clear = router_accuracy.assert_right(routing_map, scores, K, **groups, expert_bias=bias)
    router_accuracy.assert_right(ours.routing_map, scores, K, **groups, expert_bias=bias)
    assert torch.equal(ours.routing_map[clear], routing_map[clear])
    same = (ours.routing_map == routing_map).all(dim=1)
    ids = ours.ids[same]
    exact, ulps = (
        router_accuracy.exact_weights(logits[same], ids, **score),
        router_accuracy.weight_bound(logits[same], ids, **score),
    )
    for weights in (ours.weights[same], probs[same].gather(1, ids)):
        assert (router_accuracy.ulps_between(weights, exact) <= ulps).all()

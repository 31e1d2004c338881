"""How far rounding may take `grouped_topk` from its formulas: choices against exact ones, weights in ulps."""

import pytest
import router_accuracy
import torch

from megatron_ep.router.api import grouped_topk

pytestmark = pytest.mark.numerical

SCORES = {
    "sigmoid": dict(score_function="sigmoid"),
    "softmax of all": dict(score_function="softmax", pre_softmax=True),
    "softmax of the chosen": dict(score_function="softmax"),
}
GROUPS = {
    "no groups": {},
    "best of a group": dict(num_groups=16, group_topk=8),
    "best two": dict(num_groups=8, group_topk=4),
}
TOKENS, EXPERTS, K = 2000, 128, 8


def make_logits(kind, score, bias):
    generator = torch.Generator().manual_seed(0)
    if kind == "near ties":
        return router_accuracy.near_tied_logits(generator, TOKENS, EXPERTS, **score, expert_bias=bias)
    return torch.randn(TOKENS, EXPERTS, generator=generator)


@pytest.mark.parametrize("kind", ["random", "near ties"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_rounding_decides_near_ties_alone(device, score, groups, kind):
    bias = torch.linspace(-0.1, 0.1, EXPERTS) if score["score_function"] == "sigmoid" else None
    logits = make_logits(kind, score, bias)
    biased = None if bias is None else bias.to(device)
    routing = grouped_topk(logits.to(device), K, **groups, **score, expert_bias=biased, dense=True)
    scores = router_accuracy.exact_scores(logits, **score)
    clear = router_accuracy.assert_right(routing.routing_map.cpu(), scores, K, **groups, expert_bias=bias)
    if kind == "random":
        assert clear.float().mean() > 0.99
    else:
        assert 0.05 < clear.float().mean() < 0.95, "both sides of the bound"


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_weights_in_ulps(device, score):
    logits = 4 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    routing = grouped_topk(logits.to(device), K, **score, scaling_factor=2.5)
    ids, weights = routing.ids.cpu(), routing.weights.cpu()
    exact = router_accuracy.exact_weights(logits, ids, **score) * 2.5
    assert (router_accuracy.ulps_between(weights, exact) <= router_accuracy.weight_bound(logits, ids, **score)).all()

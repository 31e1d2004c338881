"""What a router promises of its choice of experts (`megatron_ep.router.api`), judged in fp64.

Real numbers: c[e], what expert e is chosen by, is its score plus its bias. fp32 scores are within 4.2 u of their value,
u = 2^-24: an exp within 1.1 ulp, hence 2.2 u, a sum and a quotient; adding the bias rounds once more. So c[e] is within
6 u M, where M is the largest score or c of the token, and 12 u M decide between two experts. A group's score adds up
m = K // group_topk of them with m - 1 roundings of at most m u M: it is within m (m + 5) u M, and twice that decides
between two groups. u M is at most one unit in the last place (ulp) of M.

T tokens, E experts, K choices of a token.
"""

import itertools
import math

import torch


def bound(m=1):
    """Ulps of M below which rounding may decide between two sums of m scores."""
    return 2 * m * (m + 5)


def near_tied_logits(generator, num_tokens, num_experts, score_function, pre_softmax=False, expert_bias=None):
    """fp32 [T, E] of which many are chosen by the same number but for 0 to 64 ulps."""
    grid = torch.randint(3, 14, (num_tokens, num_experts), generator=generator).double() / 16
    choice = grid * (1 + torch.randint(0, 65, grid.shape, generator=generator) * 2.0**-23)
    if score_function == "sigmoid":
        return torch.logit(choice if expert_bias is None else choice - expert_bias).float()
    return (choice.log() if pre_softmax else choice).float()


def exact_scores(logits, score_function, pre_softmax=False):
    """fp64 [T, E]."""
    logits = logits.double()
    if score_function == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, dim=1) if pre_softmax else logits


def exact_weights(logits, ids, score_function, pre_softmax=False):
    """fp64 [T, K] of these experts [T, K], before scaling."""
    picked = exact_scores(logits, score_function, pre_softmax).gather(1, ids)
    if score_function == "softmax":
        return picked if pre_softmax else torch.softmax(picked, dim=1)
    return picked / picked.sum(dim=1, keepdim=True) if ids.shape[1] > 1 else picked


def weight_bound(logits, ids, score_function, pre_softmax=False):
    """Ulps [T, K] that fp32 weights may be away from the exact ones: 4.2 u of their score and of the sum of n scores
    each, n - 1 u of adding up, 1 u each of adding epsilon, dividing and scaling; and d u more where a softmax takes the
    exp of a rounded difference -d."""
    if score_function == "sigmoid":
        return torch.full(ids.shape, 11.0 + ids.shape[1])
    picked = logits.double().gather(1, ids)
    largest = (logits if pre_softmax else picked).double().amax(dim=1, keepdim=True)
    return 11 + (logits if pre_softmax else ids).shape[1] + largest - picked


def ulps_between(actual, exact):
    """Of fp32 and exact fp64 numbers."""
    return (actual.double() - exact).abs() / torch.exp2(torch.frexp(exact).exponent.double() - 24)


def decided(scores, k, num_groups=None, group_topk=None, expert_bias=None):
    """Which tokens' choices no rounding decides.

    Args:
        scores: fp64 [T, E], `exact_scores`.

    Returns:
        bool [T], and the choice bool [T, E], which holds for these tokens.
    """
    choice, ulp = _choice(scores, expert_bias)
    clear = torch.ones(len(scores), dtype=torch.bool)
    if group_topk:
        m = k // group_topk
        groups = choice.unflatten(1, (num_groups, -1)).topk(m, dim=2).values.sum(dim=2)
        kept, gap = _take(groups, group_topk)
        clear &= gap > bound(m) * ulp
        choice = choice.masked_fill(~kept.repeat_interleave(choice.shape[1] // num_groups, dim=1), -math.inf)
    taken, gap = _take(choice, k)
    return clear & (gap > bound() * ulp), taken


def assert_right(chosen, scores, k, num_groups=None, group_topk=None, expert_bias=None):
    """That every token's choice is the exact one, or one that rounding may have made of a near tie.

    Args:
        chosen: bool [T, E].

    Returns:
        bool [T]: what `decided` says.
    """
    assert (chosen.sum(dim=1) == k).all()
    clear, taken = decided(scores, k, num_groups, group_topk, expert_bias)
    wrong = (chosen != taken).any(dim=1)
    assert not (clear & wrong).any(), (
        f"tokens {torch.where(clear & wrong)[0].tolist()}: another choice, and no near tie"
    )
    choice, ulp = _choice(scores, expert_bias)
    for token in torch.where(wrong)[0].tolist():
        near = _near_ties(choice[token], float(ulp[token]), k, num_groups, group_topk)
        assert any(bool((must <= chosen[token]).all() and (chosen[token] <= may).all()) for must, may in near), (
            f"token {token}: {torch.where(chosen[token])[0].tolist()} is no choice that rounding could have made"
        )
    return clear


def refuse_near_ties(router):
    """Lets a test of Megatron's router, or ours, fail where its input leaves the choice to rounding.

    With such an input two right routers may differ, on one machine and not on another.
    """
    gating, config = router.gating, router.config
    groups = dict(num_groups=config.moe_router_num_groups, group_topk=config.moe_router_group_topk)

    def checked(*args):
        logits = gating(*args)
        scores = exact_scores(logits.detach().flatten(0, -2), router.score_function, config.moe_router_pre_softmax)
        for_tokens, _ = decided(scores, config.moe_router_topk, **groups, expert_bias=router.expert_bias)
        for_losses, _ = decided(scores, config.moe_router_topk)
        assert (for_tokens & for_losses).all(), "near ties in this test's input: give it another seed"
        return logits

    router.gating = checked
    return router


def _choice(scores, expert_bias):
    """c [T, E], and the ulp of M in fp32 [T]."""
    choice = scores if expert_bias is None else scores + expert_bias.double()
    largest = torch.maximum(scores.abs(), choice.abs()).amax(dim=1)
    return choice, torch.exp2(torch.floor(torch.log2(largest)) - 23)


def _take(values, count):
    """The `count` largest of each row as bool, and their distance from the rest (inf: there is no rest)."""
    if count == values.shape[1]:
        return torch.ones_like(values, dtype=torch.bool), torch.full_like(values[:, 0], math.inf)
    best = values.topk(count + 1, dim=1)
    taken = torch.zeros_like(values, dtype=torch.bool).scatter(1, best.indices[:, :count], True)
    return taken, best.values[:, count - 1] - best.values[:, count]


def _near(values, count, distance):
    """Of one row: what must be among the `count` largest, and what may be, when values are `distance` uncertain."""
    if count == len(values):
        return torch.ones_like(values, dtype=torch.bool), torch.ones_like(values, dtype=torch.bool)
    best = values.topk(count + 1).values
    return values > best[count] + distance, values >= best[count - 1] - distance


def _near_ties(choice, ulp, k, num_groups, group_topk):
    """For every set of groups that rounding may keep: the experts that must be chosen, and those that may."""
    if not group_topk:
        yield _near(choice, k, bound() * ulp)
        return
    m = k // group_topk
    groups = choice.unflatten(0, (num_groups, -1)).topk(m, dim=1).values.sum(dim=1)
    must, may = _near(groups, group_topk, bound(m) * ulp)
    certain, open_ = torch.where(must)[0].tolist(), torch.where(may & ~must)[0].tolist()
    for more in itertools.combinations(open_, group_topk - len(certain)):
        kept = torch.zeros(num_groups, dtype=torch.bool)
        kept[[*certain, *more]] = True
        yield _near(choice.masked_fill(~kept.repeat_interleave(len(choice) // num_groups), -math.inf), k, bound() * ulp)

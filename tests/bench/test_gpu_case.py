"""What the benchmarks of GPUs dispatch."""

import pytest
import torch

from megatron_ep.tools.bench import gpus
from megatron_ep.tools.bench.gpu_case import HOT, cases_of, draw_experts

TOKENS, TOPK, EXPERTS = 4000, 4, 32


def loads(routing, seed=0):
    """How often each expert is chosen, from the busiest on, over the mean; and which is the busiest."""
    weights, ids = draw_experts(routing, TOKENS, TOPK, EXPERTS, torch.Generator().manual_seed(seed))
    assert weights.shape == ids.shape == (TOKENS, TOPK) and bool((weights > 0).all() and (weights < 1).all())
    assert bool((ids.sort(dim=1).values.diff(dim=1) > 0).all()), "an expert is chosen twice"
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    return counts.sort(descending=True).values / (TOKENS * TOPK / EXPERTS), int(counts.argmax())


def test_how_likely_experts_are():
    uniform, _ = loads("uniform")
    assert 0.9 < uniform[-1] <= uniform[0] < 1.1
    hot, busiest = loads("hot")
    # without replacement: each draw finds the hot one with about 16 / (16 + 31 - draws before)
    missed = 1.0
    for draw in range(TOPK):
        missed *= 1 - HOT / (HOT + EXPERTS - 1 - draw)
    assert hot[0] == pytest.approx((1 - missed) * EXPERTS / TOPK, rel=0.03) and hot[1] < 1.1
    zipf, _ = loads("zipf")
    assert zipf[0] > 4 > zipf[4] > 1 > zipf[16] and zipf[-1] > 0
    for routing in ("hot", "zipf"):
        assert loads(routing, 1)[1] == loads(routing, 2)[1], "another expert is hot on another rank"
    assert busiest == EXPERTS // 2


def test_cases():
    arguments = gpus._parse(["--tokens", "1", "8192", "--routing", "uniform", "zipf", "--num-sms", "8", "24"])
    assert (arguments.tokens, arguments.routing, arguments.graphs) == ([1, 8192], ["uniform", "zipf"], False)
    names = [str(case) for case in cases_of(arguments, 2, 4, 1, "zipf")]
    assert names == [f"2x4 sms={sms} slots=4+default T=1 H=7168 K=8 E=256 zipf" for sms in (8, 24)]
    assert gpus._parse([]).tokens == [4096]
    arguments = gpus._parse(["--max-tokens", "--num-sms", "64"])
    one = "1x2 sms=64 slots=4"
    assert [str(case) for case in cases_of(arguments, 1, 2, 128)] == [
        f"{one} T=128 H=7168 K=8 E=256",
        f"{one} max_tokens=T T=128 H=7168 K=8 E=256",
    ], "rings and one hop side by side"
    assert [str(case) for case in cases_of(arguments, 1, 2, 4096)] == [f"{one} T=4096 H=7168 K=8 E=256"]


def test_bytes_there_and_back_are_those_of_both_ways():
    each = 2 * 256  # of a row
    for phase, of_three in (
        ("dispatch", 3 * each),
        ("dispatch fp8", 3 * (256 + 4 * 2)),
        ("combine", 3 * each),
        ("there and back", 6 * each),
        ("there and back, flat", 6 * each),
    ):
        assert gpus.size_of(phase, 3, 256) == of_three, phase

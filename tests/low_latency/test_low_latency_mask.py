"""Masked ranks in the low-latency mode: as if the choices of their experts were -1 and they had no tokens."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import assert_all_equal, drawn
from low_latency_cases import LowLatencyCase, fill

import megatron_ep as ep
from megatron_ep import reference


def mask_some(case, low_latency):
    """Some callers mask some ranks, which need not do the same."""
    for rank, active in enumerate(low_latency.active_ranks):
        for other in range(case.world):
            if other != rank and case.random.random() < 0.15:
                active[other] = 0


def check_round(case, low_latency, plain):
    """The same calls with masked ranks, and with -1 for their choices."""
    ids, weights, x = case.new_round()
    active = [part.cpu() for part in low_latency.active_ranks]
    kept = reference.without_masked(ids, active, case.num_experts)
    at_tokens = [w.to(case.wide()) for w in weights]
    scaled = [reference.renormalized(*each) for each in zip(at_tokens, ids, kept, strict=True)]
    sums = []
    for mode, chosen in ((low_latency, ids), (plain, kept)):
        received = mode.dispatch(*map(case.there, (x, chosen, weights)), **case.dispatch_options())
        rows, probs, _ = reference.dispatch(x, kept, weights, case.num_experts, case.alignment)
        case.check_rows(received, rows, kept)
        columns = replace(received, x=[p.unsqueeze(-1) for p in received.probs])
        case.check_rows(columns, [p.unsqueeze(1) for p in probs], kept)
        back = fill(case, received, rows, kept)
        at_rows = fill(case, received, [p.to(case.wide()) for p in probs], kept)
        weighted, last = case.there(at_tokens), {"renormalize": True}
        if mode is plain:
            last, scaled = {}, case.there(scaled)
        sums.append(
            (
                mode.combine(back, received.handle),
                mode.combine(back, received.handle, sum_at="expert"),
                mode.combine(back, received.handle, weighted),
                mode.combine(back, received.handle, row_weights=at_rows, sum_at="expert"),
                mode.combine(back, received.handle, scaled if mode is plain else weighted, **last),
            )
        )
    for ours, expected in zip(*sums, strict=True):
        assert_all_equal(ours, [part.cpu() for part in expected])
    return [int(((idx >= 0) & (k < 0)).sum()) for idx, k in zip(ids, kept, strict=True)]


@pytest.mark.parametrize("block", range(4))
def test_masked_ranks_are_as_if_nobody_chose_them(block, device):
    for seed in range(10 * block, 10 * (block + 1)):
        case = LowLatencyCase(7000 + seed, max_tokens=40, device=device)
        with case.cluster() as cluster, case.cluster() as other:
            low_latency, plain = case.low_latency(cluster, on_dead_rank="mask"), case.low_latency(other)
            dropped = [0] * case.world
            for _ in range(3):
                mask_some(case, low_latency)
                dropped = [d + 5 * n for d, n in zip(dropped, check_round(case, low_latency, plain), strict=True)]
            active = low_latency.active_ranks
            for rank in range(case.world):
                assert low_latency.masked_ranks()[rank] == (active[rank] == 0).nonzero()[:, 0].tolist()
                assert all(active[rank][other] == active[other][rank] for other in range(case.world))
                assert low_latency.dropped_choices[rank][1] == dropped[rank]
                assert low_latency.dropped_choices[rank][0] <= dropped[rank] // 5


W, E, K, H = 4, 8, 3, 5


def four_ranks(**options):
    cluster = ep.LocalCluster(2, 2, ep.Config(num_experts=E, timeout=5))
    sizes = {"max_tokens": 6, "hidden": H, "topk": K, "dtype": torch.float64}
    return cluster, ep.LowLatency(cluster, **sizes, **options)


def inputs(seed):
    x, ids, weights = drawn((6, 0, 3, 5), E, K, H, seed)
    return [t.double().requires_grad_() for t in x], ids, [t.double().requires_grad_() for t in weights]


def forward(low_latency, x, ids, weights, sum_at):
    received = low_latency.dispatch(x, ids, weights)
    rows = [r.tanh() for r in received.x]
    factors = {"row_weights": received.probs} if sum_at == "expert" else {"topk_weights": weights}
    return low_latency.combine(rows, received.handle, sum_at=sum_at, **factors)


@pytest.mark.parametrize("sum_at", ["token", "expert"])
def test_gradients(sum_at):
    (_, low_latency), (_, plain) = four_ranks(on_dead_rank="mask"), four_ranks()
    low_latency.active_ranks[1][2] = low_latency.active_ranks[3][0] = 0
    for seed in range(3):
        results = []
        for mode in (low_latency, plain):
            x, ids, weights = inputs(seed)
            if mode is plain:
                ids = reference.without_masked(ids, low_latency.active_ranks, E)
            y = forward(mode, x, ids, weights, sum_at)
            torch.autograd.backward(sum((part * part).sum() for part in y))
            results.append((y, [t.grad for t in x], [t.grad for t in weights]))
        for ours, expected in zip(*results, strict=True):
            assert_all_equal(ours, expected)


@pytest.mark.parametrize("sum_at", ["token", "expert"])
@pytest.mark.parametrize("where", ["combine", "dispatch"])
def test_a_rank_masked_before_the_backward_pass_is_an_error(where, sum_at):
    cluster, low_latency = four_ranks(on_dead_rank="mask")
    x, ids, weights = inputs(0)
    y = forward(low_latency, x, ids, weights, sum_at)
    if where == "dispatch":  # the combine's backward pass has run
        received = low_latency.dispatch(x, ids)
        y = [received.x[0], received.x[3]]
    low_latency.active_ranks[3][2] = 0
    with pytest.raises(ep.EPError, match="rank 3 met rank 2 in a backward pass, masked since its forward pass"):
        torch.autograd.backward(sum(part.sum() for part in y))
    cluster.reset()
    assert all(active.tolist() == [1] * W for active in low_latency.active_ranks)
    assert low_latency.masked_ranks() == [[]] * W
    torch.autograd.backward(sum(part.sum() for part in forward(low_latency, x, ids, weights, sum_at)))


def test_nobody_comes_back_but_by_a_reset():
    cluster, low_latency = four_ranks(on_dead_rank="mask")
    x, ids, _ = inputs(0)
    low_latency.active_ranks[0][1] = 0
    received = low_latency.dispatch(x, ids)
    low_latency.active_ranks[0][1] = 1
    low_latency.dispatch(x, ids)
    assert low_latency.active_ranks[0].tolist() == [1, 0, 1, 1] and low_latency.active_ranks[1].tolist() == [0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"its reset\(\) brings back all masked ranks"):
        low_latency.readmit(1, dist.HashStore())
    cluster.reset()
    with pytest.raises(
        ValueError, match="handle is of a dispatch that left masked ranks out before the buffer's reset"
    ):
        low_latency.combine(received.x, received.handle)
    again = low_latency.dispatch(x, ids)
    assert sum(int(counts.sum()) for counts in again.recv_counts) == sum(i.numel() for i in ids)
    assert all(not dropped.any() for dropped in low_latency.dropped_choices)


def test_a_wait_of_more_slices_than_an_int_counts():
    with ep.LocalCluster(1, 1, ep.Config(num_experts=1, timeout=1e6)) as cluster:
        low_latency = ep.LowLatency(
            cluster, max_tokens=1, hidden=8, topk=1, dtype=torch.float32, on_dead_rank="mask", mask_timeout=1e-4
        )
        received = low_latency.dispatch([torch.ones(1, 8)], [torch.zeros(1, 1, dtype=torch.int64)])
        assert low_latency.combine(received.x, received.handle)[0].eq(1).all()


def test_wrong_ids_of_the_normal_mode_bring_nobody_back():
    cluster, low_latency = four_ranks(on_dead_rank="mask")
    x, ids, _ = inputs(0)
    low_latency.active_ranks[0][1] = 0
    low_latency.dispatch(x, ids)
    low_latency.dispatch(x, ids)
    masked = low_latency.masked_ranks()
    assert masked[0] == [1]
    with pytest.raises(ValueError, match="topk_idx of rank 2"):
        ep.dispatch(x, [*ids[:2], ids[2] + 99, ids[3]], buffer=cluster)
    assert low_latency.masked_ranks() == masked
    low_latency.dispatch(x, ids)
    assert low_latency.masked_ranks() == masked


def test_mistakes_are_named():
    cluster, plain = four_ranks()
    x, ids, weights = inputs(0)
    received = plain.dispatch(x, ids)
    readmit = functools.partial(plain.readmit, 1, None)
    for use in (lambda: plain.active_ranks, lambda: plain.dropped_choices, plain.masked_ranks, readmit):
        with pytest.raises(ValueError, match="on_dead_rank is 'raise', must be 'mask'"):
            use()
    low_latency = ep.LowLatency(cluster, max_tokens=6, hidden=H, topk=K, dtype=torch.float64, on_dead_rank="mask")
    masked = low_latency.dispatch(x, ids)
    combines = [
        (
            plain,
            received,
            {"topk_weights": weights},
            "renormalize is True, must be False unless on_dead_rank is 'mask'",
        ),
        (low_latency, masked, {}, "renormalize is True, must be False unless"),
        (
            low_latency,
            masked,
            {"row_weights": masked.x, "sum_at": "expert"},
            "row_weights has shape .* such as rows.probs",
        ),
        (
            low_latency,
            masked,
            {"topk_weights": weights},
            "renormalize is True, must be False where a gradient is needed",
        ),
    ]
    for mode, rows, options, message in combines:
        with pytest.raises(ValueError, match=message):
            mode.combine(rows.x, rows.handle, **options, renormalize=True)
    for options, message in (
        ({"on_dead_rank": "ignore"}, "on_dead_rank is 'ignore', must be one of 'raise', 'mask'"),
        ({"mask_timeout": 1}, r"mask_timeout is 1, must be a number of seconds in \(0, 5\]"),
        ({"on_dead_rank": "mask", "mask_timeout": 0}, "mask_timeout is 0, must be"),
        ({"on_dead_rank": "mask", "mask_timeout": 6.0}, "mask_timeout is 6.0, must be"),
        ({"on_dead_rank": "mask", "mask_timeout": True}, "mask_timeout is True, must be"),
    ):
        with pytest.raises(ValueError, match=message):
            four_ranks(**options)
    for rank, world, message in (
        (4, 4, r"^rank is 4, must be an int in \[0, 3\]$"),
        ("0", 4, "^rank is '0', must be"),
        (0, 0, r"^world_size is 0, must be an int in \[1, 65536\]$"),
    ):
        with pytest.raises(ValueError, match=message):
            ep.rejoin(None, rank, world, cluster.config, max_tokens=6, hidden=H, topk=K, on_dead_rank="mask")

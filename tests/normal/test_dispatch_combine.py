"""Dispatch and combine against the reference."""

import pytest
import torch
from cases import Case, assert_all_equal, before, filled
from nightly import a_third

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.buffer.arguments import summable_dtypes

BLOCKS, CASES_PER_BLOCK = 6, 25
WAYS = pytest.mark.parametrize("way", ["rings", "lines", "flat rings", "flat lines"])  # of a dispatch


def layout_of(way):
    return "flat" if "flat" in way else "grouped"


def assert_received(rows, x, ids, weights, case):
    """Rows of either layout, and all that comes with them, are the reference's."""
    options = (case.num_experts, case.alignment)
    if rows.topk_idx is None:
        found, expected = [rows.x], reference.dispatch(x, ids, weights, *options)
    else:
        found, expected = [rows.x, rows.topk_idx], reference.flat_dispatch(x, ids, weights, *options)
    for ours, theirs in zip((*found, rows.probs, rows.tokens_per_expert), expected, strict=True):
        assert_all_equal(ours, theirs)


@WAYS
@pytest.mark.parametrize("block", a_third(range(BLOCKS)))
def test_equals_reference(block, device, way):
    """Rows, and sums that are exact in every dtype, with and without weights; and rows that go by the same handle."""
    for seed in range(block * CASES_PER_BLOCK, (block + 1) * CASES_PER_BLOCK):
        case = Case(seed, device=device, lines="lines" in way)
        tokens = case.num_tokens()
        ids, weights, x = case.ids(tokens), case.weights(tokens), case.integers(tokens)
        with case.cluster() as cluster:
            options = {"expert_alignment": case.alignment, "layout": layout_of(way)}
            rows = ep.dispatch(*map(case.there, (x, ids, weights)), buffer=cluster, **options)
            assert_received(rows, x, ids, weights, case)
            assert not any(rows.overflow)
            out = case.integers([len(part) for part in rows.x])
            factors = torch.tensor([-1, -0.5, 0.5, 1, 2], dtype=case.wide())
            factors = [factors[torch.randint(5, (len(part),), generator=case.generator)] for part in out]
            for of_rows in (None, factors):
                if "flat" in way:
                    sums = reference.flat_combine(out, ids, case.num_experts, weights=of_rows)
                else:
                    sums = reference.combine(out, ids, case.num_experts, case.alignment, weights=of_rows)
                assert_all_equal(ep.combine(case.there(out), rows.handle, of_rows and case.there(of_rows)), sums)
            x = case.integers(tokens)
            again = ep.dispatch(case.there(x), topk_weights=case.there(weights), handle=rows.handle)
            assert_received(again, x, ids, weights, case)


@pytest.mark.parametrize("seed", a_third(range(60)))
def test_combine_bit_by_bit(seed, device, lines):
    """In the order and with the roundings of the specification."""
    case = Case(7000 + seed, max_tokens=30, device=device, lines=lines)
    tokens = case.num_tokens()
    ids = case.ids(tokens)
    with case.cluster() as cluster:
        ones = [torch.ones(idx.shape) for idx in ids]
        sent = map(case.there, (case.reals(tokens), ids, ones))
        rows = ep.dispatch(*sent, buffer=cluster, expert_alignment=case.alignment)
        out = case.reals([len(x) for x in rows.x])
        weights = case.row_weights([len(x) for x in rows.x])
        for rank, probs in enumerate(rows.probs):  # padding is ignored, whatever it holds
            out[rank][probs.cpu() == 0] = torch.nan
            weights[rank][probs.cpu() == 0] = torch.nan
        y = ep.combine(case.there(out), rows.handle, case.there(weights))
        assert_all_equal(y, case.combine(out, weights, ids))
        y = ep.combine(case.there(out), rows.handle)
        assert_all_equal(y, case.combine(out, [torch.ones_like(w) for w in weights], ids))


@WAYS
@pytest.mark.parametrize("seed", a_third(range(20)))
def test_same_bits_whatever_the_schedule(seed, way):
    results = []
    for options in ({"threads": 1}, {"threads": 4}, {"seed": 1}, {"seed": 2}):
        case = Case(1000 + seed, max_tokens=40, lines="lines" in way)
        tokens = case.num_tokens()
        x, ids, weights = case.reals(tokens), case.ids(tokens), case.weights(tokens)
        with case.cluster(**options) as cluster:
            rows = ep.dispatch(x, ids, weights, buffer=cluster, layout=layout_of(way))
            out = case.reals([len(part) for part in rows.x])
            weighted = ep.combine(out, rows.handle, case.row_weights([len(part) for part in out]))
            flat = rows.topk_idx or []
            results.append([*rows.x, *rows.probs, *flat, *ep.combine(out, rows.handle), *weighted])
    for other in results[1:]:
        assert_all_equal(results[0], other)


@pytest.mark.parametrize("seed", a_third(range(20)))
def test_many_calls_on_one_buffer(seed, device, lines):
    """Shapes, dtypes and K change from call to call; nothing is cleared between them."""
    case = Case(2000 + seed, max_tokens=60, device=device, lines=lines)
    row_bytes = 8 * 1000 + 1024
    tuning = ep.Tuning(channels=2, nvl_ring_bytes=2 * row_bytes, rdma_ring_bytes=3 * row_bytes)
    most = case.max_tokens if lines else None
    case.config = ep.Config(num_experts=case.num_experts, timeout=60, max_tokens=most, tuning=tuning)
    dtypes = summable_dtypes(device)
    with case.cluster() as cluster:
        handles = []
        for case.dtype in dtypes[::-1] * (8 // len(dtypes)):
            case.topk, case.hidden = case.random.randint(1, min(8, case.num_experts)), case.random.randint(8, 1000)
            tokens = case.num_tokens()
            x, ids, weights = case.integers(tokens), case.ids(tokens), case.weights(tokens)
            ours = ep.dispatch(*map(case.there, (x, ids, weights)), buffer=cluster)
            assert_all_equal(ours.x, reference.dispatch(x, ids, weights, case.num_experts)[0])
            handles.append((ours.handle, ids))
            for handle, ids in handles[-3:]:  # old handles stay good
                out = case.integers([rank.rows for rank in handle.ranks])
                assert_all_equal(ep.combine(case.there(out), handle), reference.combine(out, ids, case.num_experts))


PARTS = {"all rows": {}, "a capacity": {"expert_capacity": 7}, "flat rows": {"layout": "flat"}}


@pytest.mark.parametrize("seed", a_third(range(8)))
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("share", "slack"), [(0.1, 0), (0.4, 0), (0.9, 0), (1, -1), (1, 0), (1, 1), (1, 17)])
def test_max_recv_tokens(seed, share, slack, part, device, lines, used_memory):
    case = Case(4000 + seed, max_tokens=60, device=device, lines=lines)
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.integers(tokens)
    with_gradient = seed // 2 % 2 == 0  # then rows that no token fills are zeros
    x = [rows.requires_grad_(with_gradient) for rows in x]
    is_flat, capacity = part == "flat rows", PARTS[part].get("expert_capacity")
    arriving = [len(reference.flat_rows(ids, rank, case.num_experts)) for rank in range(case.world)]
    all_counts = reference.dispatch(x, ids, weights, case.num_experts)[2]
    counts = reference.dispatch(x, ids, weights, case.num_experts, expert_capacity=capacity)[2]
    needed = arriving if is_flat else [int(count.sum()) for count in counts]
    size = max(1, int(share * max(needed)) + slack)
    if device == "cuda" and case.nodes > 1:  # there must be room for rows that only pass through a rank
        size = max(size, *tokens, *arriving)
    ends = [size if with_gradient else min(size, count) for count in needed]
    with case.cluster() as cluster:
        options = {**PARTS[part], "max_recv_tokens": size}
        ours = ep.dispatch(*map(case.there, (x, ids, weights)), buffer=cluster, **options)
        out = case.integers([size] * case.world)
        y = ep.combine(case.there(out), ours.handle)
    if is_flat:
        expected, *rest = reference.flat_dispatch(x, ids, weights, case.num_experts, max_recv_tokens=size)
        found = [ours.topk_idx, ours.probs, ours.tokens_per_expert]
        lacks = [count > size for count in arriving]
        sums = reference.flat_combine(out, ids, case.num_experts, size)
    else:
        expected, probs, _ = reference.dispatch(x, ids, weights, case.num_experts, **options)
        found, rest = [ours.probs, ours.tokens_per_expert], [probs, counts]
        ones = [torch.ones_like(w) for w in weights]
        placed = reference.dispatch(x, ids, ones, case.num_experts, **options)[1]
        lacks = [bool(rows.sum() < every.sum()) for rows, every in zip(placed, all_counts, strict=True)]
        sums = reference.combine(out, ids, case.num_experts, **options)
    rows = [before(ends, ours.x), before(ends, expected)]
    if not is_flat and not with_gradient:
        rows = [[filled(*of, capacity) for of in zip(tensors, all_counts, strict=True)] for tensors in rows]
    for one, other in zip((rows[0], *found, y), (rows[1], *rest, sums), strict=True):
        assert_all_equal(one, other)
    assert [bool(flag) for flag in ours.overflow] == lacks


@pytest.mark.parametrize("seed", a_third(range(10)))
def test_sums_of_a_rank_s_experts_are_those_of_grouped_rows(seed, device, lines):
    """Where each expert gives the row that it got, times a power of two, every sum and gradient is exact."""
    case = Case(2000 + seed, max_tokens=60, device=device, lines=lines)
    tokens = case.num_tokens()
    ids, x, weights = map(case.there, (case.ids(tokens), case.integers(tokens), case.weights(tokens)))
    results = []
    with case.cluster() as cluster:
        for layout in ("flat", "grouped"):
            leaves = [t.clone().requires_grad_() for t in (*x, *weights)]
            rows = ep.dispatch(leaves[: case.world], ids, leaves[case.world :], buffer=cluster, layout=layout)
            if layout == "flat":
                times = [(i >= 0).sum(dim=1, keepdim=True) for i in rows.topk_idx]
                out = [(r * t).to(case.dtype) for r, t in zip(rows.x, times, strict=True)]
            else:
                out = rows.x
            y = ep.combine(out, rows.handle)
            torch.autograd.backward([*y, *rows.probs], [*x, *(2 * p.detach() for p in rows.probs)])
            results.append([t.detach().cpu() for t in (*y, *(leaf.grad for leaf in leaves))])
    assert_all_equal(*results)


def test_counts_of_what_a_graph_captures_are_those_of_its_replays(monkeypatch):
    with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:
        monkeypatch.setattr(type(cluster._group.live_backend()), "is_capturing", lambda _: True)
        x, ids, weights = [torch.ones(3, 4)], [torch.tensor([[0], [1], [1]])], [torch.ones(3, 1)]
        rows = ep.dispatch(x, ids, weights, buffer=cluster, max_recv_tokens=3)
        again = ep.dispatch(x, handle=rows.handle)
        for replayed in ([5, 6], [7, 8]):
            rows.handle.ranks[0].tokens_per_expert[0].copy_(torch.tensor(replayed))  # where a replay writes
            assert rows.tokens_per_expert[0].tolist() == replayed
        assert again.tokens_per_expert[0].tolist() == [1, 2], "a copy, which a graph makes again"


@pytest.mark.parametrize("seed", a_third(range(20)))
def test_expert_capacity(seed, device, lines):
    case = Case(5000 + seed, max_tokens=60, device=device, lines=lines)
    tokens = case.num_tokens()
    ids, weights, x = case.ids(tokens), case.weights(tokens), case.integers(tokens)
    counts = reference.dispatch(x, ids, weights, case.num_experts)[2]
    largest = max(int(c.max()) for c in counts)
    x = [rows.requires_grad_(seed % 2 == 0) for rows in x]
    for capacity in {max(1, largest), largest + 3, max(1, largest - 1)}:
        expected, probs, _ = reference.dispatch(x, ids, weights, case.num_experts, expert_capacity=capacity)
        with case.cluster() as cluster:
            ours = ep.dispatch(*map(case.there, (x, ids, weights)), buffer=cluster, expert_capacity=capacity)
            y = ep.combine(ours.x, ours.handle)
        if seed % 2 == 0:  # padding is zeros
            assert_all_equal(ours.x, expected)
        else:
            pairs = [[filled(*of, capacity) for of in zip(rows, counts, strict=True)] for rows in (ours.x, expected)]
            assert_all_equal(*pairs)
        assert_all_equal(ours.probs, probs)
        assert_all_equal(y, reference.combine(expected, ids, case.num_experts, expert_capacity=capacity))
        for rank in range(case.world):
            assert ours.tokens_per_expert[rank].tolist() == [capacity] * len(counts[rank])
            assert bool(ours.overflow[rank]) == bool((counts[rank] > capacity).any())


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("hidden", [8, 128, 200, 1000, 7168])
def test_float8_with_scales(hidden, scale_dtype, device, lines):
    def there(tensors):
        return [tensor.to(device) for tensor in tensors]

    def as_sent(scales):
        return scales if scale_dtype == torch.float32 else [part.view(torch.uint8) for part in scales]

    generator = torch.Generator().manual_seed(hidden)
    tokens, experts, blocks = [5, 0, 17, 9], 8, -(-hidden // 128)
    ids = [torch.rand(t, experts, generator=generator).topk(3, dim=1).indices for t in tokens]
    x = [torch.randint(0, 255, (t, hidden), generator=generator, dtype=torch.uint8) for t in tokens]
    scales = [torch.randint(1, 200, (t, blocks), generator=generator, dtype=torch.uint8) for t in tokens]
    if scale_dtype == torch.float32:
        scales = [s.float() for s in scales]
    detached = [torch.rand(t, 3, generator=generator) for t in tokens]
    weights = [w.to(device, copy=True).requires_grad_() for w in detached]
    nodes, most = (1, max(tokens)) if lines else (2, None)
    config = ep.Config(num_experts=experts, max_tokens=most)
    with ep.LocalCluster(nodes, 4 // nodes, config, device=device) as cluster:
        float8, there_ids = there([rows.view(torch.float8_e4m3fn) for rows in x]), there(ids)
        of_type = [s.view(scale_dtype) for s in scales]
        ours = ep.dispatch(float8, there_ids, weights, scales=there(of_type), buffer=cluster)
        assert not any(part.requires_grad for part in (*ours.x, *ours.scales))
        assert_all_equal([rows.view(torch.uint8) for rows in ours.x], reference.dispatch(x, ids, detached, experts)[0])
        assert_all_equal(as_sent(ours.scales), reference.dispatch(scales, ids, detached, experts)[0])
        most = max(*tokens, *(len(reference.flat_rows(ids, rank, experts)) for rank in range(4)))
        few = ep.dispatch(float8, there_ids, scales=there(of_type), buffer=cluster, max_recv_tokens=most)
        expected = reference.dispatch(of_type, ids, detached, experts, max_recv_tokens=most)[0]
        assert any(few.overflow)
        ends = [min(most, int(counts.sum())) for counts in ours.tokens_per_expert]
        raw = [[s.view(torch.uint8) for s in before(ends, scales)] for scales in (few.scales, expected)]
        assert_all_equal(*raw)
        flat = ep.dispatch(float8, there_ids, scales=there(of_type), buffer=cluster, layout="flat")
        expected = [reference.flat_dispatch(part, ids, detached, experts)[0] for part in (x, scales)]
        assert_all_equal([rows.view(torch.uint8) for rows in flat.x], expected[0])
        assert_all_equal(as_sent(flat.scales), expected[1])
        # the weights' gradients travel without rows: here each is the place of its row
        sum((p * torch.arange(len(p), device=device)).sum() for p in ours.probs).backward()
        place = torch.zeros(sum(tokens), 3)
        for rank in range(4):
            rows = [reference.expert_rows(ids, expert) for expert in range(2 * rank, 2 * rank + 2)]
            token, k = (torch.cat(part) for part in list(zip(*rows, strict=True))[:2])
            place[token, k] = torch.arange(len(token)).float()
        assert_all_equal([weight.grad for weight in weights], place.split(tokens))


def test_top_32_of_32_experts(lines):
    generator = torch.Generator().manual_seed(0)
    ids = [torch.rand(t, 32, generator=generator).argsort(dim=1) for t in (3, 4)]
    x = [torch.randint(-4, 5, (t, 8), generator=generator).float() for t in (3, 4)]
    with ep.LocalCluster(1, 2, ep.Config(num_experts=32, max_tokens=4 if lines else None)) as cluster:
        ours = ep.dispatch(x, ids, buffer=cluster)
        assert_all_equal(ep.combine(ours.x, ours.handle), [32 * rows for rows in x])

"""The low-latency mode against the reference, bit by bit."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from cases import assert_all_equal
from low_latency_cases import LowLatencyCase, fill, receive_in_any_order
from nightly import a_third

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.buffer.arguments import summable_dtypes

BLOCKS, CASES_PER_BLOCK = 10, 12


def check_round(case, low_latency):
    ids, weights, x = case.new_round()
    if case.random.random() < 0.3:
        ids = [idx.int() for idx in ids]
    received = low_latency.dispatch(*map(case.there, (x, ids, weights)), **case.dispatch_options())
    expected, probs, _ = reference.dispatch(x, ids, weights, case.num_experts, case.alignment)
    case.check_rows(received, expected, ids)
    columns = replace(received, x=[p.unsqueeze(-1) for p in received.probs])
    case.check_rows(columns, [p.unsqueeze(1) for p in probs], ids)
    assert not any(received.overflow)
    out = case.reals([len(rows) for rows in expected])
    at_rows = case.row_weights([len(rows) for rows in expected])
    at_tokens = [w.to(case.wide()) for w in weights]
    ours = fill(case, received, out, ids)
    options = (case.num_experts, case.alignment)
    for sum_at, factors, given in (
        ("token", None, {}),
        ("expert", None, {}),
        ("token", at_tokens, {"topk_weights": case.there(at_tokens)}),
        ("expert", at_rows, {"row_weights": fill(case, received, at_rows, ids)}),
    ):
        y = low_latency.combine(ours, received.handle, **given, sum_at=sum_at)
        assert_all_equal(y, reference.low_latency_combine(out, ids, *options, weights=factors, sum_at=sum_at))


@pytest.mark.parametrize("block", a_third(range(BLOCKS)))
def test_equals_reference(block, device):
    for seed in range(block * CASES_PER_BLOCK, (block + 1) * CASES_PER_BLOCK):
        case = LowLatencyCase(seed, device=device)
        with case.cluster() as cluster:
            low_latency = case.low_latency(cluster)
            for _ in range(3):
                check_round(case, low_latency)


@pytest.mark.parametrize("seed", a_third(range(12)))
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_max_recv_tokens(seed, share, device):
    """Rows from the limit on are left out of the dispatch, and count as zeros in the combine."""
    case = LowLatencyCase(1000 + seed, device=device)
    case.masked, case.layout = False, "grouped"
    ids, _, x = case.new_round()
    expected, _, counts = reference.dispatch(
        x, ids, [torch.ones(i.shape) for i in ids], case.num_experts, case.alignment
    )
    limit = max(1, int(share * max(int(count.sum()) for count in counts)))
    with case.cluster() as cluster:
        low_latency = case.low_latency(cluster)
        sent = map(case.there, (x, ids))
        received = low_latency.dispatch(*sent, **case.dispatch_options(), max_recv_tokens=limit)
        for rank, rows in enumerate(part.cpu() for part in received.x):
            assert len(rows) == limit
            last = 0
            for first, token, _ in reference.places(ids, rank, case.num_experts, case.alignment):
                end = min(limit, first + len(token))
                assert torch.equal(rows[first:end], expected[rank][first:end])
                last = first + len(token) if len(token) else last
            assert bool(received.overflow[rank]) == (last > limit)
        out = case.reals([limit] * case.world)
        for sum_at in ("token", "expert"):
            y = low_latency.combine(case.there(out), received.handle, sum_at=sum_at)
            options = {"max_recv_tokens": limit, "sum_at": sum_at}
            assert_all_equal(y, reference.low_latency_combine(out, ids, case.num_experts, case.alignment, **options))


@pytest.mark.parametrize("seed", a_third(range(10)))
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 1.3])
def test_expert_capacity(seed, share, device):
    """Each expert has its rows; more than those are left out of the dispatch, and count as zeros in the combine."""
    case = LowLatencyCase(2000 + seed, device=device)
    case.masked, case.layout, case.alignment = True, "masked", 1
    ids, weights, x = case.new_round()
    expected, probs, counts = reference.dispatch(x, ids, weights, case.num_experts)
    capacity = max(1, int(share * max(int(count.max()) for count in counts)))
    with case.cluster() as cluster:
        low_latency = case.low_latency(cluster)
        received = low_latency.dispatch(*map(case.there, (x, ids, weights)), expert_capacity=capacity)
        for rank in range(case.world):
            ours, ours_probs = received.x[rank].cpu(), received.probs[rank].cpu()
            assert ours.shape[1] == ours_probs.shape[1] == capacity
            assert received.recv_counts[rank].tolist() == counts[rank].tolist()
            assert bool(received.overflow[rank]) == bool((counts[rank] > capacity).any())
            at = reference.places(ids, rank, case.num_experts)
            for expert, (first, token, _) in enumerate(at):
                end = min(capacity, len(token))
                assert torch.equal(ours[expert, :end], expected[rank][first : first + end])
                assert torch.equal(ours_probs[expert, :end], probs[rank][first : first + end])
        rows = [case.reals([len(part)])[0] for part in expected]
        out = [torch.full(part.shape, torch.nan, dtype=part.dtype) for part in received.x]
        for rank in range(case.world):
            for expert, (first, token, _) in enumerate(reference.places(ids, rank, case.num_experts)):
                end = min(capacity, len(token))
                out[rank][expert, :end] = rows[rank][first : first + end]
                rows[rank][first + end : first + len(token)] = 0
        for sum_at in ("token", "expert"):
            y = low_latency.combine(case.there(out), received.handle, sum_at=sum_at)
            assert_all_equal(y, reference.low_latency_combine(rows, ids, case.num_experts, sum_at=sum_at))


@pytest.mark.parametrize("seed", a_third(range(10)))
def test_shapes_change_from_call_to_call(seed, device):
    """Smaller rows and fewer experts in the same memory, and calls of the normal mode in between."""
    case = LowLatencyCase(2000 + seed, device=device)
    dtypes = summable_dtypes(device)
    with case.cluster() as cluster:
        widest = max(dtypes, key=lambda dtype: dtype.itemsize)
        low_latency = ep.LowLatency(cluster, max_tokens=60, hidden=80, topk=case.topk, dtype=widest)
        case.max_tokens = 60
        for case.dtype in dtypes * (8 // len(dtypes)):
            case.topk, case.hidden = case.random.randint(1, case.topk), case.random.randint(1, 80)
            case.masked = not case.masked
            case.layout, case.alignment = ("masked", 1) if case.masked else ("grouped", case.random.choice([1, 4]))
            check_round(case, low_latency)
            if case.hidden >= 8:
                continue
            ids, weights, x = case.new_round()
            rows = ep.dispatch(*map(case.there, (x, ids, weights)), buffer=cluster)
            assert_all_equal(rows.x, reference.dispatch(x, ids, weights, case.num_experts)[0])


@pytest.mark.parametrize("seed", a_third(range(40)))
def test_hooks_in_any_order(seed, device):
    case = LowLatencyCase(3000 + seed, max_tokens=20, device=device)
    done = []
    with case.cluster() as cluster:
        low_latency = case.low_latency(cluster)

        def dispatch():
            ids, weights, x = case.new_round()
            sent = map(case.there, (x, ids, weights))
            received, hook = low_latency.dispatch(*sent, **case.dispatch_options(), return_recv_hook=True)
            expected, _, _ = reference.dispatch(x, ids, weights, case.num_experts, case.alignment)

            def receive():
                hook()
                case.check_rows(received, expected, ids)
                done.append((received, ids, expected))

            return receive

        def combine():
            received, ids, rows = case.random.choice(done)
            out = case.reals([len(part) for part in rows])
            y, hook = low_latency.combine(fill(case, received, out, ids), received.handle, return_recv_hook=True)
            expected = reference.low_latency_combine(out, ids, case.num_experts, case.alignment)

            def receive():
                hook()
                assert_all_equal(y, expected)

            return receive

        def kind_of_next():
            return case.random.choice(["dispatch", "combine"]) if done else "dispatch"

        receive_in_any_order(12, kind_of_next, {"dispatch": dispatch, "combine": combine}, case.random)


def two_ranks(device="cpu", **options):
    cluster = ep.LocalCluster(1, 2, ep.Config(num_experts=4, timeout=5), device=device, **options)
    x = [torch.randn(tokens, 8, device=device) for tokens in (3, 2)]
    ids = [torch.tensor(i, device=device) for i in ([[0, 2], [3, -1], [1, 0]], [[3, 1], [-1, -1]])]
    return cluster, ep.LowLatency(cluster, max_tokens=4, hidden=8, topk=2, dtype=torch.float32), x, ids


def test_a_third_call_under_way_is_refused_and_nothing_is_lost(device):
    cluster, low_latency, x, ids = two_ranks(device)
    hooks = [low_latency.dispatch(x, ids, return_recv_hook=True) for _ in range(2)]
    with pytest.raises(ValueError, match="the dispatch before the last has not been received"):
        low_latency.dispatch(x, ids)
    hooks[1][1]()  # the newer one: the older one still holds the bank of the next
    with pytest.raises(ValueError, match="the dispatch before the last has not been received"):
        low_latency.dispatch(x, ids)
    received, hook = hooks[0]
    hook()
    third = low_latency.dispatch(x, ids)
    for first, last, counts in zip(received.x, third.x, third.recv_counts, strict=True):
        for a, b, count in zip(first, last, counts, strict=True):
            assert torch.equal(a[:count], b[:count])
    with pytest.raises(ValueError, match="called twice"):
        hook()
    combines = [low_latency.combine(received.x, received.handle, return_recv_hook=True) for _ in range(2)]
    with pytest.raises(ValueError, match="the combine before the last has not been received"):
        low_latency.combine(received.x, received.handle)
    for y, hook in combines:
        hook()
        assert torch.equal(y[0], x[0] * torch.tensor([[2.0], [1.0], [2.0]], device=device))
    cluster.close()


def test_out_gets_the_sums():
    _, low_latency, x, ids = two_ranks()
    received = low_latency.dispatch(x, ids)
    out = [torch.full_like(tensor, 7) for tensor in x]
    y = low_latency.combine(received.x, received.handle, out=out)
    assert all(a is b for a, b in zip(y, out, strict=True))
    assert_all_equal(out, low_latency.combine(received.x, received.handle))


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_counted_by_source(seed, device):
    """Added up over calls, once they are received."""
    case = LowLatencyCase(6000 + seed, device=device)
    with case.cluster() as cluster:
        low_latency = case.low_latency(cluster)
        expected = [torch.full((case.world,), 7) for _ in range(case.world)]
        rows = [count.to(device, copy=True) for count in expected]
        for _ in range(2):
            ids, _, x = case.new_round()
            sent = map(case.there, (x, ids))
            _, hook = low_latency.dispatch(*sent, **case.dispatch_options(), recv_rows=rows, return_recv_hook=True)
            assert_all_equal(rows, expected)
            hook()
            for rank in range(case.world):
                for source, idx in enumerate(ids):
                    here = idx.div(case.num_experts // case.world, rounding_mode="floor") == rank
                    expected[rank][source] += here.any(dim=1).sum()
            assert_all_equal(rows, expected)


def test_mistakes_are_named():
    cluster, low_latency, x, ids = two_ranks()
    received = low_latency.dispatch(x, ids)
    wide = [torch.randn(3, 9), torch.randn(2, 9)]
    many = [torch.randn(5, 8), torch.randn(2, 8)]
    dispatches = [
        ((wide, ids), {}, "x has rows of 9 x torch.float32, must have at most the 32 bytes"),
        ((many, [torch.zeros(5, 1, dtype=torch.int64), ids[1]]), {}, "on one rank and 2 on another"),
        (
            (many, [torch.zeros(5, 2, dtype=torch.int64), ids[1]]),
            {},
            "x has 5 tokens, must have at most max_tokens = 4",
        ),
        ((x, [i.repeat(1, 2) for i in ids]), {}, "topk_idx has K = 4, must be at most the 2"),
        ((x, [ids[0].clone().fill_(4), ids[1]]), {}, r"topk_idx of rank 0 is \[4, 4\] at token 0, must hold distinct"),
        ((x, [ids[0], torch.tensor([[0, -1], [1, 1]])]), {}, r"topk_idx of rank 1 is \[1, 1\] at token 1"),
        ((x, ids), {"layout": "columns"}, "layout is 'columns', must be one of 'masked', 'grouped'"),
        ((x, ids), {"expert_alignment": 2}, "must be left out with layout 'masked'"),
        ((x, ids), {"layout": "grouped", "expert_alignment": 0}, "expert_alignment is 0"),
        ((x, ids), {"layout": "grouped", "max_recv_tokens": 0}, "max_recv_tokens is 0"),
        ((x, ids), {"expert_capacity": 0}, "expert_capacity is 0"),
        ((x, ids), {"layout": "grouped", "expert_capacity": 4}, "expert_capacity is 4, must be left out with layout"),
        ((x, ids, [torch.ones(3, 1), torch.ones(2, 1)]), {}, r"topk_weights has shape \(3, 1\), must be \(3, 2\)"),
        (([t.int() for t in x], ids), {}, "x is torch.int32"),
        (
            (x, ids),
            {"recv_rows": [torch.zeros(2)] * 2},
            r"recv_rows is torch.float32 of shape \(2,\), must be torch.int64",
        ),
        (
            (x, ids),
            {"recv_wait_ns": [torch.zeros(3).long()] * 2},
            r"recv_wait_ns is torch.int64 of shape \(3,\), must be",
        ),
    ]
    for arguments, options, message in dispatches:
        with pytest.raises(ValueError, match=message):
            low_latency.dispatch(*arguments, **options)
    combines = [
        ((received.x, None), {}, "handle is a NoneType"),
        (([t[:, 1:].contiguous() for t in received.x], received.handle), {}, r"must be \[2, 8, H\]"),
        ((received.x, received.handle), {"sum_at": "rank"}, "sum_at is 'rank', must be one of"),
        ((received.x, received.handle), {"renormalize": "yes"}, "renormalize is 'yes', must be True or False"),
        ((received.x, received.handle, x), {}, r"weights has shape \(3, 8\), must be \(3, 2\)"),
        (
            (received.x, received.handle),
            {"row_weights": x, "sum_at": "expert"},
            r"row_weights has shape \(3, 8\), must be \[2, 8\]",
        ),
        (
            (received.x, received.handle),
            {"row_weights": x},
            "row_weights is given, must be None with topk_weights and sum_at='token'",
        ),
        (
            (received.x, received.handle, x),
            {"row_weights": x, "sum_at": "expert"},
            "topk_weights is given, must be None with row_weights and sum_at='expert'",
        ),
        ((received.x, received.handle), {"out": [t.double() for t in x]}, "out is torch.float64"),
        ((received.x, received.handle), {"out": [x[1], x[0]]}, r"out has shape \(2, 8\), must be \(3, 8\)"),
    ]
    for arguments, options, message in combines:
        with pytest.raises(ValueError, match=message):
            low_latency.combine(*arguments, **options)
    for options, message in (
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"topk": 33}, "topk is 33"),
        ({"dtype": torch.int32}, "dtype is torch.int32"),
        ({"hidden": 0}, "hidden is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ep.LowLatency(cluster, **({"max_tokens": 4, "hidden": 8, "topk": 2} | options))
    with pytest.raises(ValueError, match="buffer is a int"):
        ep.LowLatency(3, max_tokens=4, hidden=8, topk=2)
    again = low_latency.dispatch(x, ids)  # nothing was sent, nothing is lost
    assert_all_equal(again.recv_counts, received.recv_counts)


def test_rows_that_were_not_received_have_no_backward_pass():
    _, low_latency, x, ids = two_ranks()
    leaves = [rows.clone().requires_grad_() for rows in x]
    received, hook = low_latency.dispatch(leaves, ids, return_recv_hook=True)
    with pytest.raises(ValueError, match="not received yet: call its hook first"):
        sum(rows.sum() for rows in received.x).backward(retain_graph=True)
    hook()
    sum(rows.sum() for rows in received.x).backward()
    assert all(leaf.grad is not None for leaf in leaves)


def test_memory():
    """What the docstring says, for the sizes of DeepSeek-V3 on 8 ranks."""
    with ep.LocalCluster(1, 8, ep.Config(num_experts=256)) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=128, hidden=7168, topk=8)
        assert low_latency.memory_bytes <= 100e6
        about = 2 * (8 / 7 * (8 + 8) + 8) * 128 * 7168 * 2
        assert about <= low_latency.memory_bytes <= 1.06 * about


def test_credits_under_way_when_it_goes():
    """What the network still brings to its memory does not arrive there when it is gone."""
    with ep.LocalCluster(3, 1, ep.Config(num_experts=3), seed=1) as cluster:
        ids = [torch.tensor([[0, 1], [2, 0]])] * 3
        for hidden in (5000, 4, 3000):
            x = [torch.ones(2, hidden)] * 3
            low_latency = ep.LowLatency(cluster, max_tokens=2, hidden=hidden, topk=2, dtype=torch.float32)
            received = low_latency.dispatch(x, ids)
            assert torch.equal(low_latency.combine(received.x, received.handle)[0], 2 * x[0])
            del low_latency, received


@pytest.mark.parametrize("with_hooks", [False, True])
def test_nothing_waits_for_the_collector(with_hooks):
    """Which may come while a CUDA graph is captured: giving memory back then would end the capture."""
    gc.disable()
    try:
        with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:
            low_latency = ep.LowLatency(cluster, max_tokens=3, hidden=8, topk=1, dtype=torch.float32)
            gone = [weakref.ref(part) for part in (cluster, low_latency._calls, low_latency._calls.ranks)]
            x, ids = [torch.ones(3, 8, requires_grad=True)], [torch.tensor([[0], [-1], [1]])]
            if with_hooks:
                received, hook = low_latency.dispatch(x, ids, return_recv_hook=True)
                hook()
                y, hook = low_latency.combine(received.x, received.handle, return_recv_hook=True)
                hook()
            else:
                received = low_latency.dispatch(x, ids)
                y = low_latency.combine(received.x, received.handle)
            y[0].sum().backward()
        del cluster, low_latency, received, y
        if with_hooks:
            del hook
        assert not any(part() for part in gone)
    finally:
        gc.enable()

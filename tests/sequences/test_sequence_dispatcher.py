"""Q, K and V on other ranks and back, forward and backward, bit for bit as the specification says."""

import random

import pytest
import torch
from nightly import a_third
from sequence_cases import Case, assert_equal, check, many_copies, random_plan

import megatron_ep as ep
from megatron_ep.sequences import reference
from megatron_ep.sequences.dispatcher import SequenceDispatcher
from megatron_ep.sequences.handles import tokens_of_row
from megatron_ep.sequences.plan import SequencePlan, Shard


@pytest.mark.parametrize("block", a_third(range(6)))
def test_any_shape(block, device, monkeypatch):
    """On a GPU every other case with the intra-rank pass."""
    for seed in range(12 * block, 12 * (block + 1)):
        case = Case(seed, device=device)
        with case.cluster(**{"threads": 1 + seed % 2} if device == "cpu" else {}) as cluster:
            if device == "cuda" and seed % 2:
                monkeypatch.setattr(cluster._group.live_backend(), "min_local_bytes", 0)
            dispatcher = SequenceDispatcher(cluster)
            for _ in range(2):
                check(case, cluster, dispatcher)


@pytest.mark.parametrize("block", a_third(range(4)))
def test_any_interleaving(block):
    """Over a network that delays and reorders."""
    for seed in range(40 * block, 40 * (block + 1)):
        case = Case(seed, max_ranks_a_side=3)
        with case.cluster(seed=seed) as cluster:
            check(case, cluster, SequenceDispatcher(cluster))


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 11), (5, 7), (1, 40), (2, 34)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_many_copies(nodes, ranks_per_node, dtype):
    """More than 9; and more than 32, which is what one token of the normal mode has experts for."""
    case = many_copies(nodes, ranks_per_node, dtype)
    assert case.plan.max_copies == case.world
    with case.cluster() as cluster:
        check(case, cluster, SequenceDispatcher(cluster))


def test_a_row_is_cut_between_nodes():
    assert list(tokens_of_row(range(32), 1)) == [32]
    assert list(tokens_of_row(range(40), 8)) == [32, 8]
    assert list(tokens_of_row(range(40), 7)) == [28, 12]
    assert list(tokens_of_row([*range(20), *range(20, 40)], 20)) == [20, 20]
    assert list(tokens_of_row(range(68), 34)) == [32, 2, 32, 2]


@pytest.mark.parametrize("shards", [[], [Shard(0, i, i, 2, 3) for i in range(4)], [Shard(0, 0, 3, 3, 5)]])
def test_ranks_without_rows(shards):
    case = Case(0)
    case.nodes, case.ranks_per_node, case.world, case.plan = 2, 2, 4, SequencePlan.build(shards, 4)
    case.config = ep.Config(num_experts=4)
    with case.cluster() as cluster:
        check(case, cluster, SequenceDispatcher(cluster))


def test_any_bits_travel():
    """No row is computed with: NaN with any payload, infinity, -0; and rows of float8, which get no gradient."""
    plan = SequencePlan.build([Shard(0, i, i, 3 - i, 5) for i in range(4)], 4)
    bits = [torch.randint(-(2**15), 2**15, (5, 24), dtype=torch.int16) for _ in range(4)]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=4)) as cluster:
        dispatcher = SequenceDispatcher(cluster)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            rows = [x.view(dtype) for x in bits]
            moved = [[x.view(torch.int16) for x in y] for y in dispatcher.dispatch(rows, rows, rows, plan)]
            for ours, expected in zip(moved, reference.dispatch(bits, bits, bits, plan), strict=True):
                assert_equal(ours, expected)
            back = dispatcher.combine([x.view(dtype) for x in moved[0]], plan)
            assert_equal([x.view(torch.int16) for x in back], bits)


@pytest.mark.numerical
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 4), (2, 2)])
def test_gradcheck(nodes, ranks_per_node):
    plan = SequencePlan.build([Shard(0, i, i, 3 - i, i) for i in range(4)] + [Shard(1, 0, 0, 2, 1)], 4)
    rows = plan.q_rows.sum(1).tolist()
    leaves = [torch.randn(n, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3) for n in rows]
    with ep.LocalCluster(nodes, ranks_per_node, ep.Config(num_experts=4)) as cluster:
        dispatcher = SequenceDispatcher(cluster)

        def attention(*rows):
            q, k, v = dispatcher.dispatch(rows[:4], rows[4:8], rows[8:], plan)
            out = [reference.attention(*qkv, plan.of_rank(rank)) for rank, qkv in enumerate(zip(q, k, v, strict=True))]
            return tuple(dispatcher.combine(out, plan))

        assert torch.autograd.gradcheck(attention, leaves)
        if nodes > 1:
            assert torch.autograd.gradgradcheck(attention, leaves)


def test_only_what_needs_a_gradient_gets_one():
    case = Case(3)
    with case.cluster() as cluster:
        dispatcher, inputs, gradients = SequenceDispatcher(cluster), case.inputs(), case.gradients()
        expected = case.expected_gradients(gradients)
        for needed in range(3):
            leaves = [[x.clone().requires_grad_(i == needed) for x in rows] for i, rows in enumerate(inputs)]
            moved = dispatcher.dispatch(*leaves, case.plan)
            outputs, sent = ([x for rows in tensors for x in rows] for tensors in (moved, gradients))
            torch.autograd.backward(outputs, sent)
            assert_equal([x.grad for x in leaves[needed]], expected[needed])
            assert all(x.grad is None for i, rows in enumerate(leaves) if i != needed for x in rows)


@pytest.mark.parametrize("narrow", ["q", "kv"])
def test_float8_is_not_said_to_have_a_gradient(narrow):
    plan = SequencePlan.build([Shard(0, i, i, 3 - i, 5) for i in range(4)], 4)
    with ep.LocalCluster(2, 2, ep.Config(num_experts=4)) as cluster:
        wide = [torch.randn(5, 3, requires_grad=True) for _ in range(4)]
        float8 = [torch.randn(5, 3).to(torch.float8_e4m3fn) for _ in range(4)]
        given = [float8 if name in narrow else wide for name in "qkv"]
        moved = SequenceDispatcher(cluster).dispatch(*given, plan)
        for name, rows in zip("qkv", moved, strict=True):
            assert [x.requires_grad for x in rows] == [name not in narrow] * 4
        outputs = [x for rows in moved for x in rows if x.requires_grad]
        grads = torch.autograd.grad(outputs, wide, [torch.ones_like(x) for x in outputs])
        assert all(grad.bool().all() for grad in grads)


def test_plans_and_moe_calls_in_any_order():
    """A buffer of experts carries them, too, and a backward pass may come after calls with other plans."""
    r, config = random.Random(5), ep.Config(num_experts=8)
    plans = [random_plan(4, r) for _ in range(5)]
    with ep.LocalCluster(2, 2, config) as cluster:
        dispatcher, pending = SequenceDispatcher(cluster), []
        for call in range(30):
            plan = r.choice(plans)
            rows = [torch.randn(n, 6, requires_grad=True) for n in plan.q_rows.sum(1).tolist()]
            moved = dispatcher.dispatch(rows, rows, rows, plan)
            pending.append((plan, rows, [x for y in moved for x in y]))
            if call % 3 == 0:
                ids = [torch.tensor([call % 8, (call + 1) % 8]).expand(rank, 2).contiguous() for rank in range(4)]
                x = [torch.randn(len(i), 5) for i in ids]
                received = ep.dispatch(x, ids, buffer=cluster)
                y = ep.combine(received.x, received.handle)
                assert all(torch.equal(a, 2 * b) for a, b in zip(y, x, strict=True))
            while len(pending) > 3:
                plan, rows, outputs = pending.pop(r.randrange(len(pending)))
                grads = [torch.randn_like(x) for x in outputs]
                ours = torch.autograd.grad(outputs, rows, grads)
                q, k, v = (grads[i : i + 4] for i in range(0, 12, 4))
                expected = zip(
                    reference.combine(q, plan),
                    reference.sum_copies(k, plan, 2),
                    reference.sum_copies(v, plan, 2),
                    strict=True,
                )
                for a, terms in zip(ours, expected, strict=True):
                    torch.testing.assert_close(a, sum(terms))


def test_a_plan_may_be_used_after_a_reset():
    plan = SequencePlan.build([Shard(0, i, i, 3 - i, 5) for i in range(4)], 4)
    rows = [torch.randn(5, 3, requires_grad=True) for _ in range(4)]
    with ep.LocalCluster(2, 2, ep.Config(num_experts=4)) as cluster:
        dispatcher = SequenceDispatcher(cluster)
        before = dispatcher.dispatch(rows, rows, rows, plan)
        cluster.reset()
        after = dispatcher.dispatch(rows, rows, rows, plan)
        for ours, theirs in zip(before, after, strict=True):
            assert_equal(ours, theirs)
        first, second = (torch.autograd.grad(y[0], rows, [torch.ones_like(x) for x in y[0]]) for y in (before, after))
        assert_equal(first, second)


# ---- what is refused

PLAN = SequencePlan.build([Shard(0, 0, 0, 1, 2), Shard(1, 0, 1, 1, 3)], 2)
GOOD = [torch.zeros(2, 4), torch.zeros(3, 4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.dispatch(GOOD, GOOD, GOOD, "plan"), "plan is a str, must be a SequencePlan"),
        (
            lambda d: d.dispatch(GOOD, GOOD, GOOD, SequencePlan.build([], 3)),
            "plan is for 3 ranks, must be for the 2 of the buffer",
        ),
        (lambda d: d.dispatch(GOOD[:1], GOOD, GOOD, PLAN), "q is 1 items, must be a list of 2 tensors"),
        (lambda d: d.dispatch(GOOD, GOOD[::-1], GOOD, PLAN), r"k has shape \(3, 4\), must be \[2, H\]"),
        (
            lambda d: d.dispatch(GOOD, GOOD, [x.double() for x in GOOD], PLAN),
            "v is torch.float64, must be torch.float32 as k is",
        ),
        (
            lambda d: d.dispatch([x.int() for x in GOOD], GOOD, GOOD, PLAN),
            "q is torch.int32, must be one of torch.bfloat16",
        ),
        (lambda d: d.combine([x[:, 0] for x in GOOD], PLAN), r"out has strides \(4,\)"),
        (lambda d: d.combine([x[:, 0].clone() for x in GOOD], PLAN), r"out has shape \(2,\), must be \[rows, ...\]"),
        (
            lambda d: d.combine([torch.zeros(0, 4), torch.zeros(5, 2)], PLAN),
            r"out has shape \(5, 2\), and \(0, 4\) on another rank, must be \[rows, ...\], alike on all ranks",
        ),
        (
            lambda d: d.dispatch(GOOD, GOOD, [torch.zeros(n, 9999) for n in (2, 3)], PLAN),
            "nvl_ring_bytes is 1024, must",
        ),
    ],
)
def test_mistakes(call, message):
    with ep.LocalCluster(1, 2, ep.Config(num_experts=2, tuning=ep.Tuning(nvl_ring_bytes=1024))) as cluster:
        dispatcher = SequenceDispatcher(cluster)
        with pytest.raises(ValueError, match=message):
            call(dispatcher)
        dispatcher.dispatch(GOOD, GOOD, GOOD, PLAN)  # nothing was sent


def test_a_ring_without_room_for_gradients_is_refused_at_once():
    """Partial sums of 16 bits travel in float32: nobody is to hear of it in the backward pass."""
    k, v = ([torch.zeros(n, width, dtype=torch.bfloat16, requires_grad=True) for n in (2, 3)] for width in (600, 4))
    plan = SequencePlan.build([Shard(0, 0, 0, 0, 2), Shard(0, 1, 1, 1, 3)], 2)
    with ep.LocalCluster(
        2, 1, ep.Config(num_experts=2, tuning=ep.Tuning(nvl_ring_bytes=2048, rdma_ring_bytes=4096))
    ) as cluster:
        dispatcher = SequenceDispatcher(cluster)
        with pytest.raises(ValueError, match=r"nvl_ring_bytes is 2048, must be at least \d+ for 600 x torch.float32"):
            dispatcher.dispatch(v, k, v, plan)
        dispatcher.dispatch(v, [x.detach() for x in k], [x.detach() for x in v], plan)


def test_what_is_no_buffer():
    with pytest.raises(ValueError, match="buffer is a str, must be a Buffer or LocalCluster"):
        SequenceDispatcher("buffer")

"""Low-latency calls of one rank by a plan, which the first of them makes: the same bits and the same errors."""

import pytest
import torch
from cases import drawn
from entered import check_entered
from rank_threads import run_together, thread_ranks
from torch.autograd import forward_ad

import megatron_ep as ep
from megatron_ep.buffer.call_cache import CallCache
from megatron_ep.low_latency import checks

EXPERTS, HIDDEN, TOPK, TOKENS = 8, 512, 3, 6

pytestmark = pytest.mark.usefixtures("closed_afterwards")


def buffers_of(world):
    return thread_ranks(1, world, ep.Config(num_experts=EXPERTS, timeout=20), takes_lists=False)


def mode_of(buffer):
    return ep.LowLatency(buffer, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK)


def inputs(seed):
    [x], [ids], [weights] = drawn([TOKENS - seed], EXPERTS, TOPK, HIDDEN, seed)
    return x.bfloat16(), ids, weights


@pytest.fixture(params=["with plans", "without plans"])
def plans(request, monkeypatch):
    if request.param == "without plans":
        monkeypatch.setattr(CallCache, "get", lambda known, key: None)


def steps(buffer, layout, sum_at):
    mode = mode_of(buffer)
    x, ids, weights = inputs(buffer.rank)
    found = []
    for _ in range(4):
        rows = mode.dispatch(x, ids, weights, layout=layout)
        starts, counts = rows.expert_starts, rows.recv_counts
        if layout == "grouped":
            there = rows.x[: int(starts[-1])]
        else:
            there = torch.cat([expert[:n] for expert, n in zip(rows.x, counts.tolist(), strict=True)])
        factors = {"row_weights": torch.where(rows.probs > 0, rows.probs, 0)} if sum_at == "expert" else {}
        y = mode.combine(rows.x, rows.handle, None if factors else weights, sum_at=sum_at, **factors)
        plain = mode.combine(rows.x, rows.handle, sum_at=sum_at)
        found.append([there, starts, counts, rows.overflow, y, plain])
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", ["masked", "grouped"])
@pytest.mark.parametrize("sum_at", ["token", "expert"])
def test_the_same_bits_by_a_plan(world, layout, sum_at, monkeypatch):
    def work(buffer):
        return steps(buffer, layout, sum_at)

    planned = run_together(buffers_of(world), work)
    monkeypatch.setattr(CallCache, "get", lambda known, key: None)
    for of_rank, expected in zip(planned, run_together(buffers_of(world), work), strict=True):
        if isinstance(of_rank, BaseException):
            raise of_rank
        for found in of_rank:
            for a, b in zip(found, expected[0], strict=True):
                assert torch.equal(a, b)


def test_a_model_makes_its_calls_by_plans(monkeypatch):
    mode = mode_of(buffers_of(1)[0])
    x, ids, weights = inputs(0)
    expected = mode.dispatch(x, ids, weights)
    y = mode.combine(expected.x, expected.handle, weights)
    monkeypatch.setattr(checks, "check_dispatch", None)
    monkeypatch.setattr(checks, "check_combine", None)
    rows = mode.dispatch(x, ids, weights)
    assert torch.equal(mode.combine(rows.x, rows.handle, weights), y)


def test_what_looks_almost_like_a_call_that_was_right_is_refused(plans):
    buffer = buffers_of(1)[0]
    mode = mode_of(buffer)
    x, ids, weights = inputs(0)
    for _ in range(2):
        rows = mode.dispatch(x, ids, weights, expert_alignment=1)
        mode.combine(rows.x, rows.handle, weights)

    def freed(tensor):
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(0)
        return tensor

    bad = ids.clone()
    bad[2, 1] = EXPERTS
    wrong = [
        (lambda: mode.dispatch(x, bad, weights), "at token 2, must hold distinct ids"),
        (lambda: mode.dispatch(x, ids, weights, expert_alignment=True), "expert_alignment is True, must be"),
        (lambda: mode.dispatch(torch._neg_view(x), ids, weights), "x is a view that negates"),
        (lambda: mode.dispatch(forward_ad.make_dual(x, x), ids, weights), "x has a tangent, must have none"),
        (lambda: mode.dispatch(freed(x), ids, weights), "x is a Tensor without memory, must have memory"),
        (lambda: mode.dispatch(x, ids, freed(weights)), "weights is a Tensor without memory, must have memory"),
        (lambda: mode.dispatch(x, ids[:3], weights), "x has shape"),
        (lambda: mode.combine(rows.x, rows.handle, weights, renormalize=0), "renormalize is 0, must be True or False"),
        (lambda: mode.combine(rows.x, rows.handle, weights, row_weights=weights), "row_weights is given, must be None"),
        (lambda: mode.combine(rows.x, None, weights), "handle is a NoneType, must be of a dispatch of this LowLatency"),
        (lambda: mode.combine(rows.x[:1], rows.handle, weights), "x has shape"),
    ]
    with forward_ad.dual_level():
        for call, words in wrong:
            with pytest.raises(ValueError, match=words):
                call()
    again = mode.dispatch(x, ids, weights)
    assert torch.equal(mode.combine(again.x, again.handle, weights), mode.combine(rows.x, rows.handle, weights))


def test_calls_under_way_and_resets(plans):
    """A third dispatch waits for the first to be received, also one by a plan; what a reset gives up is of no use."""
    buffer = buffers_of(1)[0]
    mode = mode_of(buffer)
    x, ids, weights = inputs(0)
    rows = mode.dispatch(x, ids, weights)
    y = mode.combine(rows.x, rows.handle, weights)
    first, receive = mode.dispatch(x, ids, weights, return_recv_hook=True)
    with pytest.raises(ValueError, match="handle is of a dispatch that was not received yet"):
        mode.combine(rows.x, first.handle, weights)
    mode.dispatch(x, ids, weights)
    with pytest.raises(ValueError, match="the dispatch before the last has not been received"):
        mode.dispatch(x, ids, weights)
    receive()
    assert torch.equal(mode.combine(first.x, first.handle, weights), y)
    given_up, receive = mode.dispatch(x, ids, weights, return_recv_hook=True)
    buffer.reset()
    with pytest.raises(ValueError, match="called after the buffer's reset, must be called before"):
        receive()
    with pytest.raises(ValueError, match="handle is of a dispatch that was given up before the buffer's reset"):
        mode.combine(rows.x, given_up.handle, weights)
    assert torch.equal(mode.combine(rows.x, rows.handle, weights), y), "it was over before the reset"
    later = mode.dispatch(x, ids, weights)
    assert torch.equal(mode.combine(later.x, later.handle, weights), y)


def test_calls_that_need_gradients(plans):
    """Plans of calls with and without a gradient are apart."""
    mode = mode_of(buffers_of(1)[0])
    x, ids, weights = inputs(0)
    grads = []
    for _ in range(2):
        mode.combine((rows := mode.dispatch(x, ids, weights)).x, rows.handle, weights)
        leaf = x.clone().requires_grad_()
        received = mode.dispatch(leaf, ids, weights)
        mode.combine(received.x, received.handle, weights).float().square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads) and grads[0].abs().sum() > 0


def test_a_call_that_was_made_before_enters_little_of_the_package():
    mode = mode_of(buffers_of(1)[0])
    x, ids, weights = inputs(0)
    stats = torch.zeros(1, dtype=torch.int64)
    rows = mode.dispatch(x, ids)

    def hooked():
        _, hook = mode.dispatch(x, ids, return_recv_hook=True)
        hook()

    calls = {
        "dispatch": lambda: mode.dispatch(x, ids),
        "dispatch, weights": lambda: mode.dispatch(x, ids, weights),
        "dispatch, fp8 and counters": lambda: mode.dispatch(x, ids, fp8="fp32", recv_rows=stats, recv_wait_ns=stats),
        "dispatch, hook": hooked,
        "combine": lambda: mode.combine(rows.x, rows.handle, weights),
        "combine, counter": lambda: mode.combine(rows.x, rows.handle, recv_wait_ns=stats),
    }
    allowed = {
        "dispatch": (9, 14),
        "dispatch, weights": (9, 16),
        "dispatch, fp8 and counters": (11, 18),
        "dispatch, hook": (10, 20),
        "combine": (6, 10),
        "combine, counter": (6, 10),
    }
    check_entered(calls, allowed)

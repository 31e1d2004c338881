"""Calls of one rank by a plan, which the first of them makes: the same bits and the same errors."""

import threading
from dataclasses import replace

import pytest
import torch
from cases import drawn
from entered import check_entered
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import run_together, thread_ranks
from torch.autograd import forward_ad

import megatron_ep as ep
from megatron_ep.buffer.call_cache import CallCache
from megatron_ep.buffer.host import HostBackend
from megatron_ep.errors import BusyError
from megatron_ep.normal import plan

EXPERTS, HIDDEN, TOPK = 8, 24, 3
ROWS = 15  # of 5 tokens
CONFIG = ep.Config(num_experts=EXPERTS, timeout=20)


class CountsLater(HostBackend):
    """As a GPU's: with max_recv_tokens the host learns no counts."""

    host_knows_counts = False

    def launch(self, launcher, call, phase, stream, values, part=None):
        if phase != plan.WITHOUT_WAIT:
            return super().launch(launcher, call, phase, stream, values, part=part)
        super().launch(launcher, call, phase, stream, values, part=part)


class CountsExpected(HostBackend):
    """As a GPU's: without max_recv_tokens it launches before it knows the counts."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.speculates = True


@pytest.fixture(params=[HostBackend, CountsLater, CountsExpected])
def backend(request, monkeypatch):
    monkeypatch.setattr("rank_threads.HostBackend", request.param)


@pytest.fixture(params=["with plans", "without plans"])
def plans(request, monkeypatch):
    if request.param == "without plans":
        monkeypatch.setattr(CallCache, "get", lambda known, key: None)


def buffers_of(nodes, ranks_per_node):
    return thread_ranks(nodes, ranks_per_node, CONFIG, takes_lists=False)


@pytest.fixture
def buffer(closed_afterwards):
    return buffers_of(1, 1)[0]


def inputs(seed, num_tokens=5, hidden=HIDDEN):
    return [part for [part] in drawn([num_tokens], EXPERTS, TOPK, hidden, seed)]


def step(buffer, x, ids, weights, *, x_learns, weights_learn, uses_probs, is_weighted, **options):
    """All that comes of a dispatch, its handle, a combine and their gradients."""
    x, weights = x.clone().requires_grad_(x_learns), weights.clone().requires_grad_(weights_learn)
    rows = ep.dispatch(x, ids, weights, buffer=buffer, **options)
    factors = torch.linspace(0.5, 2, len(rows.x)) if is_weighted else None
    y = ep.combine(rows.x * 2, rows.handle, factors)
    again = ep.dispatch(x.detach() + 1, topk_weights=weights.detach(), handle=rows.handle)
    flat = rows.topk_idx
    real = int(rows.tokens_per_expert.sum() if flat is None else (flat >= 0).any(dim=1).sum())  # anything is behind
    kept = rows.x[:real]
    if options.get("expert_capacity") and not (x_learns or weights_learn):  # padding is anything
        kept = kept[rows.probs[:real] != 0]
    found = [kept, rows.probs, rows.tokens_per_expert, rows.overflow, y, again.x[:real], again.probs]
    found += [flat] if flat is not None else []
    if x_learns or weights_learn:
        loss = (y * torch.arange(HIDDEN)).sum() + (rows.probs.square().sum() if uses_probs else 0)
        loss.backward()
        found += [leaf.grad for leaf in (x, weights) if leaf.requires_grad]
    return [tensor.clone() for tensor in found]


@pytest.mark.usefixtures("closed_afterwards", "backend")
@settings(max_examples=12, deadline=None)
@given(
    nodes_and_ranks=st.sampled_from([(1, 1), (1, 2), (2, 2)]),
    options=st.sampled_from(
        [
            {},
            {"max_recv_tokens": 70},
            {"layout": "flat"},
            {"layout": "flat", "max_recv_tokens": 30},
            {"expert_alignment": 4},
            {"expert_capacity": 6},
            {"expert_capacity": 3, "max_recv_tokens": 40},
        ]
    ),
    learns=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    is_weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_same_bits_by_a_plan(nodes_and_ranks, options, learns, is_weighted, seed):
    """Of the first call, of those after it, which its plans launch, and of calls that have none. One rank leaves its
    probs out of the loss, and still calls what the others call."""
    x_learns, weights_learn, uses_probs = learns

    def work(buffer):
        def run():
            return step(
                buffer,
                *inputs(seed + buffer.rank, num_tokens=5 - buffer.rank),
                x_learns=x_learns,
                weights_learn=weights_learn,
                uses_probs=uses_probs and buffer.rank != 1,
                is_weighted=is_weighted,
                **options,
            )

        return [run() for _ in range(3)]

    results = run_together(buffers_of(*nodes_and_ranks), work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallCache, "get", lambda known, key: None)
        without = run_together(buffers_of(*nodes_and_ranks), work)
    for of_rank, expected in zip(results, without, strict=True):
        if isinstance(of_rank, BaseException):
            raise of_rank
        for found in of_rank:
            assert len(found) == len(expected[0])
            for a, b in zip(found, expected[0], strict=True):
                assert torch.equal(a, b)


def test_a_model_makes_its_calls_by_plans(buffer, monkeypatch):
    """From the second step on nothing is checked again."""
    x, ids, weights = inputs(1)
    settings_of = dict(x_learns=True, weights_learn=True, uses_probs=True, is_weighted=True, max_recv_tokens=ROWS)
    expected = step(buffer, x, ids, weights, **settings_of)
    for name in ("check_dispatch", "check_combine"):
        monkeypatch.setattr(f"megatron_ep.normal.checks.{name}", None)
    for a, b in zip(step(buffer, x, ids, weights, **settings_of), expected, strict=True):
        assert torch.equal(a, b)


def freed(tensor):
    """As recomputation and sharding free the memory of tensors."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def dual(tensor):
    """As forward-mode differentiation has it."""
    return forward_ad.make_dual(tensor, tensor)


def test_what_looks_almost_like_a_call_that_was_right_is_refused(buffer, plans):
    """With the same words as in a first call, and before anything is launched."""
    x, ids, weights = inputs(2)

    def dispatch(x=x, ids=ids, weights=weights, **options):
        return ep.dispatch(x, ids, weights, **{"buffer": buffer, "max_recv_tokens": ROWS, **options})

    def again(x=x, **options):
        return ep.dispatch(x, handle=rows.handle, **options)

    for _ in range(2):
        rows = dispatch()
        again(topk_weights=weights)
        sums = ep.combine(rows.x, rows.handle, rows.probs)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
    wrong = [
        (lambda: dispatch(torch._neg_view(x)), "x is a view that negates"),
        (lambda: dispatch(max_recv_tokens=True), "max_recv_tokens is True, must be"),
        (lambda: dispatch(max_recv_tokens=15.0), "max_recv_tokens is 15.0, must be"),
        (lambda: dispatch(buffer="buffer"), "buffer is a str, must be"),
        (lambda: dispatch(weights=weights.half().double(), layout=[]), r"layout is \[\], must be"),
        (lambda: dispatch(x[:4]), r"x has shape \(4, 24\), must be"),
        (lambda: dispatch(weights=weights[:4]), "topk_weights has shape"),
        (lambda: dispatch(handle=rows.handle), "topk_idx must not be given with a handle"),
        (lambda: again(max_recv_tokens=ROWS), "max_recv_tokens must not be given with"),
        (lambda: ep.combine(rows.x[:14], rows.handle, rows.probs), r"x has shape \(14, 24\), must be \[15, H\]"),
        (lambda: ep.combine(rows.x, rows.handle, weights), r"weights has shape \(5, 3\), must be \(15,\)"),
        (lambda: ep.combine(rows.x, rows.handle, rows.probs.double()), "weights is torch.float64, must be one of"),
        # without memory
        (lambda: dispatch(fake), "x is a FakeTensor without memory, must have memory"),
        (lambda: dispatch(weights=fake[:, :3]), "weights is a FakeTensor without memory"),
        (lambda: again(fake), "x is a FakeTensor without memory"),
        (lambda: dispatch(x.to_sparse_csr()), "x is a torch.sparse_csr tensor, must be strided"),
        (lambda: ep.combine(torch.nested.nested_tensor(list(x)), rows.handle), "x is a nested tensor, must be"),
        (lambda: dispatch(freed(x)), "x is a Tensor without memory, must have memory"),
        (lambda: dispatch(ids=freed(ids)), "topk_idx is a Tensor without memory"),
        (lambda: dispatch(weights=freed(weights)), "weights is a Tensor without memory"),
        (lambda: ep.combine(freed(rows.x), rows.handle, rows.probs), "x is a Tensor without memory"),
        (lambda: ep.combine(rows.x, rows.handle, freed(rows.probs)), "weights is a Tensor without memory"),
        # with a tangent
        (lambda: dispatch(dual(x)), "x has a tangent, must have none"),
        (lambda: dispatch(weights=dual(weights)), "topk_weights has a tangent, must have none"),
        (lambda: again(dual(x)), "x has a tangent, must have none"),
        (lambda: ep.combine(dual(rows.x), rows.handle), "x has a tangent, must have none"),
    ]
    seconds = buffer._group.seconds
    with forward_ad.dual_level():
        for call, words in wrong:
            with pytest.raises(ValueError, match=words):
                call()
    assert buffer._group.seconds == seconds
    bad = ids.clone()
    bad[3, 1] = EXPERTS
    with pytest.raises(ValueError, match=r"topk_idx is \[.*\] at token 3, must hold distinct ids"):
        dispatch(ids=bad)
    for transform, tensor in (torch.func.grad, x), (torch.func.vmap, x[None]):
        with pytest.raises(RuntimeError, match=r"setup_context|data pointer|storage"):
            transform(lambda rows: dispatch(rows).x.sum())(tensor)
    assert torch.equal(dispatch().x, rows.x) and torch.equal(ep.combine(rows.x, rows.handle, rows.probs), sums)


def test_gradients_of_gradients(buffer, plans):
    x, ids, weights = inputs(5, num_tokens=3, hidden=2)

    def layer(rows, factors):
        received = ep.dispatch(rows, ids, factors, buffer=buffer, max_recv_tokens=12)
        return ep.combine(received.x, received.handle), received.probs

    leaves = [x.double().requires_grad_(), weights.double().requires_grad_()]
    for _ in range(2):
        assert torch.autograd.gradgradcheck(layer, leaves)


def test_what_a_graph_captures_first_has_counts_of_its_own(buffer, plans, monkeypatch):
    """Calls that are captured read counts at once; a plan that they have made serves those after them."""
    x, ids, weights = inputs(6)
    monkeypatch.setattr(buffer._group.live_backend(), "is_capturing", lambda: True)
    captured = ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=ROWS)
    assert "tokens_per_expert" in vars(captured)
    again = ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=ROWS)
    assert "tokens_per_expert" in vars(again)
    monkeypatch.undo()
    later = ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=ROWS)
    assert torch.equal(later.x, captured.x) and torch.equal(later.tokens_per_expert, captured.tokens_per_expert)


def test_threads_share_plans(buffer, plans):
    """One launches at a time; whoever comes second is told."""
    x, ids, weights = inputs(7)
    expected = ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=ROWS).x
    wrong = []

    def work():
        for _ in range(30):
            try:
                rows = ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=ROWS)
                if not torch.equal(rows.x, expected):
                    wrong.append(rows.x)
            except BusyError:
                pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_closed_buffer_has_no_plans(buffer):
    x, ids, weights = inputs(8)
    rows = ep.dispatch(x, ids, weights, buffer=buffer)
    ep.dispatch(x, ids, weights, buffer=buffer)
    buffer.close()
    for call in lambda: ep.dispatch(x, ids, weights, buffer=buffer), lambda: ep.combine(rows.x, rows.handle):
        with pytest.raises(ValueError, match="buffer is closed"):
            call()


@pytest.mark.parametrize("in_one_hop", [False, True], ids=["through rings", "in one hop"])
def test_a_call_that_was_made_before_enters_little_of_the_package(in_one_hop):
    """Each function costs the host about 0.1 us. In one hop they are no more, though the host checks the ids there."""
    x, ids, weights = inputs(0)
    with ep.LocalCluster(1, 1, replace(CONFIG, max_tokens=5 if in_one_hop else None)) as buffer:
        buffer._group.takes_lists = False  # as in a process with one rank
        rows = ep.dispatch(x, ids, weights, buffer=buffer)
        assert (rows.handle.one_hop is not None) == in_one_hop
        calls = {
            "from scratch": lambda: ep.dispatch(x, ids, weights, buffer=buffer),
            "with its layout": lambda: ep.dispatch(x, handle=rows.handle),
            "combine": lambda: ep.combine(rows.x, rows.handle),
        }
        files = 1 if in_one_hop else 0
        allowed = {"from scratch": (10 + files, 31), "with its layout": (8, 16), "combine": (7 + files, 12)}
        check_entered(calls, allowed)

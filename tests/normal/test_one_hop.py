"""Dispatches with few tokens go in one hop: the bits of the rings, and which of both a call takes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import Case, drawn
from nightly import a_third, at_night
from process_cases import SIZES, Inputs, bits, check_cases, results
from run_on import run_on

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.buffer import low_latency
from megatron_ep.buffer.low_latency import RECEIVE

W = 4


def settings(**changes):
    return ep.Config(**{"num_experts": 8, "timeout": 20, "max_tokens": 16, **changes})


def inputs(tokens=(5, 0, 16, 9), experts=8, topk=3, hidden=40):
    return drawn(tokens, experts, topk, hidden)


@pytest.mark.parametrize("most_nodes", [1, 4])
@pytest.mark.parametrize("seed", a_third(range(60)))
def test_all_results_have_the_bits_of_the_rings(seed, most_nodes):
    """On several nodes as within one; between them with a simulated network, if there is a seed."""
    case = Case(seed, max_tokens=50, lines=True)
    case.nodes = math.gcd(most_nodes, case.world)
    case.ranks_per_node = case.world // case.nodes
    with (
        case.cluster(**({"seed": seed} if seed % 2 else {"threads": 1 + seed % 3})) as in_one_hop,
        ep.LocalCluster(1, case.world, replace(case.config, max_tokens=None)) as through_rings,
    ):
        drawn = Inputs.draw(case, through_rings)
        ours, expected = results(drawn, in_one_hop), results(drawn, through_rings)
    assert ours.keys() == expected.keys()
    for name, tensors in ours.items():
        for a, b in zip(tensors, expected[name], strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b)), name


def test_a_dispatch_asks_once_after_its_launch_whether_a_rank_gave_up(monkeypatch):
    x, ids, _ = inputs()
    with ep.LocalCluster(1, W, settings()) as cluster:
        backend, found = cluster._group.live_backend(), []
        launch, aborted = backend.launch, backend.aborted
        monkeypatch.setattr(backend, "launch", lambda *given: found.append("launched") or launch(*given))
        monkeypatch.setattr(backend, "aborted", lambda: found.append("asked") or aborted())
        ep.dispatch(x, ids, buffer=cluster)
        assert found[found.index("launched") :] == ["launched", "asked"]


@pytest.mark.parametrize("seeds", [range(4), at_night(range(4, 12))], ids=["few", "more"])
@pytest.mark.parametrize("sizes", SIZES)
@run_on("ranks")
def test_processes_have_the_bits_of_the_rings(sizes, seeds):
    config = replace(SIZES[sizes].config(), max_tokens=SIZES[sizes].max_tokens)
    with ep.Buffer(None, config, ep.Topology(1, W)) as buffer:
        assert buffer._group.one_hop is not None
        check_cases(buffer, SIZES[sizes], seeds)


def test_which_calls_go_in_one_hop():
    x, ids, weights = inputs()
    wide = [torch.randn(len(idx), 4000) for idx in ids]  # 16,000 bytes a row

    def goes_in_one_hop(cluster, rows=x, **options):
        received = ep.dispatch(rows, ids, weights, buffer=cluster, **options)
        ep.combine(received.x, received.handle)
        return received.handle.one_hop is not None

    with ep.LocalCluster(1, W, settings()) as cluster:
        assert goes_in_one_hop(cluster)
        assert goes_in_one_hop(cluster, max_tokens=16)
        assert goes_in_one_hop(cluster, max_recv_tokens=50)
        assert not goes_in_one_hop(cluster, max_tokens=17), "more than there is memory for"
        assert goes_in_one_hop(cluster, layout="flat")
        assert not goes_in_one_hop(cluster, wide)
    with ep.LocalCluster(1, W, settings(row_bytes=16_000)) as cluster:
        assert goes_in_one_hop(cluster, wide)
    with ep.LocalCluster(2, W // 2, settings()) as cluster:
        assert goes_in_one_hop(cluster)
    with ep.LocalCluster(1, W, settings(max_tokens=None)) as cluster:
        assert not goes_in_one_hop(cluster)


def test_a_promise_of_more_tokens_than_are_faster_is_warned_of(monkeypatch, caplog):
    """As on a GPU, where its SMs limit how many these are."""
    monkeypatch.setattr(low_latency, "LowLatencyRanks", lambda *_, **options: SimpleNamespace(max_tokens=64))
    backend = SimpleNamespace(attach=lambda part: None)
    for promise, said in (
        (64, []),
        (1024, ["Config.max_tokens is 1024, but with more than 64 tokens rings are faster"]),
    ):
        group = SimpleNamespace(config=settings(max_tokens=promise), ranks=[0], live_backend=lambda: backend)
        low_latency.connect_one_hop(group)
        assert [record.getMessage().partition(" here")[0] for record in caplog.records] == said


@pytest.mark.parametrize("layout", ["grouped", "flat"])
@pytest.mark.parametrize("tokens", [(64,) * W, (60,) * W, (64, 0, 3, 1)], ids=["all", "most", "few"])
def test_rows_take_little_more_memory_than_they_need(tokens, layout):
    x, ids, weights = inputs(tokens, topk=8)  # each token goes to all experts
    with ep.LocalCluster(1, W, settings(max_tokens=64)) as cluster:
        received = ep.dispatch(x, ids, weights, buffer=cluster, layout=layout)
    for out in (*received.x, *received.probs):
        rows = out.untyped_storage().nbytes() / (out.stride(0) * out.itemsize)
        assert out._base is None and len(out) <= rows <= len(out) / (1 - 1 / 8) + 128


def run_guesses(layout):
    """Rank 0 gets few rows, then many, then few, the other ranks none. How many rows this rank has allocated in each
    dispatch, and for what."""
    phases, asked = [], []
    with ep.Buffer(None, settings(max_tokens=120)) as buffer:
        backend, rank = buffer._group.live_backend(), buffer.rank
        launch, new_output = backend.launch, backend.new_output

        def noted(launcher, call, phase, *values):
            phases.append(phase)
            return launch(launcher, call, phase, *values)

        def noted_output(shape, dtype):
            asked.append(shape[0])
            return new_output(shape, dtype)

        for tokens_for_rank_0 in (30, 30, 120, 120, 30):
            x, ids, weights = inputs((120,) * W, topk=1)
            ids = [torch.where(torch.arange(120)[:, None] < tokens_for_rank_0, idx % 2, -1) for idx in ids]
            asked.append("dispatch")
            backend.launch, backend.new_output = noted, noted_output
            received = ep.dispatch(x[rank], ids[rank], weights[rank], buffer=buffer, layout=layout)
            backend.launch, backend.new_output = launch, new_output
            if layout == "flat":
                expected, flat_ids, probs, counts = reference.flat_dispatch(x, ids, weights, 8)
                assert torch.equal(received.topk_idx, flat_ids[rank])
            else:
                expected, probs, counts = reference.dispatch(x, ids, weights, 8)
            assert torch.equal(received.x, expected[rank]) and torch.equal(received.probs, probs[rank])
            assert torch.equal(received.tokens_per_expert, counts[rank]) and not received.overflow.any()
            assert torch.equal(ep.combine(received.x, received.handle), x[rank] * (ids[rank] >= 0))
            assert torch.equal(ep.dispatch(x[rank], handle=received.handle).x, received.x)
        dist.barrier()
        calls = [status.entered for status in backend.rank_statuses()]
        assert calls == calls[:1] * W, "who receives a call once more does not count it once more"
        dist.barrier()
    return asked, [phase == RECEIVE for phase in phases]


@pytest.mark.parametrize("layout", ["grouped", "flat"])
def test_about_as_many_rows_as_last_time(ranks, layout):
    """A rank with more rows than it made room for receives them once more, into memory for all of them."""
    asked, receives = ranks.run(run_guesses, layout)[0]
    few, many = 191, 574  # 120 and 480, a sixteenth and 64 more
    calls = ["dispatch", few, "dispatch", few, "dispatch", few, 480, "dispatch", many, "dispatch", many]
    assert asked == calls and receives == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"max_tokens": 15}, {}, r"topk_idx has 16 tokens, must have at most Config\.max_tokens = 15"),
        ({}, {"max_tokens": 15}, r"topk_idx has 16 tokens, must have at most max_tokens = 15"),
        ({}, {"max_tokens": 0}, r"max_tokens is 0, must be an int in \[1, "),
        ({}, {"max_tokens": True}, r"max_tokens is True, must be an int"),
        ({"max_tokens": None}, {"max_tokens": 64}, r"max_tokens is 64, must be None without Config\.max_tokens"),
    ],
)
def test_broken_promises(config, options, message):
    x, ids, _ = inputs()
    with ep.LocalCluster(1, W, settings(**config)) as cluster:
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                ep.dispatch(x, ids, buffer=cluster, **options)
        few = [idx[:8] for idx in ids]
        ep.dispatch([rows[:8] for rows in x], few, buffer=cluster)  # nothing was sent


def test_rows_that_are_wider_than_the_memory():
    x, ids, _ = inputs()
    with ep.LocalCluster(1, W, settings()) as cluster:
        received = ep.dispatch(x, ids, buffer=cluster)
        wide = [torch.zeros(len(rows), 4000) for rows in received.x]
        with pytest.raises(ValueError, match=r"x has rows of 4000 x torch.float32, must have at most 14336 bytes"):
            ep.combine(wide, received.handle)


def test_invalid_ids_are_refused_before_anything_is_sent():
    x, ids, _ = inputs()
    bad = [idx.clone() for idx in ids]
    bad[2][3] = torch.tensor([1, 1, 2])
    with ep.LocalCluster(1, W, settings()) as cluster:
        received = ep.dispatch(x, ids, buffer=cluster)
        with pytest.raises(ValueError, match=r"topk_idx of rank 2 is \[1, 1, 2\] at token 3"):
            ep.dispatch(x, bad, buffer=cluster)
        assert len(ep.combine(received.x, received.handle)) == W


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("wait", a_third(range(1, 40, 3)))
def test_a_rank_that_stops_anywhere(wait, nodes):
    """In a layer and its backward pass, within a node and over a network. What arrived does not pass for data;
    afterwards the buffer works."""
    x, ids, weights = inputs()

    def layer(cluster):
        leaves = [rows.clone().requires_grad_() for rows in x]
        received = ep.dispatch(leaves, ids, weights, buffer=cluster, max_recv_tokens=60)
        dispatches.append(received)
        y = ep.combine(received.x, received.handle, received.probs)
        sum(part.sum() for part in y).backward()
        return [leaf.grad for leaf in leaves]

    dispatches = []
    with ep.LocalCluster(nodes, W // nodes, settings(), seed=wait, stalled=(1, wait)) as cluster:
        with pytest.raises(ep.EPTimeoutError, match="one_hop"):
            for _ in range(40):
                layer(cluster)
        failed = [received for received in dispatches if received.overflow[1].item() == -1]
        for received in failed:
            assert received.tokens_per_expert[1].eq(-1).all() and received.x[1].isnan().all()
        cluster.reset()
        expected = layer(cluster)
        for received in dispatches[:-1]:
            if received.handle in [lost.handle for lost in failed]:
                with pytest.raises(ep.EPError, match="rank 1 used the handle of a dispatch that failed"):
                    ep.combine(received.x, received.handle)
                cluster.reset()
            else:
                ep.combine(received.x, received.handle)
        assert all(torch.equal(a, b) for a, b in zip(layer(cluster), expected, strict=True))


# ---- ranks that disagree


@run_on("ranks")
def test_ranks_that_promise_otherwise_in_a_call():
    x, ids, _ = inputs()
    with ep.Buffer(None, settings(timeout=1.0)) as buffer:
        own = (x[buffer.rank], ids[buffer.rank])
        with pytest.raises(ep.EPError):
            ep.dispatch(*own, buffer=buffer, max_tokens=17 if buffer.rank == 1 else None)
            ep.dispatch(*own, buffer=buffer)
        buffer.reset()
        received = ep.dispatch(*own, buffer=buffer)
        rows = received.x.clone().requires_grad_()
        y = ep.combine(rows, received.handle)
        buffer.release()
        assert buffer._group.one_hop is None
        with pytest.raises(ValueError, match="buffer is closed"):
            y.sum().backward()


def test_ranks_that_rejoin_must_not_promise():
    with pytest.raises(ValueError, match=r"Config\.max_tokens is 16, must be None where ranks rejoin"):
        ep.rejoin(None, 0, W, settings(), max_tokens=8, hidden=8, topk=2)

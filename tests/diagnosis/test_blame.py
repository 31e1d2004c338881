"""Whose fault a wait was that took too long."""

import re
import time
from itertools import pairwise

import pytest
import torch
from nightly import at_night
from rank_threads import run_together, thread_ranks
from waits import patience

import megatron_ep as ep
from megatron_ep.diagnosis import blame

pytestmark = pytest.mark.usefixtures("closed_afterwards")
TOPOLOGIES = [(1, 3), (3, 1), (2, 2)]
T, H, K = 12, 8, 2
TIMEOUT = patience(0.25)


def make_ranks(nodes, ranks_per_node, timeout=TIMEOUT):
    # rings of one row: everybody waits for everybody's credit
    config = ep.Config(num_experts=12, timeout=timeout, tuning=ep.Tuning(nvl_ring_bytes=128, rdma_ring_bytes=128))
    return thread_ranks(nodes, ranks_per_node, config)


def inputs(rank):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(T, 12, generator=generator).topk(K, dim=1).indices
    return [torch.ones(T, H)], [ids], [torch.ones(T, K)]


def dispatch(buffer):
    x, ids, weights = inputs(buffer.rank)
    return ep.dispatch(x, ids, weights, buffer=buffer)


# Of each step: what the rank makes of the rows of the call before; the call that nobody but the absent one enters.
STEPS = {
    "notify": (lambda rows, buffer: dispatch(buffer), "notify 2 (it finished 1)"),
    "dispatch": (lambda rows, buffer: ep.dispatch(inputs(0)[0], handle=rows.handle), "call 2 (it finished 1)"),
    "combine": (lambda rows, buffer: ep.combine(rows.x, rows.handle), "call 2 (it finished 1)"),
}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_an_absent_rank_is_named_by_all(topology, step):
    buffers = make_ranks(*topology)
    absent = len(buffers) - 2
    rows = run_together(buffers, dispatch)
    call, says = STEPS[step]
    errors = run_together([buffer for buffer in buffers if buffer.rank != absent], lambda b: call(rows[b.rank], b))
    for error in errors:
        assert isinstance(error, ep.EPTimeoutError), error
        first = str(error).splitlines()[0]
        assert re.match(rf"rank \d timed out first, after {TIMEOUT} s: ", first)
        assert first.endswith(f": rank {absent} has not entered {says}"), error
    # so does it itself, when it comes
    late = f"rank {absent} has not entered {says}; this is rank {absent}, which was in no call; every rank must"
    with pytest.raises(ep.EPAbortError, match=re.escape(late)):
        call(rows[absent], buffers[absent])


class Halves:
    """One rank's low-latency calls."""

    def __init__(self, buffer):
        self._mode = ep.LowLatency(buffer, max_tokens=T, hidden=H, topk=K, dtype=torch.float32)
        self._inputs = inputs(buffer.rank)[:2]
        self._rows = None

    def send_dispatch(self):
        self._rows, receive = self._mode.dispatch(*self._inputs, return_recv_hook=True)
        return receive

    def send_combine(self):
        return self._mode.combine(self._rows.x, self._rows.handle, return_recv_hook=True)[1]


# Of each step: what the absent rank does before it; what the others do; the half that it has not done.
def dispatch_twice(halves):
    halves.send_dispatch()
    halves.send_dispatch()


def combine_twice(halves):
    halves.send_dispatch()()
    halves.send_combine()
    halves.send_combine()


LOW_LATENCY_STEPS = {
    "dispatch sent": (lambda h: h.send_dispatch()(), lambda h: h.send_dispatch()(), "not sent low-latency dispatch 2"),
    "dispatch received": (
        dispatch_twice,
        lambda h: [h.send_dispatch()() for _ in range(3)],
        "not sent low-latency dispatch 3",
    ),
    "combine sent": (lambda h: h.send_dispatch()(), lambda h: h.send_combine()(), "not sent low-latency combine 1"),
    "combine received": (
        combine_twice,
        lambda h: [h.send_combine()() for _ in range(3)],
        "not sent low-latency combine 3",
    ),
}


@pytest.mark.parametrize("topology", [(2, 2), at_night((1, 3)), at_night((3, 1))], ids=str)
@pytest.mark.parametrize("step", LOW_LATENCY_STEPS)
def test_a_rank_that_is_absent_from_a_low_latency_half_is_named(topology, step):
    before, then, says = LOW_LATENCY_STEPS[step]
    buffers = make_ranks(*topology)
    absent = len(buffers) - 2

    def work(buffer):
        halves = Halves(buffer)
        if buffer.rank == absent:
            return before(halves)
        if step != "dispatch received":
            halves.send_dispatch()()
        return then(halves)

    for rank, error in enumerate(run_together(buffers, work)):
        if rank != absent:
            assert isinstance(error, ep.EPTimeoutError), error
            finished = int(says[-1]) - 1
            assert str(error).splitlines()[0].endswith(f": rank {absent} has {says} (it finished {finished})"), error


def test_several_absent_ranks_are_named():
    buffers = make_ranks(2, 2)
    rows = run_together(buffers, dispatch)
    errors = run_together(buffers[:2], lambda b: ep.combine(rows[b.rank].x, rows[b.rank].handle))
    for error in errors:
        assert ": rank 2, 3 have not entered call 2 (they finished 1)\n" in str(error)


def test_who_waits_in_an_earlier_call_is_not_to_blame():
    """Rank 0 is done with the combine, in which nobody sends it a row; rank 1 waits in it for rank 2."""
    buffers = make_ranks(1, 3)

    def first(buffer):
        mine = {0: [0], 1: [8], 2: [0]}[buffer.rank]  # rank 0 keeps its tokens, those of rank 1 go to rank 2
        return ep.dispatch(inputs(0)[0], [torch.tensor([mine] * T)], [torch.ones(T, 1)], buffer=buffer)

    rows = run_together(buffers, first)

    def then(buffer):
        mine = rows[buffer.rank]
        ep.combine(mine.x, mine.handle)
        dispatch(buffer)

    for error in run_together(buffers[:2], then):
        assert re.search(r": rank 2 has not entered (call|notify) 2 \(it finished 1\)\n", str(error)), error


def test_the_reason_reaches_all():
    buffers = make_ranks(2, 2, timeout=20)

    def work(buffer):
        if buffer.rank == 3:
            time.sleep(0.2)
            buffer.abort("the job restarts" + 600 * ".")
            buffer.abort("another reason")
        else:
            dispatch(buffer)

    for error in run_together(buffers, work)[:3]:
        assert isinstance(error, ep.EPAbortError) and str(error).startswith(
            "rank 3 was told to stop: the job restarts.."
        )


def test_the_first_reason_stays():
    buffers = make_ranks(1, 3)
    run_together(buffers[:2], dispatch)
    buffers[2].abort("too late")
    buffers[2]._group.refuse(reason="x is wrong")
    for buffer in buffers:
        with pytest.raises(ep.EPAbortError, match=r"timed out first, .*: rank 2 has not entered notify 1"):
            dispatch(buffer)


# ---- the blame alone


def status(rank, notify, transfer, inside=None, waits=(), **low_latency):
    """waits: (role, what for, peer, call or expected)."""
    entered = dict.fromkeys(
        ("notify", "transfer", *(f"{k}_{h}" for k in ("dispatch", "combine") for h in ("sent", "received"))), 0
    )
    entered |= {"notify": notify, "transfer": transfer, **low_latency}
    finished = entered | ({inside: entered[inside] - 1} if inside else {})
    incidents = [
        {"outcome": outcome, "role": role, "waiting_for": what, "peer": peer, "call": call, "expected": call}
        for outcome, role, what, peer, call in waits
    ]
    return blame.RankStatus(rank, entered, finished, incidents, "")


def waits(peer, role="receiver", outcome="timeout", what="a row in a ring between ranks of this node", call=5):
    return (outcome, role, what, peer, call)


def alive(rank):
    return None


def test_the_waits_of_others_are_followed_within_a_call():
    statuses = [
        status(0, 3, 5, "transfer", [waits(0), waits(1)]),
        status(1, 3, 5, "transfer", [waits(2, outcome="aborted")]),
        status(2, 3, 5, "transfer"),
        status(3, 3, 5),
    ]
    assert blame.root(0, statuses, alive) == "rank 2 is in call 5 and does not go on"
    stopped = {2: "is stopped"}.get
    assert blame.root(0, statuses, stopped).endswith("does not go on; the process of rank 2 is stopped")
    ended = {3: "has ended"}.get  # after it had done its part
    assert blame.root(0, statuses, ended) == "rank 2 is in call 5 and does not go on"


BLAMED = {  # statuses, processes that have ended, what rank 0 says
    "ranks that wait for each other": (
        [status(0, 3, 5, "transfer", [waits(1)]), status(1, 3, 5, "transfer", [waits(0)])],
        [],
        "rank 0, 1 wait for each other in call 5",
    ),
    "a ring that a rank with several waits closes": (
        [
            status(0, 3, 5, "transfer", [waits(1)]),
            status(1, 3, 5, "transfer", [waits(2)]),
            status(2, 3, 5, "transfer", [waits(1), waits(0)]),
        ],
        [],
        "rank 1, 2 wait for each other in call 5",
    ),
    "a rank out of reach": (
        [status(0, 3, 5, "transfer", [waits(4)])],
        [],
        "rank 4, of which no more is known here",
    ),
    "a rank in another kind of call": (
        [status(0, 4, 5, "notify", [waits(1, "notify")]), status(1, 3, 5, "transfer")],
        [],
        "rank 1 is in call 5 and does not go on",
    ),
    "an ended process, though others are late": (
        [status(0, 4, 5, "notify", [waits(1, "notify")]), status(1, 3, 5), status(2, 3, 5)],
        [2],
        "rank 2 has not entered notify 4 (it finished 3); the process of rank 2 has ended",
    ),
    "not a process that ended because of the failure": (
        [
            status(0, 3, 5, "transfer", [waits(1, outcome="aborted")]),
            status(1, 3, 5, "transfer"),
            status(2, 3, 5, "transfer", [waits(1, outcome="aborted")]),
        ],
        [1, 2],
        "rank 1 is in call 5 and does not go on; the process of rank 1 has ended",
    ),
}


@pytest.mark.parametrize(("statuses", "ended", "says"), BLAMED.values(), ids=BLAMED)
def test_who_is_blamed(statuses, ended, says):
    assert blame.root(0, statuses, dict.fromkeys(ended, "has ended").get) == says


@pytest.mark.parametrize("lead", [[], [0], [2, 0], [4, 0, 2]])
@pytest.mark.parametrize("ring", [[1, 3], [5, 3, 1], [3, 6, 1, 5]])
def test_who_only_waits_for_a_ring_does_not_belong_to_it(lead, ring):
    order = [*lead, *ring, ring[0]]
    following = dict(pairwise(order))
    statuses = [status(rank, 3, 5, "transfer", [waits(peer)]) for rank, peer in following.items()]
    says = f"rank {', '.join(map(str, sorted(ring)))} wait for each other in call 5"
    assert blame.root(order[0], statuses, alive) == says


def test_machines_of_which_nothing_was_heard_are_named_not_what_their_ranks_once_said():
    statuses = [
        status(0, 4, 5, "notify", [waits(1, "notify")]),
        status(1, 4, 5, "notify", [waits(2, "notify", outcome="aborted")]),
        status(2, 3, 5),
        status(3, 4, 5, "notify"),
    ]
    silent = {2: ("box1", 9.6), 3: ("box1", 9.8)}
    says = "nothing was heard from rank 2, 3 (box1) for 10 s: the network between, or that machine"
    assert blame.root(0, statuses, alive, silent.get) == says
    assert blame.root(0, statuses, {3: "has ended"}.get, silent.get).endswith("the process of rank 3 has ended")
    alone = blame.root(0, statuses, alive, (silent | {1: ("box0", 3.0)}).get)
    assert alone == says, "who reported is within reach"


def test_a_process_that_ended_is_not_waited_for():
    statuses = [status(0, 4, 5, "notify"), status(1, 3, 5), status(2, 4, 5), status(3, 3, 5, "transfer")]
    dead = dict.fromkeys(range(4), "has ended").get
    assert blame.ended(statuses[0], statuses, alive) is None
    says = "has not entered notify 4 (it finished 3); the process of rank 1 has ended"
    assert blame.ended(statuses[0], statuses, {1: "has ended"}.get) == f"rank 1 {says}"
    assert blame.ended(statuses[0], statuses, {1: "is stopped"}.get) is None, "it may go on"
    assert blame.ended(statuses[0], statuses, {2: "has ended"}.get) is None, "it had done its part"
    in_call = "rank 3 is in call 5 and does not go on; the process of rank 3 has ended"
    assert blame.ended(statuses[0], statuses, {3: "has ended"}.get) == in_call
    assert blame.ended(statuses[1], statuses, dead) is None, "it is in no call"


@pytest.mark.parametrize(
    ("role", "what", "counts", "says"),
    [
        ("low_latency_receiver", "a row in its slot", {}, "rank 1 has not sent low-latency dispatch 7 (it finished 0)"),
        (
            "low_latency_combine_sender",
            "a low-latency bank to be received",
            {"combine_sent": 6, "combine_received": 5},
            "rank 1 has not sent low-latency combine 7 (it finished 6)",
        ),
        ("one_hop_receiver", "a row in its slot", {}, "rank 1 has not entered call 7 (it finished 6)"),
        (
            "low_latency_combine_receiver",
            "rows that a warp puts through the network",
            {"combine_sent": 7},
            "rank 1 has done all of low-latency combine 7, but rank 0 misses it",
        ),
    ],
)
def test_low_latency(role, what, counts, says):
    statuses = [status(0, 0, 7, None, [waits(1, role, what=what, call=7)]), status(1, 0, 6, **counts)]
    assert blame.root(0, statuses, alive) == says

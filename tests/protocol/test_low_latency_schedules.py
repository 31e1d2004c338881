"""The low-latency mode under random interleavings and a network that delays and reorders."""

import random

import pytest
import torch
from repeats import a_third

import megatron_ep as ep
from megatron_ep import reference

SHAPES = [(2, 1), (2, 2), (3, 1), (1, 3), (3, 2)]
HIDDEN, MAX_TOKENS = 3, 6


def check_received(received, expected, counts, masked):
    for rank, rows in enumerate(received.x):
        assert torch.equal(received.recv_counts[rank], counts[rank].int())
        if masked:
            ours = torch.cat([part[:count] for part, count in zip(rows, counts[rank], strict=True)])
        else:
            ours = rows[: len(expected[rank])]
        assert torch.equal(ours, expected[rank])


def run_program(seed):
    """Sends of both kinds, each received now or later, in any order."""
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    nodes, ranks_per_node = SHAPES[seed % len(SHAPES)]
    world = nodes * ranks_per_node
    experts, masked = (1 + seed % 3) * world, seed % 2 == 0
    topk = min(3, experts)
    with ep.LocalCluster(nodes, ranks_per_node, ep.Config(num_experts=experts), seed=seed) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=MAX_TOKENS, hidden=HIDDEN, topk=topk, dtype=torch.float32)
        done, under_way = [], {"dispatch": [], "combine": []}

        def dispatch():
            tokens = [r.choice([0, 1, r.randint(0, MAX_TOKENS)]) for _ in range(world)]
            x = [torch.randint(-9, 10, (t, HIDDEN), generator=generator).float() for t in tokens]
            ids = [torch.rand(t, experts, generator=generator).topk(topk, dim=1).indices for t in tokens]
            received, hook = low_latency.dispatch(
                x, ids, layout="masked" if masked else "grouped", return_recv_hook=True
            )
            expected, _, counts = reference.dispatch(x, ids, [torch.ones(i.shape) for i in ids], experts)

            def receive():
                hook()
                check_received(received, expected, counts, masked)
                done.append((received, expected, ids))

            return receive

        def combine():
            received, expected, ids = r.choice(done)
            sums = reference.combine(expected, ids, experts)
            y, hook = low_latency.combine(
                received.x, received.handle, sum_at=r.choice(["token", "expert"]), return_recv_hook=True
            )

            def receive():
                hook()
                assert all(map(torch.equal, y, sums))

            return receive

        for _ in range(8):
            kind = r.choice(["dispatch", "combine"]) if done else "dispatch"
            calls = under_way[kind]
            if len(calls) == 2 and calls[0] is not None:
                calls[0]()
            under_way[kind] = [*calls[-1:], (dispatch if kind == "dispatch" else combine)()]
            for calls in under_way.values():
                for i, receive in enumerate(calls):
                    if receive is not None and r.random() < 0.3:
                        receive()
                        calls[i] = None
        for calls in under_way.values():
            for receive in filter(None, calls):
                receive()


@pytest.mark.parametrize("block", a_third(range(10)))
def test_any_interleaving(block):
    for seed in range(20 * block, 20 * (block + 1)):
        run_program(seed)


def one_call(lost_signal, seed, calls=1):
    """Two ranks, each a node, send each other tokens: who gets none waits for no rows."""
    with ep.LocalCluster(2, 1, ep.Config(num_experts=2), seed=seed, lost_signal=lost_signal) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=4, topk=1, dtype=torch.float32)
        x = [torch.ones(3, 4)] * 2
        ids = [torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)]
        for _ in range(calls):
            received = low_latency.dispatch(x, ids)
            low_latency.combine(received.x, received.handle)


# Of one dispatch, each of two ranks signals that its choices are there and that its rows are. It releases the bank with
# its next choices; only if these have left before it has received, by a signal of its own. The combine has no choices,
# and releases its bank by such signals.
CHOICES, ROWS = 2, 2
DISPATCH_SIGNALS, COMBINE_SIGNALS = CHOICES + ROWS, ROWS + 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", range(1, CHOICES + ROWS + 1))
def test_a_lost_signal_is_found(lost, seed):
    with pytest.raises(ep.EPTimeoutError) as caught:
        one_call(lost, seed)
    names = {(i["role"], i["waiting_for"]) for i in caught.value.incidents if i["outcome"] == "timeout"}
    choices = ("low_latency_receiver", "the experts that a rank's tokens chose")
    rows = ("low_latency_receiver", "rows that a warp puts through the network")
    assert names in ({choices}, {rows})


FIRST_RELEASE = DISPATCH_SIGNALS + ROWS + 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", [FIRST_RELEASE, DISPATCH_SIGNALS + COMBINE_SIGNALS])
def test_a_lost_release_is_found_two_calls_later(lost, seed):
    """Nobody needs it before."""
    one_call(lost, seed, calls=2)
    with pytest.raises(ep.EPTimeoutError, match="waited for a low-latency bank to be received from rank") as caught:
        one_call(lost, seed, calls=3)
    assert {i["role"] for i in caught.value.incidents if i["outcome"] == "timeout"} == {"low_latency_combine_sender"}


FIRST_OF_THE_THIRD = 2 * DISPATCH_SIGNALS + 2 + 1


@pytest.mark.parametrize("lost", range(FIRST_OF_THE_THIRD - 3, FIRST_OF_THE_THIRD + 1))
def test_choices_that_have_left_do_not_tell_a_release(lost):
    """Two dispatches are under way, so each rank tells the release of the first one by a signal. If the other rank
    waits for a signal that is lost, the next choices tell the same.
    """
    with ep.LocalCluster(2, 1, ep.Config(num_experts=2), seed=0, lost_signal=lost) as cluster:
        low_latency = ep.LowLatency(cluster, max_tokens=4, hidden=4, topk=1, dtype=torch.float32)
        x, ids = [torch.ones(3, 4)] * 2, [torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)]

        def three_dispatches():
            for _, receive in [low_latency.dispatch(x, ids, return_recv_hook=True) for _ in range(2)]:
                receive()
            low_latency.dispatch(x, ids)

        if lost in (FIRST_OF_THE_THIRD - 2, FIRST_OF_THE_THIRD - 1):
            three_dispatches()
        else:
            with pytest.raises(ep.EPTimeoutError, match="low_latency_receiver"):
                three_dispatches()


def test_same_seed_same_interleaving():
    def incidents(seed):
        with pytest.raises(ep.EPTimeoutError) as caught:
            one_call(CHOICES + 2, seed)
        return caught.value.incidents

    assert incidents(5) == incidents(5)

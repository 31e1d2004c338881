"""The protocols of both modes over a network that loses a signal. Random programs over one that delays and reorders are
in tests/csrc/fuzz.cpp."""

import contextlib

import pytest
import torch
from nightly import a_third

import megatron_ep as ep
from megatron_ep.errors import describe

SLOT = 6 * 16  # a row of 4 floats with K <= 2 on the wire


def one_way_traffic(lost_signal, seed):
    """Rank 0 sends 6 rows to rank 1 on another node through rings of one row, so that rows and credits alternate."""
    config = ep.Config(num_experts=2, tuning=ep.Tuning(nvl_ring_bytes=SLOT, rdma_ring_bytes=SLOT))
    cluster = ep.LocalCluster(2, 1, config, seed=seed, lost_signal=lost_signal)
    x = [torch.ones(6, 4), torch.ones(0, 4)]
    ids = [torch.ones(6, 1, dtype=torch.int64), torch.ones(0, 1, dtype=torch.int64)]
    ep.dispatch(x, ids, buffer=cluster)


# Signals 1 and 2 carry the counts; then each row is signalled, and its credit.
FIRST_ROW, FIRST_CREDIT = 3, 4


@pytest.mark.parametrize("seed", a_third(range(10)))
@pytest.mark.parametrize(
    ("lost", "role", "seen", "what"),
    [
        (FIRST_CREDIT, "rdma_sender", (0, 1, 0, 1, 2), "room in a network ring from rank 1"),
        (FIRST_ROW, "forwarder", (1, 0, 0, 0, 1), "a row in a network ring from rank 0"),
    ],
)
def test_a_lost_signal_of_a_row_or_its_credit_is_found(lost, role, seen, what, seed):
    with pytest.raises(ep.EPTimeoutError) as caught:
        one_way_traffic(lost, seed)
    [blocked] = [i for i in caught.value.incidents if i["role"] == role]
    assert tuple(blocked[name] for name in ("rank", "peer", "channel", "seen", "expected")) == seen
    assert f"{role}, channel 0" in describe(blocked) and what in describe(blocked)


@pytest.mark.parametrize("lost_signal", [1, 2])
def test_lost_counts_are_found(lost_signal):
    with pytest.raises(ep.EPTimeoutError, match="notify, channel 0, call 1: waited for counts from another node"):
        one_way_traffic(lost_signal, seed=0)


def test_same_seed_same_interleaving():
    def incidents(seed):
        with pytest.raises(ep.EPTimeoutError) as caught:
            one_way_traffic(FIRST_CREDIT + 4, seed)
        return caught.value.incidents

    assert incidents(5) == incidents(5)


# ---- the low-latency mode

# Two ranks, each a node, send each other tokens: who gets none waits for no rows.
X, IDS = [torch.ones(3, 4)] * 2, [torch.ones(3, 1, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)]


@contextlib.contextmanager
def low_latency_mode(lost_signal, seed):
    with ep.LocalCluster(2, 1, ep.Config(num_experts=2), seed=seed, lost_signal=lost_signal) as cluster:
        yield ep.LowLatency(cluster, max_tokens=4, hidden=4, topk=1, dtype=torch.float32)


def low_latency_calls(lost_signal, seed, calls=1):
    with low_latency_mode(lost_signal, seed) as mode:
        for _ in range(calls):
            received = mode.dispatch(X, IDS)
            mode.combine(received.x, received.handle)


# Of one dispatch, each of two ranks signals that its choices are there and that its rows are. It releases the bank with
# its next choices; only if these have left before it has received, by a signal of its own. The combine has no choices,
# and releases its bank by such signals.
CHOICES, ROWS = 2, 2
DISPATCH_SIGNALS, COMBINE_SIGNALS = CHOICES + ROWS, ROWS + 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", range(1, CHOICES + ROWS + 1))
def test_a_lost_signal_of_a_low_latency_dispatch_is_found(lost, seed):
    with pytest.raises(ep.EPTimeoutError) as caught:
        low_latency_calls(lost, seed)
    names = {(i["role"], i["waiting_for"]) for i in caught.value.incidents if i["outcome"] == "timeout"}
    choices = ("low_latency_receiver", "the experts that a rank's tokens chose")
    rows = ("low_latency_receiver", "rows that a warp puts through the network")
    assert names in ({choices}, {rows})


FIRST_RELEASE = DISPATCH_SIGNALS + ROWS + 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lost", [FIRST_RELEASE, DISPATCH_SIGNALS + COMBINE_SIGNALS])
def test_a_lost_release_is_found_two_calls_later(lost, seed):
    """Nobody needs it before."""
    low_latency_calls(lost, seed, calls=2)
    with pytest.raises(ep.EPTimeoutError, match="waited for a low-latency bank to be received from rank") as caught:
        low_latency_calls(lost, seed, calls=3)
    assert {i["role"] for i in caught.value.incidents if i["outcome"] == "timeout"} == {"low_latency_combine_sender"}


FIRST_OF_THE_THIRD = 2 * DISPATCH_SIGNALS + 2 + 1


@pytest.mark.parametrize("lost", range(FIRST_OF_THE_THIRD - 3, FIRST_OF_THE_THIRD + 1))
def test_choices_that_have_left_do_not_tell_a_release(lost):
    """Two dispatches are under way, so each rank tells the release of the first one by a signal. If the other rank
    waits for a signal that is lost, the next choices tell the same.
    """
    with low_latency_mode(lost, 0) as mode:

        def three_dispatches():
            for _, receive in [mode.dispatch(X, IDS, return_recv_hook=True) for _ in range(2)]:
                receive()
            mode.dispatch(X, IDS)

        if lost in (FIRST_OF_THE_THIRD - 2, FIRST_OF_THE_THIRD - 1):
            three_dispatches()
        else:
            with pytest.raises(ep.EPTimeoutError, match="low_latency_receiver"):
                three_dispatches()

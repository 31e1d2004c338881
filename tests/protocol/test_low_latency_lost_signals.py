"""The low-latency mode over a network that loses a signal. Random programs over one that delays and reorders are in
tests/csrc/fuzz.cpp."""

import pytest
import torch

import megatron_ep as ep


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

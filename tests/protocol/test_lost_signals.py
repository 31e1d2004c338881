"""The protocol over a network that loses a signal. Random programs over one that delays and reorders are in
tests/csrc/fuzz.cpp."""

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
def test_lost_credit_is_found(seed):
    with pytest.raises(ep.EPTimeoutError) as caught:
        one_way_traffic(FIRST_CREDIT, seed)
    blocked = [i for i in caught.value.incidents if i["role"] == "rdma_sender"]
    assert [(i["rank"], i["peer"], i["channel"], i["seen"], i["expected"]) for i in blocked] == [(0, 1, 0, 1, 2)]
    text = describe(blocked[0])
    assert "rdma_sender, channel 0" in text and "room in a network ring from rank 1" in text


@pytest.mark.parametrize("seed", a_third(range(10)))
def test_lost_row_signal_is_found(seed):
    with pytest.raises(ep.EPTimeoutError) as caught:
        one_way_traffic(FIRST_ROW, seed)
    blocked = [i for i in caught.value.incidents if i["role"] == "forwarder"]
    assert [(i["rank"], i["peer"], i["seen"], i["expected"]) for i in blocked] == [(1, 0, 0, 1)]


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

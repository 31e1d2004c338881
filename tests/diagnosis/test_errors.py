"""What an error says: the cause in a few lines, however many waited."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep.errors import by_cause, describe, summarize


def incident(role, outcome="timeout", rank=0, channel=0):
    where = {"role": role, "outcome": outcome, "rank": rank, "channel": channel, "call": 7}
    return where | {"waiting_for": "a row", "peer": 1, "seen": 12, "expected": 13}


def test_the_likeliest_cause_comes_first():
    receivers = [incident("receiver", channel=channel) for channel in range(3)]
    told = [incident("forwarder", outcome="aborted"), incident("sender", rank=1)]
    stuck = incident("sender", channel=2)
    ordered = by_cause([*told, *receivers, stuck], first_rank=0)
    assert ordered[0] == stuck and ordered[1:4] == receivers and ordered[-1] == told[0]


def test_few_lines_say_all():
    incidents = [incident("sender"), *[incident("receiver")] * 24, incident("forwarder")]
    lines = [describe(incidents[0]), "and 25 others that waited, see the error's incidents: 24 receiver, 1 forwarder"]
    assert summarize(incidents) == lines
    assert summarize(incidents[:2])[1] == "and another that waited, see the error's incidents: 1 receiver"
    assert summarize(incidents[:1]) == lines[:1] and summarize([]) == []


def test_an_error_has_all_incidents_and_a_short_text():
    config = ep.Config(num_experts=4, tuning=ep.Tuning(channels=8, nvl_ring_bytes=2 << 10, rdma_ring_bytes=2 << 10))
    cluster = ep.LocalCluster(2, 2, config, seed=0, lost_signal=9)
    x = [torch.ones(64, 256) for _ in range(4)]
    ids = [torch.arange(64).unsqueeze(1) % 4 for _ in range(4)]
    with pytest.raises(ep.EPTimeoutError) as caught:
        ep.dispatch(x, ids, [torch.ones(64, 1)] * 4, buffer=cluster)
    assert len(caught.value.incidents) > 4 and len(str(caught.value).splitlines()) == 4, str(caught.value)
    assert describe(caught.value.incidents[0]) in str(caught.value)

"""`megatron-ep bench network`: what plain TCP and puts carry. Its records: tests/network/test_network_trial.py."""

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ep.bench import layer, network
from megatron_ep.bench.local_ranks import LocalRanks
from megatron_ep.bench.plain_tcp import PlainTcp
from megatron_ep.errors import EPError
from megatron_ep.fabrics.network_trial import NetworkTrial
from megatron_ep.fabrics.tcp import MAX_STRIPES
from megatron_ep.meeting import processes
from megatron_ep.meeting.rendezvous import StoreRendezvous

W = 3


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 30) as ranks:
        yield ranks


def run_with_one_that_has_gone() -> list[str]:
    rendezvous = StoreRendezvous(None, timedelta(seconds=20))
    rank, texts = rendezvous.rank, []
    with PlainTcp(rendezvous, (rank + 1) % W, (rank - 1) % W) as plain:
        if rank == 1:
            for step in (lambda: plain.stream(100), lambda: plain.ping(8, 1, begins=False)):
                with pytest.raises(EPError) as caught:
                    step()
                texts.append(str(caught.value))
        elif rank == 2:
            rendezvous.barrier()  # or its end breaks what rank 1 sends
    if rank != 2:
        rendezvous.barrier()
    return texts


def test_a_peer_that_has_gone_is_named(ranks):
    assert ranks.run(run_with_one_that_has_gone) == [[], ["rank 0 closed its connection"] * 2, []]


def run_others() -> tuple[int, int, list[int], list[int]]:
    """The bytes that the benchmark notes of this rank, that it sends, in streams, and in a channel's puts."""
    case = layer.Case(W, 1, "bf16", tokens=40, hidden=16, topk=2, experts=6)
    streamed, put = [], []

    def measure(_case, _beside_megatron, _warmup, _iterations, others):
        for dispatch, combine in others.values():
            combine(dispatch())
        return layer.Measured(0, {})

    def stream(_plain, *sizes):
        streamed.extend(sizes)

    def exchange(_trial, _targets, _sources, size, _timeout):
        put.append(size)

    with (
        mock.patch.object(processes, "machine", lambda: f"machine {dist.get_rank()}"),
        mock.patch.object(layer, "measure", measure),
        mock.patch.object(PlainTcp, "stream", stream),
        mock.patch.object(NetworkTrial, "exchange", exchange),
        mock.patch.multiple(network, PINGS=2, IDLE_S=0.01),
    ):
        measured = network.measure(case, ["a", "b", "c"], warmup=1, iterations=1, sizes=[8], timeout=20.0)
    from_here = network._crossing_bytes(case, network.Topology(W, 1), dist.get_rank())
    return measured.layer.size, from_here, streamed, put


def test_plain_tcp_and_puts_carry_the_bytes_that_the_records_say(ranks):
    noted, sent, streamed, put = zip(*ranks.run(run_others), strict=True)
    assert len(set(sent)) > 1, "ranks send different amounts"
    mean = round(sum(sent) / W)
    assert noted == (mean,) * W
    assert {size for of_rank in streamed for size in of_rank} == {mean}
    assert {size for of_rank in put for size in of_rank} == {-(-mean // MAX_STRIPES)}

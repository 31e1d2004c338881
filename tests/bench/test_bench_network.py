"""`megatron-ep bench` between machines: what plain TCP carries, and its records."""

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ep import megatron as megatron_side
from megatron_ep.errors import EPError
from megatron_ep.meeting import processes
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.bench import layer
from megatron_ep.tools.bench.plain_tcp import PlainTcp
from megatron_ep.tools.bench.report import Report

W = 3
CASE = layer.Case(W, 1, "bf16", tokens=40, hidden=16, topk=2, experts=6)


def run_with_one_that_has_gone() -> list[str]:
    rendezvous = StoreRendezvous(None, timedelta(seconds=20))
    rank, texts = rendezvous.rank, []
    with PlainTcp(rendezvous, (rank + 1) % W, (rank - 1) % W) as plain:
        if rank == 1:
            with pytest.raises(EPError) as caught:
                plain.exchange(100)
            texts.append(str(caught.value))
        elif rank == 2:
            rendezvous.barrier()  # or its end breaks what rank 1 sends
    if rank != 2:
        rendezvous.barrier()
    return texts


def test_a_peer_that_has_gone_is_named(ranks):
    assert ranks.run(run_with_one_that_has_gone) == [[], ["rank 0 closed its connection"], []]


def run_bench() -> tuple[layer.Measured, int, list[int]]:
    """What this rank measures, the bytes that it sends to others, and those of each exchange over plain TCP."""
    exchanged, exchange = [], PlainTcp.exchange

    def count(plain, size):
        exchanged.append(size)
        exchange(plain, size)

    with (
        mock.patch.object(processes, "machine", lambda: f"machine {dist.get_rank()}"),
        mock.patch.object(PlainTcp, "exchange", count),
    ):
        measured = layer.measure(CASE, megatron_side.is_installed(), 1, 2, tcp_timeout=100.0)
    return measured, layer.crossing_bytes(CASE, dist.get_rank()), exchanged


def test_plain_tcp_carries_the_bytes_that_the_records_say(ranks, tmp_path, capsys):
    by_rank, sent, exchanged = zip(*ranks.run(run_bench), strict=True)
    assert len(set(sent)) > 1, "ranks send different amounts"
    mean = round(sum(sent) / W)
    assert 0 < mean <= 40 * 2 * 16 * 2, "a token once for each other node that it goes to"
    assert [measured.size for measured in by_rank] == [mean] * W
    assert {size for of_rank in exchanged for size in of_rank} == {mean}
    report = Report(tmp_path / "bench.json")
    layer.add(report, CASE, by_rank, crosses=True)
    text = capsys.readouterr().out
    names = {"ours", "plain_tcp"} | ({"megatron_alltoall"} if megatron_side.is_installed() else set())
    assert all(name in text for name in names)
    assert names <= {record["implementation"] for record in report.records}

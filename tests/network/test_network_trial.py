"""What is sent over a network to try it: it arrives, it is looked at, and every wait ends. The machines are this one,
under several names."""

import socket
import time
from datetime import timedelta
from unittest import mock

import pytest
from run_on import run_on

from megatron_ep.errors import EPError
from megatron_ep.fabrics import tcp
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.network.trial import NetworkTrial

W = 3


def meet() -> tuple[StoreRendezvous, int, list[int]]:
    rendezvous = StoreRendezvous(None, timedelta(seconds=20))
    return rendezvous, rendezvous.rank, [rank for rank in range(W) if rank != rendezvous.rank]


@run_on("ranks")
def test_loads_arrive_as_they_were_sent() -> None:
    rendezvous, rank, others = meet()
    with NetworkTrial(rendezvous, ["a", "b", "c"], channels=2, max_bytes=1000) as trial:
        assert trial.others == others
        for _ in range(2):
            if rank < 2:
                halves = trial.ping(1 - rank, begins=rank == 0, size=1 + 998 * rank, rounds=20, timeout=20)
                assert len(halves) == 20 and min(halves) > 0
            one_way = ([1], []) if rank == 0 else ([], [0]) if rank == 1 else ([], [])
            assert trial.exchange(*one_way, 12345, 20) > 0
            assert trial.exchange(others, others, 0, 20, puts=300, seed=7) > 0
        rendezvous.barrier()


@run_on("ranks")
def test_wrong_bytes_are_found() -> None:
    rendezvous, rank, others = meet()
    with NetworkTrial(rendezvous, ["a", "b", "c"]) as trial:
        with pytest.raises(EPError, match=r"put 0 of rank .* is not what was sent"):
            trial.exchange(others, others, 0, 20, puts=5, seed=rank)
        rendezvous.barrier()


@run_on("ranks")
def test_who_does_not_take_part_is_named_in_time() -> None:
    rendezvous, rank, others = meet()
    says = "^rank 2 did not take what was put in channel 0, rank 2 did not put all in channel 0"
    with NetworkTrial(rendezvous, ["a", "b", "c"]) as trial:
        if rank < W - 1:
            start = time.monotonic()
            with pytest.raises(EPError, match=says):
                trial.exchange(others, others, 1 << 20, 0.5)
            assert time.monotonic() - start < 15
        rendezvous.barrier()


@run_on("ranks")
def test_a_connection_that_breaks_is_named() -> None:
    rendezvous, rank, others = meet()
    connect_all, connections = tcp._connect_all, []

    def keep(*arguments):
        made = connect_all(*arguments)
        connections.extend(connection.dup() for connection in made.values())
        return made

    with mock.patch.object(tcp, "_connect_all", keep):
        trial = NetworkTrial(rendezvous, ["a", "b", "c"])
    if rank == W - 1:
        for connection in connections:  # one right after the other, or it tells over one that the other is lost
            connection.shutdown(socket.SHUT_RDWR)
    for connection in connections:
        connection.close()
    if rank < W - 1:
        with pytest.raises(EPError, match=f"^the connection to rank {W - 1} broke$"):
            trial.exchange(others, others, 1 << 20, 20)
    rendezvous.barrier()
    trial.close()

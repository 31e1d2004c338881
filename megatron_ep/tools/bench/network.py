"""`megatron-ep bench network`: host ranks of several machines, under torchrun or in a Slurm job step.

A run times in turns: dispatch and combine as in `megatron-ep bench`, Megatron's all-to-all over gloo, and the bytes
between machines over plain TCP connections, in both directions in parallel ("plain_tcp"). Bytes are the mean that a
rank sends to other nodes, a token once for each of them. T tokens on this rank, H hidden, E experts, top-k K.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta
from statistics import fmean

import torch

from megatron_ep import megatron as megatron_side
from megatron_ep.config import Topology
from megatron_ep.errors import EPError
from megatron_ep.fabrics import tcp
from megatron_ep.meeting import job, nodes
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.arguments import add_rounds, add_sizes, add_tokens, require_topk, seconds
from megatron_ep.tools.bench import layer
from megatron_ep.tools.bench.report import EXTREMES, RATE, WHAT, Report, relative
from megatron_ep.tools.job_ranks import JobRanks


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    arguments = _parse(argv)
    if not job.adopt():
        raise ValueError("network: start it under torchrun or srun, a process a rank")
    with JobRanks(arguments.timeout) as ranks:
        topology = ranks.topology
        machines = len(set(ranks.machines))
        if machines < 2:
            raise ValueError(f"network: all {ranks.world_size} ranks are on one machine")
        if topology.nodes != machines:
            raise ValueError(f"{nodes.VARIABLE} makes {topology.nodes} nodes of {machines} machines")
        if arguments.experts % ranks.world_size:
            raise ValueError(f"--experts is {arguments.experts}, must be a multiple of {ranks.world_size} ranks")
        report = Report(arguments.json, ranks.rank)
        if not megatron_side.is_installed():
            report.say("\nmegatron_alltoall skipped: megatron-core is not installed")
        sizes = (arguments.tokens, arguments.hidden, arguments.topk, arguments.experts)
        for dtype in arguments.dtype:
            case = layer.Case(topology.nodes, topology.ranks_per_node, dtype, *sizes)
            by_rank = ranks.run(measure, case, arguments.warmup, arguments.iters, arguments.timeout)
            add(report, case, by_rank)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("megatron-ep bench network", description=(__doc__ or "").partition("\n\n")[2])
    add_tokens(parser)
    add_sizes(parser, hidden=2048, experts=64)
    parser.add_argument("--dtype", nargs="+", choices=layer.DTYPES, default=["bf16"], help="(bf16)")
    add_rounds(parser, warmup=2, iters=5)
    parser.add_argument("--timeout", type=seconds, default=300.0, metavar="S", help="limit of a wait (%(default)s s)")
    arguments = parser.parse_args(argv)
    require_topk(parser, arguments)
    return arguments


def measure(case: layer.Case, warmup: int, iterations: int, timeout: float) -> layer.Measured:
    """Runs on every rank of a gloo world. timeout: limit of a wait in seconds."""
    topology = Topology(case.nodes, case.ranks_per_node)
    rendezvous = StoreRendezvous(None, timedelta(seconds=timeout))
    rank, world = rendezvous.rank, rendezvous.world_size
    to, source = (rank + topology.ranks_per_node) % world, (rank - topology.ranks_per_node) % world
    size = round(fmean(rendezvous.gather(_crossing_bytes(case, topology, rank))))
    with PlainTcp(rendezvous, to, source) as plain:

        def run_dispatch() -> torch.Tensor:
            plain.exchange(size)
            return torch.empty(0)

        def run_combine(rows: torch.Tensor) -> torch.Tensor:
            plain.exchange(size)
            return rows

        others = {"plain_tcp": (run_dispatch, run_combine)}
        timed = layer.measure(case, megatron_side.is_installed(), warmup, iterations, others)
    return layer.Measured(size, timed.seconds)


class PlainTcp:
    """A connection to the rank `to` and one from the rank `source`, to measure what a network gives to a program.
    Collective: each rank is the source of the rank that it sends to. A context manager."""

    def __init__(self, rendezvous: StoreRendezvous, to: int, source: int) -> None:
        limit = rendezvous.timeout.total_seconds()
        with tcp.listen() as listener, contextlib.ExitStack() as made:
            address, port = listener.getsockname()[:2]
            addresses = rendezvous.gather((address, port), kind=tuple[str, int])
            listener.settimeout(limit)
            self._out = made.enter_context(socket.create_connection(addresses[to], limit))
            self._in = made.enter_context(listener.accept()[0])
            self._in.settimeout(limit)
            self._stack = made.pop_all()
        self._source = source

    def exchange(self, size: int) -> None:
        """Sends and receives `size` bytes in parallel. Raises EPError if the source has closed its connection."""
        sent, received = memoryview(bytearray(1 << 20)), memoryview(bytearray(1 << 20))

        def send() -> None:
            left = size
            while left:
                left -= self._out.send(sent[:left])

        sender = threading.Thread(target=send)
        sender.start()
        left = size
        while left:
            got = self._in.recv_into(received[:left])
            if not got:
                raise EPError(f"rank {self._source} closed its connection")
            left -= got
        sender.join()

    def __enter__(self) -> PlainTcp:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _crossing_bytes(case: layer.Case, topology: Topology, rank: int) -> int:
    x, _, topk_idx = layer.draw(case)
    nodes = topk_idx // (case.experts // topology.nodes)
    own = rank // topology.ranks_per_node
    rows = sum(int((nodes == node).any(dim=1).sum()) for node in range(topology.nodes) if node != own)
    return rows * x.shape[1] * x.itemsize


def add(report: Report, case: layer.Case, by_rank: Sequence[layer.Measured]) -> None:
    records = layer.records_of(case, by_rank)
    title = f"{case}: a rank sends {records[0]['bytes'] / 1e6:.1f} MB to other nodes"
    report.add(title, records, WHAT | EXTREMES | RATE | relative("/ ours", "ours", records))

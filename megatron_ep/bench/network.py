"""`megatron-ep bench network`: host ranks of several machines, under torchrun or in a Slurm job step.

In one run, in turns: dispatch and combine as in `megatron-ep bench`, beside Megatron's all-to-all over gloo; the bytes
that must cross between machines over plain TCP connections, both ways at once ("plain_tcp"), and the same bytes in puts
of 64 KiB with signals and credits, over one connection ("puts") and over several ("puts_2_stripes", "puts_4_stripes").
A rank's bytes are those that it sends to ranks of other nodes, on average: a token once for each node that it goes to.
Then half a round trip of a put and its signal beside a plain message of the same size, and what a rank's thread for the
network takes of a core while nobody sends. T tokens on this rank, H hidden, E experts, top-k K.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

import torch

from megatron_ep import megatron as megatron_side
from megatron_ep.bench import layer
from megatron_ep.bench.arguments import add_rounds, add_sizes, add_tokens, positive, require_topk, seconds
from megatron_ep.bench.job_ranks import JobRanks
from megatron_ep.bench.network_thread import NetworkThread
from megatron_ep.bench.plain_tcp import PlainTcp
from megatron_ep.bench.report import EXTREMES, PERCENTILES, RATE, WHAT, Record, Report, make_record, relative
from megatron_ep.config import Topology
from megatron_ep.fabrics.network_trial import MAX_PUT_BYTES, NetworkTrial
from megatron_ep.fabrics.tcp import MAX_STRIPES
from megatron_ep.meeting import job, nodes
from megatron_ep.meeting.rendezvous import StoreRendezvous

IDLE_S = 2.0  # that nobody sends
SEVERAL = (2, MAX_STRIPES)  # connections, beside one
PINGS = 1000  # of a round
Halves = dict[str, dict[int, list[float]]]  # seconds by implementation and size


@dataclass(frozen=True)
class Measured:
    """What a rank timed."""

    layer: layer.Measured
    halves: Halves  # of the rank that begins
    idle: float  # seconds of a core in a second


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    arguments = _parse(argv)
    if not job.adopt():
        print("megatron-ep bench network: start it under torchrun or srun, a process a rank", file=sys.stderr)
        return 2
    with JobRanks(arguments.timeout) as ranks:
        topology = ranks.topology
        machines = len(set(ranks.machines))
        if machines < 2:
            print(f"megatron-ep bench network: all {ranks.world_size} ranks are on one machine", file=sys.stderr)
            return 2
        if topology.nodes != machines:
            print(f"{nodes.VARIABLE} makes {topology.nodes} nodes of {machines} machines", file=sys.stderr)
            return 2
        if arguments.experts % ranks.world_size:
            print(f"--experts is {arguments.experts}, must be a multiple of {ranks.world_size} ranks", file=sys.stderr)
            return 2
        report = Report(arguments.json, ranks.rank)
        if not megatron_side.is_installed():
            report.say("\nmegatron_alltoall skipped: megatron-core is not installed")
        sizes = (arguments.tokens, arguments.hidden, arguments.topk, arguments.experts)
        for dtype in arguments.dtype:
            case = layer.Case(topology.nodes, topology.ranks_per_node, dtype, *sizes)
            by_rank = ranks.run(
                measure, case, ranks.machines, arguments.warmup, arguments.iters, arguments.size, arguments.timeout
            )
            add(report, case, by_rank)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("megatron-ep bench network", description=(__doc__ or "").partition("\n\n")[2])
    add_tokens(parser)
    add_sizes(parser, hidden=2048, experts=64)
    parser.add_argument("--dtype", nargs="+", choices=layer.DTYPES, default=["bf16"], help="(bf16)")
    parser.add_argument(
        "--size", nargs="+", type=positive, default=[8, 1024, 16384], help="bytes of round trips (%(default)s)"
    )
    add_rounds(parser, warmup=2, iters=5)
    parser.add_argument("--timeout", type=seconds, default=300.0, metavar="S", help="limit of a wait (%(default)s s)")
    arguments = parser.parse_args(argv)
    require_topk(parser, arguments)
    if max(arguments.size) > MAX_PUT_BYTES:
        parser.error(f"--size {max(arguments.size)} is over {MAX_PUT_BYTES}")
    return arguments


def measure(
    case: layer.Case, machines: Sequence[str], warmup: int, iterations: int, sizes: Sequence[int], timeout: float
) -> Measured:
    """Runs on every rank of a gloo world. sizes: bytes of round trips. timeout: of a wait, seconds."""
    topology = Topology(case.nodes, case.ranks_per_node)
    rendezvous = StoreRendezvous(None, timedelta(seconds=timeout))
    rank, world = rendezvous.rank, rendezvous.world_size
    to, source = (rank + topology.ranks_per_node) % world, (rank - topology.ranks_per_node) % world
    size = round(fmean(rendezvous.gather(_crossing_bytes(case, topology, rank))))
    join = functools.partial(NetworkTrial, rendezvous, machines, channels=MAX_STRIPES)
    with join(stripes=1) as trial:
        with contextlib.ExitStack() as stack, PlainTcp(rendezvous, to, source) as plain:
            trials = {1: trial} | {stripes: stack.enter_context(join(stripes=stripes)) for stripes in SEVERAL}
            others = {"plain_tcp": _there_and_back(lambda: plain.stream(size))}
            of_channel = -(-size // MAX_STRIPES)
            for stripes, striped in trials.items():
                step = functools.partial(striped.exchange, [to], [source], of_channel, timeout)
                others["puts" if stripes == 1 else f"puts_{stripes}_stripes"] = _there_and_back(step)
            timed = layer.measure(case, megatron_side.is_installed(), warmup, iterations, others)
        pair = {0: topology.ranks_per_node, topology.ranks_per_node: 0}  # those that exchange messages
        with PlainTcp(rendezvous, pair.get(rank), pair.get(rank)) as plain:
            halves: Halves = {"puts": {}, "plain_tcp": {}}
            for message in sizes:
                for name, of_size in halves.items():
                    rendezvous.barrier()
                    if rank not in pair:
                        continue
                    rounds, begins = (warmup + iterations) * PINGS, rank == 0
                    if name == "puts":
                        found = trial.ping(pair[rank], begins=begins, size=message, rounds=rounds, timeout=timeout)
                    else:
                        found = plain.ping(message, rounds, begins=begins)
                    of_size[message] = found[warmup * PINGS :]
        rendezvous.barrier()
        thread = NetworkThread()
        time.sleep(IDLE_S)
        idle = thread.share()
        rendezvous.barrier()
    return Measured(layer.Measured(size, timed.seconds), halves, idle)


def _crossing_bytes(case: layer.Case, topology: Topology, rank: int) -> int:
    x, _, topk_idx = layer.draw(case)
    nodes = topk_idx // (case.experts // topology.nodes)
    own = rank // topology.ranks_per_node
    rows = sum(int((nodes == node).any(dim=1).sum()) for node in range(topology.nodes) if node != own)
    return rows * x.shape[1] * x.itemsize


def _there_and_back(step: Callable[[], object]) -> layer.Steps:
    """Returns the step for the bytes of dispatch and for those of combine."""

    def run_dispatch() -> torch.Tensor:
        step()
        return torch.empty(0)

    def run_combine(rows: torch.Tensor) -> torch.Tensor:
        step()
        return rows

    return run_dispatch, run_combine


def add(report: Report, case: layer.Case, by_rank: Sequence[Measured]) -> None:
    records = layer.records_of(case, [rank.layer for rank in by_rank])
    title = f"{case}: a rank sends {records[0]['bytes'] / 1e6:.1f} MB to other nodes"
    report.add(title, records, WHAT | EXTREMES | RATE | relative("/ ours", "ours", records))
    pings: list[Record] = [
        make_record(case, f"{size} bytes", name, found, size)
        for size in by_rank[0].halves["puts"]
        for name, found in ((name, of_size[size]) for name, of_size in by_rank[0].halves.items())
    ]
    report.add("half a round trip", pings, WHAT | PERCENTILES | relative("/ plain", "plain_tcp", pings))
    idle = max(rank.idle for rank in by_rank)
    report.say(f"\nwhile nothing is sent, a rank's network thread takes {100 * idle:.2f} % of a core")
    report.keep([make_record(case, "idle", "thread", [rank.idle for rank in by_rank], 0)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

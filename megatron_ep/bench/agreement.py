"""`megatron-ep bench agreement`: what a step costs to look for failed calls before it (`megatron.agreement`).

Each rank is a process with one thread and one open buffer. `checks` is the look alone; `reduces` is a reduction of one
number over the ranks, which such a look would cost if the ranks waited for each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.bench.arguments import add_rounds, positive
from megatron_ep.bench.local_ranks import LocalRanks
from megatron_ep.bench.report import EXTREMES, WHAT, Report, make_record
from megatron_ep.bench.timing import host_timer, time_rounds


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    parser = argparse.ArgumentParser("megatron-ep bench agreement", description="Times what is asked before a step.")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4], metavar="W", help="(2 4)")
    add_rounds(parser, warmup=20, iters=200)
    arguments = parser.parse_args(argv)
    if not megatron_side.is_installed():
        parser.error("needs megatron-core: pip install 'megatron_ep[megatron]'")
    report = Report(arguments.json)
    for world_size in arguments.ranks:
        with LocalRanks(world_size) as ranks:
            by_rank = ranks.run(measure, arguments.warmup, arguments.iters)
        case = f"{world_size} ranks"
        records = [
            make_record(case, "before a step", name, [median(rank[name]) for rank in by_rank], 0, ranks=world_size)
            for name in by_rank[0]
        ]
        report.add(case, records, WHAT | EXTREMES)
    return 0


def measure(warmup: int, iterations: int) -> dict[str, list[float]]:
    """Seconds [iterations] by name, on one rank of a gloo world."""
    from megatron_ep.megatron.agreement import check

    flag = torch.zeros(1)

    with ep.Buffer(dist.group.WORLD, ep.Config(num_experts=dist.get_world_size())):
        timers = {
            "checks": host_timer(check, before=dist.barrier),
            "reduces": host_timer(lambda: dist.all_reduce(flag), before=dist.barrier),
        }
        return time_rounds(timers, warmup, iterations)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))

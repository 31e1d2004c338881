"""`megatron-ep check`: gradients, the specification, and Megatron's own dispatcher, by processes of this machine or by
the ranks of a job, over the network that their buffers take."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

import torch.distributed as dist

from megatron_ep import megatron as megatron_side
from megatron_ep.cli import checks
from megatron_ep.errors import EPError
from megatron_ep.meeting import job
from megatron_ep.tools.arguments import positive, seconds
from megatron_ep.tools.job_ranks import JobRanks
from megatron_ep.tools.local_ranks import LocalRanks

TIMEOUT = 60.0  # seconds of one wait
LOCAL_RANKS, LOCAL_TIMEOUT = 4, 300.0  # seconds of one check on this machine, the first of which starts the ranks


def main(argv: Sequence[str]) -> int:
    """Prints a line for each check, on rank 0; returns 1 if one failed, on all ranks."""
    parser = argparse.ArgumentParser(
        "megatron-ep check",
        description="Checks gradients, equality with the specification, and equality with Megatron's own dispatchers "
        "on this machine; under torchrun or in a Slurm job step between the ranks of the job, on any number of "
        "machines, and on their GPUs where each has one. Takes about half a minute.",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=TIMEOUT, metavar="S", help="in a job: of each wait (%(default)s s)"
    )
    network = parser.add_argument_group(
        "network", "Instead: every pair of machines of a job, under torchrun or in a Slurm job step, without GPUs."
    )
    network.add_argument("--network", action="store_true", help="status 1 if a link fails, loses packets or is slow")
    network.add_argument(
        "--ranks", type=positive, metavar="W", help="without a launcher: of this machine, each as a machine (3)"
    )
    arguments = parser.parse_args(argv)
    if arguments.ranks is not None and not arguments.network:
        parser.error("--ranks goes with --network")
    try:
        is_rank = job.adopt()
        if arguments.network:
            return _check_network(is_rank, arguments.ranks, arguments.timeout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's and gloo's, on every rank
            if is_rank:
                with JobRanks(arguments.timeout, device=None) as ranks:
                    return _check_all(ranks, arguments.timeout)
            with LocalRanks(LOCAL_RANKS, LOCAL_TIMEOUT) as local_ranks:
                return _check_all(local_ranks, TIMEOUT)
    except (EPError, dist.DistError) as error:
        print(f"megatron-ep check: {error}", file=sys.stderr)
        return 1


def _check_network(is_rank: bool, ranks: int | None, timeout: float) -> int:
    from megatron_ep.tools.network import main as network

    if not is_rank:
        return network.main_of_machine(ranks or 3, timeout)
    if ranks is not None:
        raise ValueError("--ranks: the launcher has started them")
    return network.main_of_rank(timeout)


def _check_all(ranks: checks.Ranks, timeout: float) -> int:
    def say(text: str) -> None:
        if ranks.rank == 0:
            print(text, flush=True)

    failed, started = 0, time.perf_counter()
    for name, check in checks.checks_of(ranks, timeout):
        begun = time.perf_counter()
        try:
            outcome, detail = "pass", check()
        except Exception as error:
            if isinstance(ranks, JobRanks) and isinstance(error, EPError):  # these ranks have lost each other
                raise
            outcome, detail = "FAIL", f"{type(error).__name__}: {error}"
            failed += 1
        say(f"{outcome}  {name:68} {time.perf_counter() - begun:6.1f} s  {detail}")
        if failed and name == checks.BUFFER:
            break  # the others need one, and would wait as long again
    if not megatron_side.is_installed():
        say("skipped: megatron-core is not installed, so there is nothing of Megatron's to compare with")
    say(f"{f'{failed} failed' if failed else 'all passed'} in {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0

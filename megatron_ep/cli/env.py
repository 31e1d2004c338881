"""`megatron-ep env`: what this installation found; with --all-ranks, in what the ranks of a job differ; with --plan,
what a buffer would be made of."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from megatron_ep.diagnosis import env

PATIENCE_S = 120.0  # for a rank that does not report: its node may still be starting
GOODBYE_S = 10.0
LIMIT_S = PATIENCE_S + 3 * GOODBYE_S  # for all calls of the store, of which some have no bound

# Facts of a report that have to be the same on all ranks, or results, speed or the set-up itself would suffer.
MATTERING = {
    "system": ("python", "network cards"),
    "packages": env.PACKAGES,
    "cuda": ("gpus", "fabrics"),
    "extension": ("imports", "build"),
}
# Facts that may differ between ranks, and often explain a problem.
TELLING = {"system": ("cpu", "platform"), "memory": ("total", "huge pages in /dev/shm"), "cuda": ("nvcc",)}
MATTERING_VARIABLES = ("MEGATRON_EP_",)
TELLING_VARIABLES = ("NCCL_", "NVSHMEM_", "UCX_", "GLOO_", "CUDA_DEVICE_", "LD_", "OMP_", "PYTHONPATH")

Facts = dict[str, str]


def main(argv: Sequence[str]) -> int:
    """Prints the report; with --all-ranks rank 0 prints the comparison. Returns 1 if ranks differ in what matters."""
    parser = argparse.ArgumentParser("megatron-ep env", description="Prints what this installation found.")
    parser.add_argument(
        "--all-ranks",
        action="store_true",
        help="under torchrun or in a Slurm job step: compare versions, GPUs, network cards and fabrics of all ranks; "
        "status 1 if they differ in what matters",
    )
    plan = parser.add_argument_group("plan", "What a buffer on GPUs would take, a process a GPU. Needs no GPU.")
    plan.add_argument("--plan", nargs=2, type=int, metavar=("NODES", "RANKS"), help="nodes, and ranks of a node")
    plan.add_argument("--hidden", type=int, default=7168, help="H, of bf16 rows (%(default)s)")
    plan.add_argument("--topk", type=int, default=8, help="K (%(default)s)")
    plan.add_argument("--experts", type=int, help="E (the least multiple of the ranks from 256 on)")
    plan.add_argument("--max-tokens", type=int, default=4096, help="T, tokens per rank (%(default)s)")
    plan.add_argument("--max-recv-tokens", type=int, help="R, rows per rank (T * K)")
    plan.add_argument("--num-sms", type=int, help="Config.num_sms")
    plan.add_argument("--channels", type=int, help="Tuning.channels")
    arguments = parser.parse_args(argv)
    if arguments.plan is not None:
        return _plan(arguments)
    if not arguments.all_ranks:
        print(env.render())
        return 0
    from megatron_ep.meeting import job

    if not job.adopt():
        raise ValueError("--all-ranks: start it under torchrun or srun, a process a rank")
    return _compare_all()


def _plan(arguments: argparse.Namespace) -> int:
    from megatron_ep.cli.plan import make_plan
    from megatron_ep.config import Config, Topology, Tuning
    from megatron_ep.tools.arguments import default_experts

    topology = Topology(*arguments.plan)
    config = Config(
        num_experts=default_experts(topology) if arguments.experts is None else arguments.experts,
        num_sms=arguments.num_sms,
        row_bytes=2 * arguments.hidden if arguments.hidden > 0 else None,
        tuning=Tuning(channels=arguments.channels),
    )
    sections = make_plan(
        topology,
        config,
        hidden=arguments.hidden,
        topk=arguments.topk,
        num_tokens=arguments.max_tokens,
        max_recv_tokens=arguments.max_recv_tokens,
    )
    print(env.render(sections))
    return 0


def _compare_all() -> int:
    from torch.distributed import PrefixStore

    from megatron_ep.meeting import codec, job, stores

    timeout = timedelta(seconds=PATIENCE_S)
    report = env.collect()
    try:
        store, rank, world_size = job.store_of_ranks(timeout)
        store = PrefixStore(f"megatron-ep env {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        text, status = stores.bounded(LIMIT_S, lambda: exchange(store, rank, world_size, report, timeout))
    except RuntimeError as error:
        print(f"megatron-ep env: rank {os.environ['RANK']} lost the others: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        print(codec.readable(text, codec.MAX_BYTES), flush=True)
    return status


def exchange(store: Any, rank: int, world_size: int, report: env.Report, timeout: timedelta) -> tuple[str, int]:
    """Collective over the ranks: the comparison's text and exit status, the same on all of them.

    store: of torch.distributed, which all ranks reach; kept by rank 0 or somebody else.
    report: of this rank.
    timeout: how long rank 0 waits for the others. Who does not come is part of the text.

    Raises RuntimeError if rank 0 does not answer, or somebody else has.
    """
    store.set(f"report {rank}", json.dumps(report))
    if rank == 0:
        missing = _wait_and_warn(store, [f"report {other}" for other in range(world_size)], timeout)
        reports = {other: _report(store, f"report {other}") for other in range(world_size) if other not in missing}
        store.set("comparison", json.dumps(compare(reports, world_size, timeout.total_seconds())))
        if world_size > 1:  # the store may end with this process
            _wait(store, [f"heard {other}" for other in reports if other], timedelta(seconds=GOODBYE_S))
    else:
        store.wait(["comparison"], timeout + timedelta(seconds=GOODBYE_S))
    text, status = _read(store, "comparison", tuple[str, int])
    store.set(f"heard {rank}", "")
    return text, status


def _report(store: Any, key: str) -> env.Report:
    fact = bool | int | float | str | None | list[str]
    report: env.Report = _read(store, key, dict[str, dict[str, fact | dict[str, fact]]])
    gpus, sections = report.get("cuda", {}).get("gpus"), {*MATTERING, *TELLING, "environment"}
    if not sections <= report.keys() or not isinstance(gpus, list) or not report["system"].get("host"):
        raise _foreign(key, "no report")
    return report


def _read(store: Any, key: str, kind: Any) -> Any:
    from megatron_ep.meeting import codec  # not before a report that tells of the extension alone

    try:
        return codec.decode(store.get(key), kind)
    except ValueError as error:
        raise _foreign(key, str(error)) from None


def _foreign(key: str, why: str) -> RuntimeError:
    return RuntimeError(f"the store holds at key {key!r} a value that no rank has written: {why}")


def _wait_and_warn(store: Any, keys: list[str], timeout: timedelta) -> set[int]:
    """As `_wait`, and says now and then on stderr for how many ranks it waits."""
    from megatron_ep.meeting import stores

    began, waited, limit = time.monotonic(), 0.0, timeout.total_seconds()
    while True:
        until = min(stores.next_warning(waited), limit)
        missing = _wait(store, keys, timedelta(seconds=until - waited))
        waited = max(until, time.monotonic() - began)
        if not missing or waited >= limit:
            return missing
        where = f"{len(missing)} of {len(keys)} ranks at {stores.address(store)}: {_ranks(sorted(missing))}"
        print(f"megatron-ep env: waits for {where}; for {waited:.0f} s of at most {limit:g} s", file=sys.stderr)


def _wait(store: Any, keys: list[str], timeout: timedelta) -> set[int]:
    """The places of the keys that did not come in time."""
    if keys:
        try:
            store.wait(keys, timeout)
        except RuntimeError:  # some stores have no error of their own for a wait that expired
            return {place for place, key in enumerate(keys) if not store.check([key])}
    return set()


def compare(reports: dict[int, env.Report], world_size: int, patience: float) -> tuple[str, int]:
    """What a user reads, and 1 if ranks are missing or differ in what matters, else 0.

    reports: of those ranks that have sent theirs.
    patience: seconds that the others were waited for.
    """
    by_host: dict[str, list[int]] = {}
    for rank, report in reports.items():
        by_host.setdefault(report["system"]["host"], []).append(rank)
    lines = [f"{world_size} ranks on {len(by_host)} host{'s' if len(by_host) > 1 else ''}:"]
    lines += [f"  {host}  {_ranks(ranks)}" for host, ranks in by_host.items()]
    missing = [rank for rank in range(world_size) if rank not in reports]
    if missing:
        lines.append(f"did not report within {patience:g} s: {_ranks(missing)}")
    status = int(bool(missing))
    equal: Facts = {}
    for title, sections, variables in (
        ("differs, and must not:", MATTERING, MATTERING_VARIABLES),
        ("differs, which may be meant:", TELLING, TELLING_VARIABLES),
    ):
        differing = _differing({rank: _facts(report, sections, variables) for rank, report in reports.items()}, equal)
        if differing:
            lines += ["", title, *differing]
            status |= int(sections is MATTERING)
    lines += ["", "equal on all ranks:"]
    lines += [f"  {name}: {_one_line(value)}" for name, value in equal.items()]
    return "\n".join(lines), status


def _differing(facts: dict[int, Facts], equal: Facts) -> list[str]:
    lines = []
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        ranks_of: dict[str, list[int]] = {}
        for rank, own in facts.items():
            ranks_of.setdefault(own.get(name, "not set"), []).append(rank)
        if len(ranks_of) == 1:
            equal[name] = next(iter(ranks_of))
        else:
            lines.append(f"  {name}:")
            lines += [f"    {_ranks(ranks)}: {_one_line(value)}" for value, ranks in ranks_of.items()]
    return lines


def _facts(report: env.Report, sections: Mapping[str, Sequence[str]], variables: tuple[str, ...]) -> Facts:
    """Returns facts by the name that is printed."""
    facts = {}
    for section, names in sections.items():
        for name in names:
            value: Any = report[section].get(name)
            if name == "python":
                value = str(value).split()[0]  # without the interpreter's place
            elif name == "gpus":
                alike = itertools.groupby(re.sub(r"^\d+, ", "", gpu) for gpu in value)
                value = "\n".join(f"{len(list(gpus))} x {gpu}" for gpu, gpus in alike)
            for key, part in value.items() if isinstance(value, dict) else [("", value)]:
                facts[" ".join(filter(None, (name, key)))] = env.text(part)
    environment = report["environment"]
    return facts | {f"${name}": value for name, value in environment.items() if name.startswith(variables)}


def _one_line(value: str) -> str:
    return "; ".join(value.splitlines()) or "-"


def _ranks(ranks: list[int]) -> str:
    """As in "ranks 0-3, 8"."""
    parts = []
    for _, run in itertools.groupby(enumerate(ranks), lambda place_and_rank: place_and_rank[1] - place_and_rank[0]):
        numbers = [rank for _, rank in run]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"

"""`megatron-ep check --network`: examines every pair of machines of a job before the job runs: which networks connect
all of them, over TCP and by network cards, the speed of each link, and whether data that is sent over all links in
parallel arrives in order and unchanged."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median

import torch.distributed as dist

from megatron_ep.errors import EPError
from megatron_ep.fabrics import choice, verbs
from megatron_ep.meeting import addresses, job
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.network import report
from megatron_ep.tools.network.examination import TRIAL_S, Examination

FASTER = 1.5  # speed over that of the default network from which another one is proposed


def examine_all(rendezvous: StoreRendezvous, timeout: float, *, apart: bool = False) -> tuple[str, int]:
    """Returns the report for a user, and the exit status, 1 if there is a fault. Collective."""
    examination = Examination(rendezvous, timeout, apart=apart)
    machines = examination.machines
    head = f"{len(examination.infos)} ranks on {len(machines)} machines: {', '.join(machines)}"
    if apart:
        head += "\na rehearsal on one machine, each rank as if it had one of its own: says nothing about a network"
    builds = examination.builds()
    if builds:
        return "\n".join([head, "", "FAIL  ranks run different builds, which cannot talk to each other:", *builds]), 1
    if len(machines) < 2:
        return f"{head}\n\nFAIL  there is no network to examine between the ranks of one machine", 1
    over_tcp = examine_networks(examination)
    if over_tcp.rate is None:
        return "\n".join([head, *over_tcp.lines, "", "no network connects all machines"]), 1
    by_card = examine_cards(examination)
    verdict = [*_take_cards(examination, over_tcp.rate, by_card), *over_tcp.settings]
    lines = [head, *over_tcp.lines, *by_card.lines, "", "for the job:", *(f"    {line}" for line in verdict)]
    return "\n".join(lines), int(over_tcp.is_bad or by_card.is_bad)


@dataclass
class Ways:
    """The findings about networks or ports, as lines for a user.

    rate: bytes per second of the slowest link of the best one; None: none connects all machines. settings: lines for
    the job. good: positions of ports without a fault.
    """

    lines: list[str] = field(default_factory=list)
    rate: float | None = None
    settings: list[str] = field(default_factory=list)
    is_bad: bool = False
    good: list[int] = field(default_factory=list)


def examine_networks(examination: Examination) -> Ways:
    """Examines the networks over TCP. Collective."""
    ways, wrong_there = Ways(), list[str]()
    wanted = any(one.wanted for one in examination.infos)
    for network in [*([None] if wanted else []), *examination.candidates()]:
        findings = examination.examine(network)
        text, found = report.render(examination.machines, findings, judges=not examination.apart)
        taken = ", ".join(examination.infos[rank].address for rank in examination.first_ranks)
        ways.lines += _section(f"network {network or taken}", text, found)
        if findings.unreached or findings.faults:
            ways.is_bad |= network is None
            continue
        if ways.rate is None or findings.slowest > FASTER * ways.rate:
            line = network or examination.infos[0].wanted or "..., on each machine as it is"
            ways.rate, ways.settings, wrong_there = findings.slowest, [f"export {addresses.VARIABLE}={line}"], found
        if network is None:
            break  # the user asks for this network
    ways.is_bad |= bool(wrong_there)
    return ways


def examine_cards(examination: Examination) -> Ways:
    """Tests the ports of network cards that all machines have, one position after the other. Collective."""
    ways = Ways()
    lacking = examination.no_cards()
    if lacking:
        return Ways(_section("network cards", "", lacking), is_bad=examination.infos[0].fabric in choice.BY_CARD)
    if examination.by_card == choice.MLX5:
        ways.lines += ["", "by mlx5, as a job takes them, ranks on GPUs too; measured from memory of the host:"]
    found = {place: examination.examine(None, place) for place in examination.places()}
    rates = [rate for findings in found.values() for rate in report.rates_of(findings).values()]
    for place, findings in found.items():
        cards = [examination.cards[rank][place] for rank in examination.first_ranks]
        names = [f"{machine} {card}" for machine, card in zip(examination.machines, cards, strict=True)]
        text, wrong = report.render(names, findings, median(rates) if rates else None)
        ways.lines += _section(f"network cards {', '.join(names)}", text, wrong)
        ways.is_bad |= bool(wrong)
        if not wrong:
            ways.good.append(place)
            ways.rate = min(ways.rate or findings.slowest, findings.slowest)
    return ways


def _section(title: str, text: str, faults: Sequence[str]) -> list[str]:
    return ["", title, *([text] if text else []), *(f"FAIL  {fault}" for fault in faults)]


def _take_cards(examination: Examination, over_tcp: float, by_card: Ways) -> list[str]:
    """Returns settings for the job: the ports without a fault, unless TCP is much faster."""
    if not examination.places():
        return []
    if by_card.rate is None or by_card.rate * FASTER < over_tcp:
        return [_fabric_line(choice.TCP)]
    settings = [_fabric_line(examination.by_card)]
    if len(by_card.good) < len(examination.places()):
        names = [",".join(cards[place] for place in by_card.good) for cards in examination.cards]
        if len(set(names)) == 1:
            settings.append(f"export {verbs.VARIABLE}={names[0]}")
        else:
            settings += [
                f"export {verbs.VARIABLE}={names[rank]}  # on {examination.machines[examination.machine_of[rank]]}"
                for rank in examination.first_ranks
            ]
    return settings


def _fabric_line(name: str) -> str:
    """Returns the setting of a fabric. It does not suit GPUs with NVSHMEM or NCCL, which it would disable."""
    return f"export {choice.VARIABLE}={name}  # not where GPUs have NVSHMEM or NCCL"


def main_of_rank(timeout: float) -> int:
    """Runs on each rank of a job started by torchrun. Rank 0 prints."""
    wait = timedelta(seconds=timeout)
    store, rank, world_size = job.store_of_ranks(wait)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = StoreRendezvous.over(dist.PrefixStore(f"check --network {attempt}", store), rank, world_size, wait)
    try:
        text, status = examine_all(rendezvous, timeout)
    except (EPError, ValueError):
        with contextlib.suppress(EPError):
            rendezvous.leave("", lambda _: False, TRIAL_S)  # the store may end with rank 0
        raise
    if rank == 0:
        print(text, flush=True)
    rendezvous.leave("", lambda _: False, timeout)  # the store may end with rank 0
    return status


def main_of_machine(world_size: int, timeout: float) -> int:
    """Runs all ranks on this machine, each as if it were a separate machine."""
    from megatron_ep.tools.local_ranks import LocalRanks

    with LocalRanks(world_size, 10 * timeout) as ranks:
        text, status = ranks.run(_examine_apart, timeout)[0]
    print(text, flush=True)
    return int(status)


def _examine_apart(timeout: float) -> tuple[str, int]:
    rendezvous = StoreRendezvous(None, timedelta(seconds=timeout))
    return examine_all(rendezvous, timeout, apart=True)

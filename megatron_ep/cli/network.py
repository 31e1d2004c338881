"""`megatron-ep check --network`: every pair of machines of a job, before the job runs: which networks reach all of
them, how fast each link is, and whether what is sent over all of them at once arrives in order and as it was sent."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch.distributed as dist

from megatron_ep import _C
from megatron_ep.backends import addresses, processes, tcp
from megatron_ep.backends.network_trial import NetworkTrial
from megatron_ep.backends.rendezvous import StoreRendezvous
from megatron_ep.errors import EPError

PINGS = 200
FIRST_BYTES = 1 << 20  # sent to see how much more can be sent in ...
LOAD_S, REPEATS = 0.1, 3  # ... so many seconds; the best of several counts
MIN_BYTES, MAX_BYTES = 1 << 20, 256 << 20
MAX_PUT = 1 << 16
CHANNELS = 2
SLOW = 0.3  # of the median link
LOSSY, MIN_LOST = 5e-3, 10  # of the packets; fewer may have been late
FASTER = 1.5  # as fast as the network that would be taken, to be proposed in its place
SHADES = " ░▒▓█"
Told = TypeVar("Told")


@dataclass(frozen=True)
class Machine:
    """What a rank tells of where it runs."""

    name: str
    identity: str  # `processes.machine`
    build: str
    networks: list[str]  # in which it has an address
    wanted: str | None  # by the variable
    address: str  # that it would take


@dataclass(frozen=True)
class Half:
    """What one rank of a pair has measured: half of round trips, in seconds, and what it could send, in bytes per
    second: while nothing came back, and while as much did."""

    latency: float
    latency_p99: float
    alone: float
    both: float


@dataclass(frozen=True)
class Link:
    """A pair of machines, by number, and what each has measured."""

    pair: tuple[int, int]
    halves: tuple[Half, Half]

    @property
    def slowest(self) -> float:
        return min(half.alone for half in self.halves)


@dataclass(frozen=True)
class Findings:
    """Of one network."""

    unreached: list[str]
    links: list[Link]
    lost: dict[tuple[int, int], float]  # packets that were sent again, of all, by machines from and to
    load: float  # bytes per second that a machine sends while all send to all
    faults: list[str]


class Examination:
    """Collective. rendezvous: of all ranks. timeout: of each wait, seconds. apart: each rank is a machine."""

    def __init__(self, rendezvous: StoreRendezvous, timeout: float, *, apart: bool = False):
        self.rendezvous, self.timeout, self.rank = rendezvous, timeout, rendezvous.rank

        def introduce() -> tuple[None, Machine]:
            return None, _introduce(apart, rendezvous.rank)

        _, self.told = rendezvous.exchange(introduce)
        order = list(dict.fromkeys(one.identity for one in self.told))
        self.machine_of = [order.index(one.identity) for one in self.told]
        self.first_ranks = [self.machine_of.index(machine) for machine in range(len(order))]
        self.machines = [self.told[rank].name for rank in self.first_ranks]

    def builds(self) -> list[str]:
        """A line for each build that ranks have, if these are several."""
        found: dict[str, list[int]] = {}
        for rank, one in enumerate(self.told):
            found.setdefault(one.build, []).append(rank)
        return [f"{build}: {self._named(ranks)}" for build, ranks in found.items()] if len(found) > 1 else []

    def candidates(self) -> list[str]:
        """Networks that all machines have an address in, first that of the address which rank 0 would take."""
        shared = [name for name in self.told[0].networks if all(name in one.networks for one in self.told)]
        apart = len(set(self.machines)) == len(self.machines)
        outside = [name for name in shared if not (apart and ipaddress.ip_network(name).is_loopback)]
        taken = ipaddress.ip_address(self.told[0].address)
        return sorted(outside, key=lambda name: taken not in ipaddress.ip_network(name))

    def examine(self, network: str | None) -> Findings:
        """network: None: on the address that each rank would take by itself."""
        address = None if network is None else addresses.address_in(network)
        unreached = self._reach(address)
        if unreached:
            return Findings(unreached, [], {}, 0.0, [])
        names = [f"{self.machines[machine]} ({machine})" for machine in self.machine_of]
        links: list[Link] = []
        faults: list[str] = []
        lost: dict[tuple[int, int], float] = {}
        load = 0.0
        with NetworkTrial(self.rendezvous, names, channels=CHANNELS, max_bytes=MAX_PUT, address=address) as trial:
            for pairs in rounds_of(len(self.machines)):
                found, faults = self._measure_all(trial, pairs)
                links += found
                if faults:
                    break
            slowest = min((link.slowest for link in links), default=0.0)
            if not faults:
                _, faults = self._together(partial(self._storm, trial, slowest), float)
            if not faults:
                rates, faults = self._together(partial(self._load, trial, slowest), float)
                load = sum(rate for rate in rates if rate is not None) / len(self.machines)
            sent = self.rendezvous.gather(
                [(to, *counts) for to, counts in trial.segments_sent().items()], kind=list[tuple[int, int, int]]
            )
        for rank, counts in enumerate(sent):
            for to, packets, again in counts:
                pair = self.machine_of[rank], self.machine_of[to]
                share = again / max(packets, 1) if again >= MIN_LOST else 0.0
                lost[pair] = max(lost.get(pair, 0.0), share)
        return Findings([], links, lost, load, faults)

    # ---- steps, which all ranks take together

    def _reach(self, address: str | None) -> list[str]:
        """Which rank does not reach which, a line each."""
        others = [rank for rank, machine in enumerate(self.machine_of) if machine != self.machine_of[self.rank]]
        with contextlib.ExitStack() as stack:

            def tell() -> tuple[socket.socket, tcp.Listening]:
                listener = stack.enter_context(tcp.listen(address))
                return listener, tcp.Listening.by(listener, len(self.told))

            listener, told = self.rendezvous.exchange(tell)
            made, why = tcp.join(self.rank, others, told, listener, min(self.timeout, tcp.HELLO_S))
            for connection in made.values():
                connection.close()
        mine = [
            f"{self._place(self.rank)} does not reach {self._place(other)} at {told[other].host} port "
            f"{told[other].port}: {why.get(other, 'no answer')}"
            for other in others
            if other < self.rank and (other, 0) not in made
        ]
        return [line for lines in self.rendezvous.gather(mine, kind=list[str]) for line in lines]

    def _together(self, step: Callable[[], Told | None], kind: type[Told]) -> tuple[list[Told | None], list[str]]:
        """What it returned on each rank, and what went wrong, a line each."""
        self.rendezvous.barrier()
        result, fault = None, None
        try:
            result = step()
        except EPError as error:
            fault = f"{self._place(self.rank)}: {error}"
        outcomes = self.rendezvous.gather((result, fault), kind=tuple[kind | None, str | None])  # type: ignore[valid-type]
        return [result for result, _ in outcomes], [fault for _, fault in outcomes if fault is not None]

    def _measure_all(self, trial: NetworkTrial, pairs: Sequence[tuple[int, int]]) -> tuple[list[Link], list[str]]:
        """Pairs of machines at once, of which a machine is in one at most."""
        pair = next((pair for pair in pairs if self.rank in [self.first_ranks[machine] for machine in pair]), None)
        rates, faults = self._together(lambda: None if pair is None else self._try(trial, pair), float)
        if faults:
            return [], faults
        rate = None if pair is None else rates[self.first_ranks[pair[0]]]
        size = _bytes_at(rate or 0.0)
        found, faults = self._together(lambda: None if pair is None else self._measure(trial, pair, size), Half)
        links = []
        for one in pairs:
            first, second = (found[self.first_ranks[machine]] for machine in one)
            if first is not None and second is not None:
                links.append(Link(one, (first, second)))
        return links, faults

    def _peer(self, pair: tuple[int, int]) -> tuple[int, bool]:
        """The other one's rank, and whether this one begins."""
        first, second = (self.first_ranks[machine] for machine in pair)
        return (second, True) if self.rank == first else (first, False)

    def _try(self, trial: NetworkTrial, pair: tuple[int, int]) -> float:
        peer, _ = self._peer(pair)
        return FIRST_BYTES / trial.exchange([peer], [peer], FIRST_BYTES // CHANNELS, self.timeout)

    def _measure(self, trial: NetworkTrial, pair: tuple[int, int], size: int) -> Half:
        peer, begins = self._peer(pair)
        halves = sorted(trial.ping(peer, begins=begins, size=8, rounds=PINGS, timeout=self.timeout)[PINGS // 10 :])

        def rate(sends: bool, receives: bool) -> float:
            """By who sends, who waits for the last credit: who receives may find much when it comes."""
            seconds = []
            for _ in range(REPEATS):
                trial.ping(peer, begins=begins, size=1, rounds=1, timeout=self.timeout)  # both are here
                ranks = ([peer] if sends else [], [peer] if receives else [])
                seconds.append(trial.exchange(*ranks, size // CHANNELS, self.timeout))
            return size / min(seconds)

        one_way = [rate(begins, not begins), rate(not begins, begins)]
        return Half(median(halves), halves[len(halves) * 99 // 100], one_way[not begins], rate(True, True))

    def _storm(self, trial: NetworkTrial, slowest: float) -> None:
        others = trial.others
        puts = max(8, 2 * _bytes_at(slowest) // (MAX_PUT * CHANNELS * len(others)))
        trial.exchange(others, others, 0, self.timeout, puts=puts, seed=len(self.told))

    def _load(self, trial: NetworkTrial, slowest: float) -> float:
        size = _bytes_at(slowest) // (CHANNELS * len(trial.others))
        seconds = trial.exchange(trial.others, trial.others, size, self.timeout)
        return size * CHANNELS * len(trial.others) / seconds

    def _place(self, rank: int) -> str:
        return f"{self.machines[self.machine_of[rank]]} (rank {rank})"

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._place(rank) for rank in ranks)


def _bytes_at(rate: float) -> int:
    return int(min(max(rate * LOAD_S, MIN_BYTES), MAX_BYTES))


def _introduce(apart: bool, rank: int) -> Machine:
    wanted = os.environ.get(addresses.VARIABLE) or None
    name = os.uname().nodename
    return Machine(
        name=f"{name}/{rank}" if apart else name,
        identity=f"rank {rank}" if apart else processes.machine(),
        build=_build(),
        networks=list(dict.fromkeys(str(interface.network) for _, interface in addresses.interfaces())),
        wanted=wanted,
        address=addresses.own_address(),
    )


def _build() -> str:
    code = hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest()[:12]
    return f"megatron_ep {importlib.metadata.version('megatron_ep')}, extension {code}"


def rounds_of(machines: int) -> list[list[tuple[int, int]]]:
    """All pairs, in rounds in which each machine is in one pair at most (the circle method of tournaments)."""
    size = machines + machines % 2
    circle, rounds = list(range(size)), []
    for _ in range(size - 1):
        pairs = [(circle[i], circle[-1 - i]) for i in range(size // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < machines])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


# ---- what a user reads


def render(machines: Sequence[str], findings: Findings) -> tuple[str, list[str]]:
    """The table and the picture of one network, and what is wrong with it, a line each."""
    if findings.unreached:
        return "", findings.unreached
    rates: dict[tuple[int, int], float] = {}
    width = max(map(len, machines))
    lines = [f"{'from':<{width}}  {'to':<{width}}     us    p99  Gbit/s there   back  both, each  sent again"]
    for link in sorted(findings.links, key=lambda link: link.pair):
        (first, second), (there, back) = link.pair, link.halves
        rates[first, second], rates[second, first] = there.alone, back.alone
        lost = max(findings.lost.get(pair, 0.0) for pair in ((first, second), (second, first)))
        lines.append(
            f"{machines[first]:<{width}}  {machines[second]:<{width}} {there.latency * 1e6:6.0f} "
            f"{there.latency_p99 * 1e6:6.0f}  {_gbit(there.alone):>12} {_gbit(back.alone):>6}  "
            f"{_gbit(min(there.both, back.both)):>10}  {lost:>10.2%}"
        )
    lines += ["", *_picture(machines, rates)]
    if findings.load:
        lines += ["", f"all to all: each machine sends {_gbit(findings.load)} Gbit/s; contents and order are right"]
    return "\n".join(lines), [*findings.faults, *_slow(machines, findings, rates)]


def _gbit(rate: float) -> str:
    return f"{rate * 8e-9:.3g}"


def _picture(machines: Sequence[str], rates: dict[tuple[int, int], float]) -> list[str]:
    """A row for each machine that sends, a column for each that receives; the darker, the faster."""
    fastest = max(rates.values(), default=1.0)
    width = max(map(len, machines))
    lines = [f"Gbit/s from a row's machine to a column's, {SHADES[-1]} is {_gbit(fastest)}"]
    for row, name in enumerate(machines):
        cells = ""
        for column in range(len(machines)):
            rate = rates.get((row, column))
            cells += " ·" if rate is None else " " + SHADES[max(1, round(rate / fastest * (len(SHADES) - 1)))]
        slowest = min((rate for (sender, _), rate in rates.items() if sender == row), default=0.0)
        lines.append(f"{name:<{width}} {cells}   {_gbit(slowest)} at least")
    return lines


def _slow(machines: Sequence[str], findings: Findings, rates: dict[tuple[int, int], float]) -> list[str]:
    usual = median(rates.values()) if rates else 0.0
    slow = [
        f"slow: {machines[sender]} -> {machines[receiver]}, {_gbit(rate)} Gbit/s, the median link has {_gbit(usual)}"
        for (sender, receiver), rate in sorted(rates.items())
        if rate < SLOW * usual
    ]
    lossy = [
        f"lossy: {machines[sender]} -> {machines[receiver]}, {share:.2%} of the packets had to be sent again"
        for (sender, receiver), share in sorted(findings.lost.items())
        if share > LOSSY
    ]
    return slow + lossy


def examine_all(rendezvous: StoreRendezvous, timeout: float, *, apart: bool = False) -> tuple[str, int]:
    """Collective: what a user reads, and the exit status: 1 when something is wrong."""
    examination = Examination(rendezvous, timeout, apart=apart)
    machines = examination.machines
    head = f"{len(examination.told)} ranks on {len(machines)} machines: {', '.join(machines)}"
    builds = examination.builds()
    if builds:
        return "\n".join([head, "", "FAIL  ranks run different builds, which cannot talk to each other:", *builds]), 1
    if len(machines) < 2:
        return f"{head}\n\nFAIL  there is no network to examine between the ranks of one machine", 1
    lines, faults, best = [head], [], None
    wanted = any(one.wanted for one in examination.told)
    for network in [*([None] if wanted else []), *examination.candidates()]:
        findings = examination.examine(network)
        text, found = render(machines, findings)
        taken = ", ".join(examination.told[rank].address for rank in examination.first_ranks)
        lines += ["", f"network {network or taken}", *([text] if text else []), *(f"FAIL  {fault}" for fault in found)]
        if findings.unreached or findings.faults:
            faults += found if network is None else []
            continue
        slowest = min(link.slowest for link in findings.links)
        if best is None or slowest > FASTER * best[0]:
            best = slowest, network, found
        if network is None:
            break  # as the user wants it
    if best is None:
        return "\n".join([*lines, "", "no network connects all machines"]), 1
    line = best[1] or examination.told[0].wanted or "..., on each machine as it is"
    return "\n".join([*lines, "", "for the job:", f"    export {addresses.VARIABLE}={line}"]), int(
        bool(faults or best[2])
    )


def main_of_rank(timeout: float) -> int:
    """By each rank of a job, whose variables are torchrun's. Rank 0 prints."""
    wait = timedelta(seconds=timeout)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=wait))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rendezvous = StoreRendezvous.over(dist.PrefixStore(f"check --network {attempt}", store), rank, world_size, wait)
    text, status = examine_all(rendezvous, timeout)
    if rank == 0:
        print(text, flush=True)
    rendezvous.barrier()
    return status


def main_of_machine(world_size: int, timeout: float) -> int:
    """All ranks on this machine, each as if it were one of its own."""
    from megatron_ep.bench.local_ranks import LocalRanks

    with LocalRanks(world_size, 10 * timeout) as ranks:
        text, status = ranks.run(_examine_apart, timeout)[0]
    print(text, flush=True)
    return int(status)


def _examine_apart(timeout: float) -> tuple[str, int]:
    rendezvous = StoreRendezvous(None, timedelta(seconds=timeout))
    return examine_all(rendezvous, timeout, apart=True)

"""The measurements of `megatron-ep check --network` between the machines of a job, on all ranks together."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics import cards as rdma
from megatron_ep.fabrics import choice, tcp, verbs
from megatron_ep.meeting import addresses, processes
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.meeting.stores import in_thread
from megatron_ep.tools.network.report import Findings, Half, Link
from megatron_ep.tools.network.trial import NetworkTrial

PINGS = 200
FIRST_BYTES = 1 << 20  # bytes of the first message, by whose rate messages of LOAD_S are sized
LOAD_S, REPEATS = 0.1, 3  # seconds of a measurement; the best of several counts
MEASURE_WAITS = 1 + 3 * REPEATS * 2  # waits of a measurement: small messages, then three rates
MIN_BYTES, MAX_BYTES = 1 << 20, 256 << 20
CHANNELS = 2
MIN_LOST = 10  # least number of retransmitted packets that counts, because some may only be late
TRIAL_BYTES = 128 << 10  # more than any packet
TRIAL_S = 10.0  # time limit of these bytes in seconds
BLACK_HOLE = (
    f"{TRIAL_BYTES >> 10} KiB do not arrive within {TRIAL_S:g} s: packets above some size are lost, because a link on "
    "the way has a smaller MTU; ping -M do -s 1472 HOST, or 8972 with jumbo frames, shows whether this is so"
)
Told = TypeVar("Told")


@dataclass(frozen=True)
class Machine:
    """The machine of a rank, as sent to the other ranks."""

    name: str
    identity: str  # result of `processes.machine`
    build: str
    networks: list[str]  # networks in which it has an address
    wanted: str | None  # network or address that the variable asks for
    address: str  # address that it would use
    fabric: str | None  # fabric that the variable asks for
    cards: list[str]  # usable ports, with the names of `verbs.setting`
    no_cards: str  # why there are none


class Examination:
    """The examination of a job's network. All methods that communicate are collective.

    rendezvous: the rendezvous of all ranks. timeout: limit of each wait in seconds. apart: each rank is a machine.
    """

    def __init__(self, rendezvous: StoreRendezvous, timeout: float, *, apart: bool = False):
        self.rendezvous, self.timeout, self.rank = rendezvous, timeout, rendezvous.rank
        rendezvous.of_what, rendezvous.failure = "of the network's examination", "could not examine the network"
        self.apart = apart
        self._try_store()

        def introduce() -> tuple[None, Machine]:
            return None, _introduce(apart, rendezvous.rank)

        _, self.infos = rendezvous.exchange(introduce)
        order = list(dict.fromkeys(one.identity for one in self.infos))
        self.machine_of = [order.index(one.identity) for one in self.infos]
        self.first_ranks = [self.machine_of.index(machine) for machine in range(len(order))]
        first = [self.infos[rank] for rank in self.first_ranks]
        often = Counter(one.name for one in first)
        self.machines = [one.name if often[one.name] == 1 else f"{one.name}/{one.address}" for one in first]
        self.by_card = choice.MLX5 if all(one.fabric == choice.MLX5 for one in self.infos) else choice.VERBS
        self.cards = [one.cards for one in self.infos]

    def builds(self) -> list[str]:
        """Returns a line for each build of the ranks if they have several."""
        found: dict[str, list[int]] = {}
        for rank, one in enumerate(self.infos):
            found.setdefault(one.build, []).append(rank)
        return [f"{build}: {self._named(ranks)}" for build, ranks in found.items()] if len(found) > 1 else []

    def candidates(self) -> list[str]:
        """Returns the networks in which all machines have an address, first that of rank 0's default address."""
        shared = [name for name in self.infos[0].networks if all(name in one.networks for one in self.infos)]
        apart = len(set(self.machines)) == len(self.machines)
        outside = [name for name in shared if not (apart and ipaddress.ip_network(name).is_loopback)]
        taken = ipaddress.ip_address(self.infos[0].address)
        return sorted(outside, key=lambda name: taken not in ipaddress.ip_network(name))

    def places(self) -> range:
        """Returns the positions of network card ports that every machine has."""
        return range(min(map(len, self.cards)))

    def no_cards(self) -> list[str]:
        """Returns a line for each reason why cards are not examined, if they are asked for or some machine has some."""
        if not any(one.cards for one in self.infos) and self.infos[0].fabric not in choice.BY_CARD:
            return []
        found: dict[str, list[int]] = {}
        for rank in self.first_ranks:
            if not self.infos[rank].cards:
                found.setdefault(self.infos[rank].no_cards, []).append(rank)
        return [f"{self._named(ranks)}: {why}" for why, ranks in found.items()]

    def examine(self, network: str | None, place: int | None = None) -> Findings:
        """Examines a network or ports. network: None uses the default address of each rank. place: position of the port
        of each machine; None: over TCP."""
        address = None if network is None else addresses.address_in(network)
        unreached = self._reach(address)
        if unreached:
            return Findings(unreached, [], {}, 0.0, [])
        cards: list[_C.Card] = []
        if place is not None:
            _, refused = self._together(
                lambda: cards.append(verbs.card_at(place, direct=self.by_card == choice.MLX5)), float
            )
            if refused:
                return Findings([], [], {}, 0.0, refused)
        names = [f"{self.machines[machine]} ({machine})" for machine in self.machine_of]
        links: list[Link] = []
        faults: list[str] = []
        lost: dict[tuple[int, int], float] = {}
        load = 0.0
        try:
            joined = NetworkTrial(
                self.rendezvous, names, channels=CHANNELS, address=address, card=next(iter(cards), None)
            )
        except EPError as error:
            if not cards:
                raise
            return Findings([], [], {}, 0.0, [str(error)])
        with joined as trial:
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
                [(to, *counts) for to, counts in trial.network.segments_sent().items()], kind=list[tuple[int, int, int]]
            )
        for rank, counts in enumerate([] if cards else sent):
            for to, packets, again in counts:
                pair = self.machine_of[rank], self.machine_of[to]
                share = again / max(packets, 1) if again >= MIN_LOST else 0.0
                lost[pair] = max(lost.get(pair, 0.0), share)
        return Findings([], links, lost, load, faults)

    # ---- collective steps

    def _reach(self, address: str | None) -> list[str]:
        """Returns a line for each rank that does not reach another."""
        others = [rank for rank, machine in enumerate(self.machine_of) if machine != self.machine_of[self.rank]]
        with contextlib.ExitStack() as stack:

            def listen() -> tuple[socket.socket, tcp.Listening]:
                listener = stack.enter_context(tcp.listen(address))
                return listener, tcp.Listening.by(listener, len(self.infos))

            listener, listening = self.rendezvous.exchange(listen)
            made, why = tcp.join(self.rank, others, listening, listener, min(self.timeout, tcp.HELLO_S))
            firsts = self.first_ranks if self.rank in self.first_ranks else ()  # one rank of a machine tries it
            tried = {other: connection for other, connection in made.items() if other in firsts}
            with ThreadPoolExecutor(len(tried) or 1) as pool:
                arrived = list(pool.map(_arrives, tried.values()))
            for connection in made.values():
                connection.close()
        mine = [
            f"{self._place(self.rank)} does not reach {self._place(other)} at {listening[other].host} port "
            f"{listening[other].port}: {why.get(other, 'no answer')}"
            for other in others
            if other < self.rank and other not in made
        ] + [
            f"{self._place(other)} and {self._place(self.rank)} are connected, but of what the first sends {BLACK_HOLE}"
            for other, came in zip(tried, arrived, strict=True)
            if not came
        ]
        return [line for lines in self.rendezvous.gather(mine, kind=list[str]) for line in lines]

    def _try_store(self) -> None:
        """Raises EPError on all ranks if some rank gets only those answers of the store that fit into a packet."""
        connection: Any = self.rendezvous.connection()
        if connection is None:
            return
        # A connection of its own, because it may fall silent. The store may need long for those of all ranks.
        store = self.rendezvous.agree(connection.clone)
        key = f"trial {self.rank}"

        def pass_there_and_back() -> None:
            store.set(key, "0" * TRIAL_BYTES)
            store.get(key)
            store.delete_key(key)

        trial = in_thread(pass_there_and_back)  # later steps report a failed store
        futures.wait([trial], TRIAL_S)
        place = f"{os.uname().nodename} (rank {self.rank}) and the store at MASTER_ADDR"
        mine = f"{place} are connected, but of what passes {BLACK_HOLE}" if not trial.done() else ""
        faults = [fault for fault in self.rendezvous.gather(mine) if fault]
        if faults:
            raise EPError("; ".join(faults))

    def _together(
        self, step: Callable[[], Told | None], kind: type[Told], waits: int = 1
    ) -> tuple[list[Told | None], list[str]]:
        """Runs a step on all ranks. Returns its result on each, and a line for each error. waits: number of consecutive
        waits of `timeout` seconds in it, because ranks without work wait for the others."""
        self.rendezvous.barrier()

        def take() -> tuple[None, tuple[Told | None, str | None]]:
            try:
                return None, (step(), None)
            except EPError as error:
                return None, (None, f"{self._place(self.rank)}: {error}")

        seconds = waits * self.timeout
        _, outcomes = self.rendezvous.exchange(take, seconds, kind=tuple[kind | None, str | None])  # type: ignore[valid-type]
        return [result for result, _ in outcomes], [fault for _, fault in outcomes if fault is not None]

    def _measure_all(self, trial: NetworkTrial, pairs: Sequence[tuple[int, int]]) -> tuple[list[Link], list[str]]:
        """Measures pairs of machines in parallel. A machine is in at most one of them."""
        pair = next((pair for pair in pairs if self.rank in [self.first_ranks[machine] for machine in pair]), None)
        rates, faults = self._together(lambda: None if pair is None else self._try(trial, pair), float)
        if faults:
            return [], faults
        rate = None if pair is None else rates[self.first_ranks[pair[0]]]
        size = _bytes_at(rate or 0.0)
        found, faults = self._together(
            lambda: None if pair is None else self._measure(trial, pair, size), Half, MEASURE_WAITS
        )
        links = []
        for one in pairs:
            first, second = (found[self.first_ranks[machine]] for machine in one)
            if first is not None and second is not None:
                links.append(Link(one, (first, second)))
        return links, faults

    def _peer(self, pair: tuple[int, int]) -> tuple[int, bool]:
        """Returns the rank of the other machine, and whether this rank begins."""
        first, second = (self.first_ranks[machine] for machine in pair)
        return (second, True) if self.rank == first else (first, False)

    def _try(self, trial: NetworkTrial, pair: tuple[int, int]) -> float:
        peer, _ = self._peer(pair)
        return FIRST_BYTES / trial.exchange([peer], [peer], FIRST_BYTES // CHANNELS, self.timeout)

    def _measure(self, trial: NetworkTrial, pair: tuple[int, int], size: int) -> Half:
        peer, begins = self._peer(pair)
        halves = sorted(trial.ping(peer, begins=begins, size=8, rounds=PINGS, timeout=self.timeout)[PINGS // 10 :])

        def rate(sends: bool, receives: bool) -> float:
            """Returns bytes per second. Senders time until the last credit; receivers may start after data arrives."""
            seconds = []
            for _ in range(REPEATS):
                trial.ping(peer, begins=begins, size=1, rounds=1, timeout=self.timeout)  # both ranks start together
                ranks = ([peer] if sends else [], [peer] if receives else [])
                seconds.append(trial.exchange(*ranks, size // CHANNELS, self.timeout))
            return size / min(seconds)

        one_way = [rate(begins, not begins), rate(not begins, begins)]
        return Half(median(halves), halves[len(halves) * 99 // 100], one_way[not begins], rate(True, True))

    def _storm(self, trial: NetworkTrial, slowest: float) -> None:
        others = trial.others
        puts = max(8, 2 * _bytes_at(slowest) // (trial.max_bytes * CHANNELS * len(others)))
        trial.exchange(others, others, 0, self.timeout, puts=puts, seed=len(self.infos))

    def _load(self, trial: NetworkTrial, slowest: float) -> float:
        size = _bytes_at(slowest) // (CHANNELS * len(trial.others))
        seconds = trial.exchange(trial.others, trial.others, size, self.timeout)
        return size * CHANNELS * len(trial.others) / seconds

    def _place(self, rank: int) -> str:
        return f"{self.machines[self.machine_of[rank]]} (rank {rank})"

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._place(rank) for rank in ranks)


def _arrives(connection: socket.socket) -> bool:
    """Returns whether a large message arrives, while one is sent to the other end."""
    deadline = time.monotonic() + TRIAL_S
    missing = TRIAL_BYTES
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * TRIAL_BYTES)  # both ends may send first
    try:
        connection.settimeout(TRIAL_S)
        connection.sendall(bytes(missing))
        while missing:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(missing)
            if not part:
                return False
            missing -= len(part)
    except OSError:
        return False
    return True


def _bytes_at(rate: float) -> int:
    return int(min(max(rate * LOAD_S, MIN_BYTES), MAX_BYTES))


def _introduce(apart: bool, rank: int) -> Machine:
    wanted = os.environ.get(addresses.VARIABLE) or None
    name = os.uname().nodename
    fabric = choice.wanted_here()
    cards, why = _cards(fabric)
    return Machine(
        name=f"{name}/{rank}" if apart else name,
        identity=f"rank {rank}" if apart else processes.machine(),
        build=_build(),
        networks=list(dict.fromkeys(str(interface.network) for _, interface in addresses.interfaces())),
        wanted=wanted,
        address=addresses.own_address(),
        fabric=fabric,
        cards=cards,
        no_cards=why,
    )


def _cards(wanted: str | None) -> tuple[list[str], str]:
    """Returns usable ports, and why there are none. wanted: fabric that the variable asks for."""
    if wanted == choice.TCP or (wanted not in choice.BY_CARD and not rdma.has_cards()):
        return [], rdma.NO_CARD
    if wanted == choice.MLX5 and (lacks := choice.what_lacks(wanted, on_gpus=True)):
        return [], lacks
    try:
        return list(map(verbs.setting, verbs.usable(direct=wanted == choice.MLX5))), ""
    except (EPError, ValueError) as error:
        return [], str(error)


def _build() -> str:
    code = hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest()[:12]
    return f"megatron_ep {importlib.metadata.version('megatron_ep')}, extension {code}"


def rounds_of(machines: int) -> list[list[tuple[int, int]]]:
    """Returns all pairs in rounds, with each machine in at most one pair of a round (the circle method)."""
    size = machines + machines % 2
    circle, rounds = list(range(size)), []
    for _ in range(size - 1):
        pairs = [(circle[i], circle[-1 - i]) for i in range(size // 2)]
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < machines])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds

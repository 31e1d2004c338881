"""How `megatron-ep check --network` measures the ways between the machines of a job, on all ranks together."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import ipaddress
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics import choice, nvshmem_env, tcp, verbs
from megatron_ep.meeting import addresses, processes
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.network.report import Findings, Half, Link
from megatron_ep.tools.network.trial import NetworkTrial

PINGS = 200
FIRST_BYTES = 1 << 20  # sent to see how much more can be sent in ...
LOAD_S, REPEATS = 0.1, 3  # ... so many seconds; the best of several counts
MEASURE_WAITS = 1 + 3 * REPEATS * 2  # for small messages, then for three rates
MIN_BYTES, MAX_BYTES = 1 << 20, 256 << 20
CHANNELS = 2
MIN_LOST = 10  # packets that were sent again; fewer may have been late
TRIAL_BYTES = 128 << 10  # more than any packet
TRIAL_S = 10.0  # that they may take
BLACK_HOLE = (
    f"{TRIAL_BYTES >> 10} KiB do not arrive within {TRIAL_S:g} s: packets above some size are lost (a smaller MTU on "
    "the way); ping -M do -s 1472 HOST, or 8972 with jumbo frames, finds it"
)
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
    fabric: str | None  # that is wanted, by its variable
    cards: list[str]  # its ports that can be used, as `verbs.setting` names them
    direct: list[str]  # those in whose queues a rank posts by itself
    no_cards: str  # why it has none


class Examination:
    """Collective. rendezvous: of all ranks. timeout: of each wait, seconds. apart: each rank is a machine."""

    def __init__(self, rendezvous: StoreRendezvous, timeout: float, *, apart: bool = False):
        self.rendezvous, self.timeout, self.rank = rendezvous, timeout, rendezvous.rank
        rendezvous.of_what, rendezvous.failure = "of the network's examination", "could not examine the network"
        self.apart = apart
        self._try_store()

        def introduce() -> tuple[None, Machine]:
            return None, _introduce(apart, rendezvous.rank)

        _, self.told = rendezvous.exchange(introduce)
        order = list(dict.fromkeys(one.identity for one in self.told))
        self.machine_of = [order.index(one.identity) for one in self.told]
        self.first_ranks = [self.machine_of.index(machine) for machine in range(len(order))]
        first = [self.told[rank] for rank in self.first_ranks]
        often = Counter(one.name for one in first)
        self.machines = [one.name if often[one.name] == 1 else f"{one.name}/{one.address}" for one in first]
        # as a job takes cards
        self.by_card = choice.IBGDA if all(one.direct for one in self.told) else choice.VERBS
        self.cards = [one.direct if self.by_card == choice.IBGDA else one.cards for one in self.told]

    def builds(self) -> list[str]:
        """A line for each build that ranks have, if these are several."""
        found: dict[str, list[int]] = {}
        for rank, one in enumerate(self.told):
            found.setdefault(one.build, []).append(rank)
        return [f"{build}: {self._named(ranks)}" for build, ranks in found.items()] if len(found) > 1 else []

    def candidates(self) -> list[str]:
        """Networks in which all machines have an address. First the one of the address that rank 0 would take."""
        shared = [name for name in self.told[0].networks if all(name in one.networks for one in self.told)]
        apart = len(set(self.machines)) == len(self.machines)
        outside = [name for name in shared if not (apart and ipaddress.ip_network(name).is_loopback)]
        taken = ipaddress.ip_address(self.told[0].address)
        return sorted(outside, key=lambda name: taken not in ipaddress.ip_network(name))

    def places(self) -> range:
        """Positions of network card ports that every machine has."""
        return range(min(map(len, self.cards)))

    def cards_at(self, place: int) -> list[str]:
        """The port of each machine."""
        return [self.cards[rank][place] for rank in self.first_ranks]

    def no_cards(self) -> list[str]:
        """Why cards are not examined, a line for each reason, if they would be taken or another machine has some."""
        if not any(one.cards for one in self.told) and self.told[0].fabric not in choice.BY_CARD:
            return []
        found: dict[str, list[int]] = {}
        for rank in self.first_ranks:
            if not self.told[rank].cards:
                found.setdefault(self.told[rank].no_cards, []).append(rank)
        return [f"{self._named(ranks)}: {why}" for why, ranks in found.items()]

    def examine(self, network: str | None, place: int | None = None) -> Findings:
        """network: None: on the address that each rank would take by itself. place: by the port of this place of each
        machine; None: over TCP."""
        address = None if network is None else addresses.address_in(network)
        unreached = self._reach(address)
        if unreached:
            return Findings(unreached, [], {}, 0.0, [])
        cards: list[_C.Card] = []
        if place is not None:
            _, refused = self._together(
                lambda: cards.append(verbs.card_at(place, direct=self.by_card == choice.IBGDA)), float
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
                self.rendezvous,
                names,
                channels=CHANNELS,
                address=address,
                card=next(iter(cards), None),
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
                [(to, *counts) for to, counts in trial.segments_sent().items()], kind=list[tuple[int, int, int]]
            )
        for rank, counts in enumerate([] if cards else sent):
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
            tried = {other: connection for other, connection in made.items() if self._is_tried(other)}
            with ThreadPoolExecutor(len(tried) or 1) as pool:
                arrived = list(pool.map(_arrives, tried.values()))
            for connection in made.values():
                connection.close()
        mine = [
            f"{self._place(self.rank)} does not reach {self._place(other)} at {told[other].host} port "
            f"{told[other].port}: {why.get(other, 'no answer')}"
            for other in others
            if other < self.rank and other not in made
        ] + [
            f"{self._place(other)} and {self._place(self.rank)} are connected, but of what the first sends {BLACK_HOLE}"
            for other, came in zip(tried, arrived, strict=True)
            if not came
        ]
        return [line for lines in self.rendezvous.gather(mine, kind=list[str]) for line in lines]

    def _try_store(self) -> None:
        """Raises EPError, on all ranks, where the store's answers to one pass only while they fit into a packet."""
        store = self.rendezvous.connection()
        if store is None:
            return
        key = f"trial {self.rank}"

        def pass_there_and_back() -> None:
            with contextlib.suppress(RuntimeError):  # later steps say so
                store.set(key, "0" * TRIAL_BYTES)
                store.get(key)
                store.delete_key(key)

        trial = threading.Thread(target=pass_there_and_back, daemon=True)
        trial.start()
        trial.join(TRIAL_S)
        place = f"{os.uname().nodename} (rank {self.rank}) and the store at MASTER_ADDR"
        mine = f"{place} are connected, but of what passes {BLACK_HOLE}" if trial.is_alive() else ""
        faults = [fault for fault in self.rendezvous.gather(mine) if fault]
        if faults:
            raise EPError("; ".join(faults))

    def _is_tried(self, other: int) -> bool:
        return self.rank in self.first_ranks and other in self.first_ranks

    def _together(
        self, step: Callable[[], Told | None], kind: type[Told], waits: int = 1
    ) -> tuple[list[Told | None], list[str]]:
        """What it returned on each rank, and what went wrong, a line each. waits: of `timeout` seconds each that it may
        take one after the other: a rank that has nothing to do waits for the others."""
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
        """Pairs of machines at once, of which a machine is in one at most."""
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
            """Timed by the sender, until its last credit: a receiver may start after data has arrived."""
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
        puts = max(8, 2 * _bytes_at(slowest) // (trial.max_bytes * CHANNELS * len(others)))
        trial.exchange(others, others, 0, self.timeout, puts=puts, seed=len(self.told))

    def _load(self, trial: NetworkTrial, slowest: float) -> float:
        size = _bytes_at(slowest) // (CHANNELS * len(trial.others))
        seconds = trial.exchange(trial.others, trial.others, size, self.timeout)
        return size * CHANNELS * len(trial.others) / seconds

    def _place(self, rank: int) -> str:
        return f"{self.machines[self.machine_of[rank]]} (rank {rank})"

    def _named(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._place(rank) for rank in ranks)


def _arrives(connection: socket.socket) -> bool:
    """Whether as many bytes come as are sent there."""
    deadline = time.monotonic() + TRIAL_S
    missing = TRIAL_BYTES
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * TRIAL_BYTES)  # the other end may not read yet
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
    cards, direct, why = _cards()
    return Machine(
        name=f"{name}/{rank}" if apart else name,
        identity=f"rank {rank}" if apart else processes.machine(),
        build=_build(),
        networks=list(dict.fromkeys(str(interface.network) for _, interface in addresses.interfaces())),
        wanted=wanted,
        address=addresses.own_address(),
        fabric=os.environ.get(choice.VARIABLE) or None,
        cards=cards,
        direct=direct,
        no_cards=why,
    )


def _cards() -> tuple[list[str], list[str], str]:
    """Ports that can be used, those in whose queues a rank posts by itself, and why there are none."""
    wanted = os.environ.get(choice.VARIABLE)
    if wanted == choice.TCP or (wanted not in choice.BY_CARD and not nvshmem_env.has_cards()):
        return [], [], nvshmem_env.NO_CARD
    lacks = "" if wanted == choice.VERBS else choice.what_lacks(choice.IBGDA, on_gpus=True)
    if wanted == choice.IBGDA and lacks:
        return [], [], lacks
    try:
        direct = [] if wanted == choice.VERBS or lacks else list(map(verbs.setting, verbs.usable(direct=True)))
        return list(map(verbs.setting, verbs.usable())), direct, ""
    except (EPError, ValueError) as error:
        return [], [], str(error)


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

"""Ports of RDMA network cards (InfiniBand and RoCE), through libibverbs. With the verbs fabric the network thread of a
rank posts to a card. A TCP connection (`tcp.py`) carries failures and status, and detects that a rank is gone.

With the mlx5 fabric kernels and host roles post to the queues of NVIDIA's cards (driver mlx5) and ring the doorbell
themselves, which also takes libmlx5.

A rank takes one of the ports that are up and nearest to its GPU, chosen by its index among the ranks of its machine, so
that ranks of equal index on different machines have corresponding cards. A rank on the host prefers the cards of the
NUMA node that it is bound to, if ranks of all machines are bound alike. Otherwise, and if MEGATRON_EP_CARDS is set, all
are equally near. With mlx5 a rank takes several ports, and divides its channels among them, if more are near it than
ranks share them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics import cards as rdma
from megatron_ep.fabrics import near_cards

LIBRARY = "libibverbs.so.1"
MLX5_LIBRARY = "libmlx5.so.1"
VARIABLE = "MEGATRON_EP_CARDS"  # names, "mlx5_0,mlx5_1:2": a card, or one port of it
# Environment variables, equal on all ranks: the argument of `_C.Card` that each sets, its least and greatest value, and
# its default.
SETTINGS = {
    "MEGATRON_EP_IB_TC": ("traffic_class", 0, 255, 0),
    "MEGATRON_EP_IB_SL": ("service_level", 0, 15, 0),
    "MEGATRON_EP_IB_PKEY_INDEX": ("pkey_index", 0, 65535, 0),
    "MEGATRON_EP_IB_TIMEOUT": ("ack_timeout", 1, 31, 17),
    "MEGATRON_EP_IB_RETRIES": ("retries", 1, 7, 7),
}


def ports(direct: bool = False) -> list[_C.CardPort]:
    """Returns all ports of this machine. Raises EPError if the libraries cannot be used.

    direct: whether ranks post to the card's queues themselves (mlx5)."""
    try:
        return _C.card_ports(LIBRARY, MLX5_LIBRARY if direct else None)
    except RuntimeError as error:
        if direct:
            raise EPError(f"the mlx5 fabric needs {LIBRARY} and {MLX5_LIBRARY}: {error}") from None
        raise EPError(f"the verbs fabric needs {LIBRARY}: {error}") from None


def settings() -> dict[str, int]:
    """Returns the value of each variable in `SETTINGS`. Raises ValueError for one that is out of range."""
    found = {}
    for name, (_, least, most, default) in SETTINGS.items():
        text = os.environ.get(name) or str(default)
        if not text.isdecimal() or not text.isascii() or not least <= int(text) <= most:
            raise ValueError(f"environment variable {name} is {text!r}, must be a whole number in [{least}, {most}]")
        found[name] = int(text)
    return found


def usable(direct: bool = False) -> list[_C.CardPort]:
    """Returns the ports that are up and, if MEGATRON_EP_CARDS is set, named there. Raises ValueError for an unknown
    name, EPError with the fault of each port if none is left.

    direct: see `ports`.
    """
    found, wanted = ports(direct), os.environ.get(VARIABLE) or ""
    names = [name.strip() for name in wanted.split(",")] if wanted else []
    for name in names:
        if not any(_is_named(port, name) for port in found):
            there = ", ".join(dict.fromkeys(port.device for port in found)) or "none"
            raise ValueError(f"environment variable {VARIABLE} names {name!r}, must be cards of this machine: {there}")
    chosen = [port for port in found if not names or any(_is_named(port, name) for name in names)]
    usable = [port for port in chosen if not port.lacks]
    if not usable:
        lacking = [f"{_name(port)}: {port.lacks}" for port in chosen]
        raise EPError("; ".join(lacking) or "libibverbs finds no network card")
    return usable


def cards_for(
    fabric: str,
    rank: int,
    machines: Sequence[str],
    *,
    gpus: Sequence[str | None] | None = None,
    near: Sequence[list[str] | None] | None = None,
) -> list[_C.Card]:
    """Opens the ports that a rank takes: one for verbs, one or several for mlx5. Raises as `usable`, and EPError if a
    port cannot be opened.

    machines: machine of each rank.
    gpus: PCI address of each rank's GPU, if known; None: the ranks are on the host.
    near: for ranks on the host, the cards of the NUMA node that each is bound to, if to one.
    """
    if fabric == "mlx5":
        return [_open(port, direct=True) for port in _ports_of(rank, machines, usable(direct=True), gpus, near)]
    return [_open(_ports_of(rank, machines, usable(), gpus, near)[0])] if fabric == "verbs" else []


def _ports_of(
    rank: int,
    machines: Sequence[str],
    found: Sequence[_C.CardPort],
    gpus: Sequence[str | None] | None,
    near: Sequence[list[str] | None] | None,
) -> list[_C.CardPort]:
    """Returns the ports that a rank may take; the first one is for a rank that takes only one."""
    there = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    devices = [port.device for port in found]
    nearest = [devices for _ in there]
    if os.environ.get(VARIABLE):
        pass  # the user has chosen the ports in `found`
    elif gpus is not None:
        nearest = [near_cards.nearest(gpus[other], devices) for other in there]
    elif near is not None and _are_alike(machines, near):
        nearest = [[device for device in devices if device in (near[other] or ())] or devices for other in there]
    place = there.index(rank)
    own = [port for port in found if port.device in nearest[place]]
    return own[near_cards.turn(place, nearest) :: nearest.count(nearest[place])]


def _are_alike(machines: Sequence[str], near: Sequence[list[str] | None]) -> bool:
    """Returns whether every rank is bound to a NUMA node, with cards of equal names for ranks of equal index on their
    machines, so that cards of equal names are connected."""
    by_machine: dict[str, list[list[str] | None]] = {}
    for machine, cards in zip(machines, near, strict=True):
        by_machine.setdefault(machine, []).append(cards)
    return None not in near and all(cards == by_machine[machines[0]] for cards in by_machine.values())


def rails_that_differ(machines: Sequence[str], cards: Sequence[Sequence[str]]) -> str:
    """Returns a warning if ranks of equal index on their machines, which exchange rows, take ports of different names:
    their networks may be separate, or one slower. Returns "" otherwise.

    cards: names of each rank's ports.
    """
    first: dict[int, int] = {}
    for rank, machine in enumerate(machines):
        other = first.setdefault(list(machines[:rank]).count(machine), rank)
        if list(cards[rank]) != list(cards[other]):
            both = (f"rank {one} has {' and '.join(cards[one])}" for one in (other, rank))
            return f"{', '.join(both)}: if a port is down, or named otherwise there, {VARIABLE} says which to take"
    return ""


def try_direct(gpu: int | None) -> None:
    """Creates a queue that a GPU, or with None the host, posts to itself. Raises as `cards_for` if that fails."""
    card = _open(usable(direct=True)[0], direct=True)
    try:
        card.try_queue() if gpu is None else _C.try_card(card, gpu)
    except RuntimeError as error:
        raise EPError(f"the mlx5 fabric: {error}") from None


def card_at(place: int, direct: bool = False) -> _C.Card:
    """Opens the usable port of index `place`, modulo their number. Raises as `cards_for`.

    direct: see `ports`.
    """
    found = usable(direct)
    return _open(found[place % len(found)], direct)


def _open(port: _C.CardPort, direct: bool = False) -> _C.Card:
    service = {SETTINGS[name][0]: value for name, value in settings().items()}
    try:
        return _C.Card(library=LIBRARY, port=port, mlx5=MLX5_LIBRARY if direct else None, **service)
    except RuntimeError as error:
        raise EPError(str(error)) from None


def report(direct: bool = False) -> str:
    """Describes the ports of this machine, for `megatron-ep env`. direct: see `ports`."""
    if not rdma.has_cards():
        return rdma.NO_CARD
    try:
        found = ports(direct)
    except EPError as error:
        return str(error)
    return "; ".join(f"{_name(port)}: {port.lacks or f'up, {port.address}'}" for port in found) or "no network card"


def report_of_ranks(gpus: Sequence[str | None]) -> str:
    """Describes which ports the ranks of this machine take, for `megatron-ep env`.

    gpus: PCI address of each rank's GPU; empty: the ranks are on the host."""
    try:
        found = usable() if rdma.has_cards() else []
    except (EPError, ValueError) as error:
        return str(error)
    if not found:
        return rdma.NO_CARD
    if not gpus:
        cards = near_cards.of_process() or ()
        near = [setting(port) for port in found if port.device in cards]
        bound = f"; bound to a NUMA node as this process is, {', '.join(near)}" if 0 < len(near) < len(found) else ""
        return f"on the host in turn {', '.join(map(setting, found))}{bound}"
    taken = [_ports_of(rank, [""] * len(gpus), found, gpus, None) for rank in range(len(gpus))]
    several = [
        f"{setting(first)} (mlx5: {' '.join(map(setting, more))} too)" if more else setting(first)
        for first, *more in taken
    ]
    return ", ".join(f"GPU {gpu} {ports}" for gpu, ports in enumerate(several))


def setting(port: _C.CardPort) -> str:
    """Returns the name of this port alone, as MEGATRON_EP_CARDS takes it."""
    return f"{port.device}:{port.number}"


def _name(port: _C.CardPort) -> str:
    return f"{port.device} port {port.number} ({'RoCE' if port.is_ethernet else 'InfiniBand'})"


def _is_named(port: _C.CardPort, name: str) -> bool:
    return name in (port.device, f"{port.device}:{port.number}")

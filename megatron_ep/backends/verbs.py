"""Network cards that write to other machines' memory by themselves: InfiniBand and RoCE, through libibverbs (fabric
"verbs"). The rank's thread for the network tells a card what to write; what ranks tell of themselves goes over TCP
beside it (`tcp.py`), by which they also notice that one has gone.

A rank takes one port: of those that are up and nearest to its GPU, its place among the ranks of its machine says which,
so that ranks of the same place on different machines have cards of the same place. On the host, and where
MEGATRON_EP_CARDS names cards, none is nearer than another.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_ep import _C
from megatron_ep.backends import ibgda, near_cards
from megatron_ep.errors import EPError

LIBRARY = "libibverbs.so.1"
VARIABLE = "MEGATRON_EP_CARDS"  # names, "mlx5_0,mlx5_1:2": a card, or one port of it


def ports() -> list[_C.CardPort]:
    """All of this machine. Raises EPError where libibverbs cannot be used."""
    try:
        return _C.card_ports(LIBRARY)
    except RuntimeError as error:
        raise EPError(f"the verbs fabric needs {LIBRARY}: {error}") from None


def usable() -> list[_C.CardPort]:
    """Ports that are up and, if MEGATRON_EP_CARDS is set, named there. Raises ValueError for an unknown name; EPError,
    with each port's fault, if none is left."""
    found, wanted = ports(), os.environ.get(VARIABLE) or ""
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


def card_of(rank: int, machines: Sequence[str], gpus: Sequence[str | None] | None = None) -> _C.Card:
    """Opens the port of a rank. Raises as `usable` does, and EPError where it fails.

    machines: of each rank.
    gpus: of each rank, the PCI address of its GPU, if it is known; None: the ranks are on the host.
    """
    found = usable()
    place = list(machines[:rank]).count(machines[rank])
    if gpus is None or os.environ.get(VARIABLE):
        return _open(found[place % len(found)])
    there = [gpu for gpu, machine in zip(gpus, machines, strict=True) if machine == machines[rank]]
    near = [near_cards.nearest(gpu, [port.device for port in found]) for gpu in there]
    own = [port for port in found if port.device in near[place]]
    return _open(own[near_cards.turn(place, near)])


def card_at(place: int) -> _C.Card:
    """Opens the port of this place among those that are usable, or begins again with the first. Raises as `card_of`."""
    found = usable()
    return _open(found[place % len(found)])


def _open(port: _C.CardPort) -> _C.Card:
    try:
        return _C.Card(library=LIBRARY, port=port)
    except RuntimeError as error:
        raise EPError(str(error)) from None


def report() -> str:
    """For `megatron-ep env`."""
    if not ibgda.has_cards():
        return ibgda.NO_CARD
    try:
        found = ports()
    except EPError as error:
        return str(error)
    return "; ".join(f"{_name(port)}: {port.lacks or f'up, {port.address}'}" for port in found) or "no network card"


def setting(port: _C.CardPort) -> str:
    """What names this port alone in the variable."""
    return f"{port.device}:{port.number}"


def _name(port: _C.CardPort) -> str:
    return f"{port.device} port {port.number} ({'RoCE' if port.is_ethernet else 'InfiniBand'})"


def _is_named(port: _C.CardPort, name: str) -> bool:
    return name in (port.device, f"{port.device}:{port.number}")

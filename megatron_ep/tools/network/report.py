"""The report of `megatron-ep check --network` about a network: a table and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SLOW = 0.3  # share of the median rate below which a link is slow
LOSSY = 5e-3  # share of lost packets above which a link is lossy
MODEST = 1.25e8  # bytes per second below which the report remarks on a link, even if all are equal


@dataclass(frozen=True)
class Half:
    """The measurements of one rank of a pair: half a round trip, median and p99, in seconds, and the rate at which it
    sends, in bytes per second, alone and while the other rank sends as well."""

    latency: float
    latency_p99: float
    alone: float
    both: float


@dataclass(frozen=True)
class Link:
    """A pair of machines, by number, and the measurements of each."""

    pair: tuple[int, int]
    halves: tuple[Half, Half]

    @property
    def slowest(self) -> float:
        return min(half.alone for half in self.halves)


@dataclass(frozen=True)
class Findings:
    """Findings about one network."""

    unreached: list[str]
    links: list[Link]
    lost: dict[tuple[int, int], float]  # share of packets that TCP retransmitted, by (from, to)
    load: float  # bytes per second that a machine sends while all send to all
    faults: list[str]

    @property
    def slowest(self) -> float:
        return min(link.slowest for link in self.links)


def rates_of(findings: Findings) -> dict[tuple[int, int], float]:
    """Returns the bytes per second of one direction alone, by (from, to)."""
    rates: dict[tuple[int, int], float] = {}
    for link in findings.links:
        rates[link.pair], rates[link.pair[::-1]] = (half.alone for half in link.halves)
    return rates


def render(
    machines: Sequence[str], findings: Findings, usual: float | None = None, *, judges: bool = True
) -> tuple[str, list[str]]:
    """Returns the table of a network, and a line for each fault.

    usual: expected bytes per second of a link; None: the median of these. judges: whether slow or lossy links are
    faults.
    """
    if findings.unreached:
        return "", findings.unreached
    if not findings.links:
        return "", findings.faults
    rates = rates_of(findings)
    width = max(map(len, machines))
    lines = [f"{'from':<{width}}  {'to':<{width}}     us    p99  Gbit/s there   back  both, each  sent again"]
    for link in sorted(findings.links, key=lambda link: link.pair):
        (first, second), (there, back) = link.pair, link.halves
        lost = max(findings.lost.get(pair, 0.0) for pair in ((first, second), (second, first)))
        again = f"{lost:.2%}" if findings.lost else "-"
        lines.append(
            f"{machines[first]:<{width}}  {machines[second]:<{width}} {there.latency * 1e6:6.0f} "
            f"{there.latency_p99 * 1e6:6.0f}  {_gbit(there.alone):>12} {_gbit(back.alone):>6}  "
            f"{_gbit(min(there.both, back.both)):>10}  {again:>10}"
        )
    if findings.load:
        lines += ["", f"all to all: each machine sends {_gbit(findings.load)} Gbit/s; contents and order are right"]
    if (slowest := min(rates.values())) < MODEST:
        lines += ["", f"the slowest link has {_gbit(slowest)} Gbit/s, less than {_gbit(MODEST)} Gbit/s"]
    return "\n".join(lines), [*findings.faults, *(_slow(machines, findings, rates, usual) if judges else [])]


def _gbit(rate: float) -> str:
    return f"{rate * 8e-9:.3g}"


def _slow(
    machines: Sequence[str], findings: Findings, rates: dict[tuple[int, int], float], usual: float | None
) -> list[str]:
    usual = median(rates.values()) if usual is None else usual
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

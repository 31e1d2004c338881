"""Pictures of predictions, as SVG for light and dark pages: time over ranks, and the activity of a rank's warps."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ep.tools.simulate.predict import Phase, Track

STYLE = """
    text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; text-anchor: middle }
    .h { font-size: 18px; font-weight: 600; text-anchor: start }
    .k { text-anchor: start } .e { text-anchor: end }
    .s { font-size: 13px; fill: #57606a }
    .card { fill: #fff; stroke: #d0d7de } .grid { stroke: #d0d7de }
    .ours { fill: none; stroke: #2f63ad; stroke-width: 2.4 }
    .band { fill: #2f63ad; opacity: .18 }
    .floor { fill: none; stroke: #6b7480; stroke-width: 1.6; stroke-dasharray: 6 4 }
    .other { fill: none; stroke: #b3541e; stroke-width: 1.8 }
    .dot, .works { fill: #2f63ad }
    .row { fill: #d9dee5 } .room { fill: #e0a030 } .steps { fill: #9dbce4 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 } .s { fill: #a0aab5 } .card { fill: #14181f; stroke: #3a424d } .grid { stroke: #3a424d }
      .ours { stroke: #79aef5 } .band, .dot, .works { fill: #79aef5 }
      .floor { stroke: #a0aab5 } .other { stroke: #f0a070 }
      .row { fill: #3a424d } .room { fill: #b57a18 } .steps { fill: #476a9c }
    }
  """
# Roles in the order in which a row passes through them.
ROLES = (
    "nvl_sender",
    "rdma_sender",
    "sender_coordinator",
    "forwarder",
    "forwarder_coordinator",
    "receiver",
    "combine_nvl_sender",
    "combine_forwarder",
    "combine_receiver",
    "low_latency_sender",
    "low_latency_receiver",
    "low_latency_combine_sender",
    "low_latency_combine_receiver",
)


@dataclass(frozen=True)
class Point:
    """One case of a picture over ranks: us of a phase, their bounds, the floor, and published times of others."""

    ranks: int
    us: float
    low: float
    high: float
    floor: float
    published: Mapping[str, float] = field(default_factory=dict)


def _svg(width: int, height: int, title: str, text: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-labelledby="title text">',
            f'  <title id="title">{html.escape(title)}</title>',
            f'  <desc id="text">{html.escape(text)}</desc>',
            f"  <style>{STYLE}</style>",
            f'  <rect class="card" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="10"/>',
            *(f"  {line}" for line in body),
            "</svg>",
            "",
        ]
    )


def _ticks(end: float) -> list[float]:
    """Returns five to ten round values from 0 to at least `end`."""
    step = next(s * 10.0**p for p in range(-3, 12) for s in (1, 2, 5) if end / (s * 10.0**p) <= 8)
    ticks = [0.0]
    while ticks[-1] < end:
        ticks.append(ticks[-1] + step)
    return ticks


def time_over_ranks(title: str, phases: Mapping[str, Sequence[Point]]) -> str:
    """Returns a panel per phase: time, its bounds, its floor and published times of others, over numbers of ranks."""
    width, height, left, top, bottom = 460, 330, 70, 56, 270
    body = []
    others = sorted({who for points in phases.values() for point in points for who in point.published})
    for panel, (name, given) in enumerate(phases.items()):
        points = sorted(given, key=lambda point: point.ranks)
        x0, x1 = panel * width + left, panel * width + width - 20
        ticks = _ticks(max(us for point in points for us in (point.high, *point.published.values())) / 1e3)

        def y(us: float, ticks: list[float] = ticks) -> float:
            return bottom - (bottom - top) * us / 1e3 / ticks[-1]

        def x(number: int, x0: int = x0, x1: int = x1, last: int = max(1, len(points) - 1)) -> float:
            return x0 + 10 + (x1 - x0 - 20) * number / last

        body.append(f'<text class="h" x="{x0}" y="36">{html.escape(name)}</text>')
        for tick in ticks:
            at = y(1e3 * tick)
            body.append(f'<path class="grid" d="M{x0} {at:.1f}H{x1}"/>')
            body.append(f'<text class="s e" x="{x0 - 8}" y="{at + 4:.1f}">{tick:g} ms</text>')
        ups = [f"{x(i):.1f} {y(p.high):.1f}" for i, p in enumerate(points)]
        downs = [f"{x(i):.1f} {y(p.low):.1f}" for i, p in enumerate(points)]
        body.append(f'<path class="band" d="M{"L".join(ups + downs[::-1])}Z"/>')
        for kind, values in (("floor", [p.floor for p in points]), ("ours", [p.us for p in points])):
            line = "L".join(f"{x(i):.1f} {y(value):.1f}" for i, value in enumerate(values))
            body.append(f'<path class="{kind}" d="M{line}"/>')
        for i, point in enumerate(points):
            body.append(f'<circle class="dot" cx="{x(i):.1f}" cy="{y(point.us):.1f}" r="3.4"/>')
            for who, us in point.published.items():
                body.append(_mark(others.index(who), x(i), y(us)))
            body.append(f'<text class="s" x="{x(i):.1f}" y="{bottom + 20}">{point.ranks}</text>')
    body.append(
        f'<text class="s k" x="{left}" y="{height - 14}">over ranks; dashed: bytes of rows alone; shaded: what is open '
        "about the network card</text>"
    )
    for number, who in enumerate(others):
        at = height + 6 + 24 * number
        body.append(_mark(number, left + 6, at))
        body.append(f'<text class="s k" x="{left + 20}" y="{at + 4}">{html.escape(who)}, as published</text>')
    text = "; ".join(
        f"{name}: " + ", ".join(f"{point.ranks} ranks {_told(point)}" for point in points)
        for name, points in phases.items()
    )
    return _svg(width * len(phases), height + 24 * len(others), title, text, body)


def _mark(number: int, x: float, y: float) -> str:
    """Draws the mark of a publisher: a square on a corner, a triangle, a square, a cross, in turn."""
    shapes = ("m0-5 5 5-5 5-5-5z", "m0-5 5 9h-10z", "m-4-4h8v8h-8z", "m-4-4 8 8m0-8-8 8")
    shape = shapes[number % len(shapes)]
    return f'<path class="other" d="M{x:.1f} {y:.1f}{shape}"/>'


def _told(point: Point) -> str:
    others = "".join(f" ({who} {us / 1e3:.2f})" for who, us in point.published.items())
    return f"{point.us / 1e3:.2f} ms{others}"


def _kind(wait: str) -> str:
    """Returns what a wait is for: rows, or room."""
    return "room" if "room" in wait or "taken" in wait or "turn" in wait else "row"


def _legend(left: int, y: int, keys: Sequence[tuple[str, str]]) -> list[str]:
    body = []
    for kind, meaning in keys:
        body.append(f'<rect class="{kind}" x="{left}" y="{y}" width="14" height="14"/>')
        body.append(f'<text class="k" x="{left + 20}" y="{y + 12}">{meaning}</text>')
        left += 50 + 8 * len(meaning)
    return body


def role_bars(title: str, phases: Mapping[str, Phase]) -> str:
    """Returns bars of the time of each phase's roles: copies and sums, other steps, waits."""
    left, right, line, y = 210, 960, 26, 64
    body = [f'<text class="h" x="16" y="32">{html.escape(title)}</text>']
    told = []
    for name, phase in phases.items():
        body.append(f'<text class="e" x="{left - 12}" y="{y + 14}">{html.escape(name)}: {phase.us / 1e3:.2f} ms</text>')
        y += line
        for role, of in sorted(phase.roles.items(), key=lambda item: ROLES.index(item[0]) if item[0] in ROLES else -1):
            body.append(f'<text class="e s" x="{left - 12}" y="{y + 14}">{role}</text>')
            waits = {"row": 0.0, "room": 0.0}
            for wait, us in of.waited.items():
                waits[_kind(wait)] += us
            parts = {"works": of.copied, "steps": of.time - of.copied - sum(waits.values()), **waits}
            at = float(left)
            for kind, us in parts.items():
                length = (right - left) * us / of.time
                body.append(f'<rect class="{kind}" x="{at:.1f}" y="{y}" width="{length:.1f}" height="18"/>')
                at += length
            told.append(f"{name}, {role}: copies {of.copied / of.time:.0%}, waits {sum(waits.values()) / of.time:.0%}")
            y += line
        y += 8
    keys = (
        ("works", "copies and sums"),
        ("steps", "other steps"),
        ("row", "waits for rows"),
        ("room", "waits for room"),
    )
    body += _legend(left, y + 6, keys)
    return _svg(1000, y + 36, title, "; ".join(told), body)


def timeline(title: str, phase: Phase, channel: int) -> str:
    """Returns the timeline of the warps of a channel of the traced rank: working, waiting for rows or for room."""
    tracks = sorted(
        (track for track in phase.tracks if track.channel == channel and track.role in ROLES),
        key=lambda track: (ROLES.index(track.role), track.begin),
    )
    left, right, top, line = 190, 960, 64, 26
    bottom = top + line * len(tracks)
    ticks = _ticks(max(track.end for track in tracks))

    def x(us: float) -> float:
        return left + (right - left) * us / ticks[-1]

    def bar(kind: str, begin: float, end: float, y: float) -> str:
        length = max(0.2, x(end) - x(begin))
        return f'<rect class="{kind}" x="{x(begin):.1f}" y="{y:.1f}" width="{length:.1f}" height="18"/>'

    body = [f'<text class="h" x="16" y="32">{html.escape(title)}</text>']
    for tick in ticks:
        body.append(f'<path class="grid" d="M{x(tick):.1f} {top - 8}V{bottom}"/>')
        body.append(f'<text class="s" x="{x(tick):.1f}" y="{bottom + 18}">{tick:g}</text>')
    body.append(f'<text class="s e" x="{left - 12}" y="{bottom + 18}">µs from the launch on</text>')
    for number, track in enumerate(tracks):
        y = top + line * number
        if number == 0 or track.role != tracks[number - 1].role:
            body.append(f'<text class="e" x="{left - 12}" y="{y + 14}">{track.role}</text>')
        body.append(bar("works", track.begin, track.end, y))
        for wait, begin, end in track.waits:
            body.append(bar(_kind(wait), begin, end, y))
    keys = (("works", "works"), ("row", "waits for rows"), ("room", "waits for room, or for rows to be taken"))
    body += _legend(left, bottom + 32, keys)
    text = "; ".join(f"{track.role} works {_worked(track):.0f} of {track.end - track.begin:.0f} us" for track in tracks)
    return _svg(1000, bottom + 60, title, text, body)


def _worked(track: Track) -> float:
    return track.end - track.begin - sum(end - begin for _, begin, end in track.waits)

"""A rank's warps as a trace for Perfetto and chrome://tracing, with a process per SM and a thread per warp."""

from __future__ import annotations

from typing import Any

from megatron_ep.tools.simulate.predict import Phase


def trace_of(phases: dict[str, Phase]) -> dict[str, Any]:
    """Returns a trace in the format of Chrome's trace events. Phases are consecutive; times are in us."""
    events: list[dict[str, Any]] = []
    start = 0.0
    for name, phase in phases.items():
        for number, track in enumerate(phase.tracks):
            place = {"pid": track.sm, "tid": number}
            events.append({"ph": "M", "name": "process_name", "pid": track.sm, "args": {"name": f"SM {track.sm}"}})
            label = f"{name}: {track.role}, channel {track.channel}"
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": label}})
            at = track.begin
            for wait, begin, end in [*track.waits, ("", track.end, track.end)]:
                if begin > at:
                    span = {"ts": start + at, "dur": begin - at, "name": track.role, "cat": "works"}
                    events.append({"ph": "X", **place, **span})
                if end > begin:
                    span = {"ts": start + begin, "dur": end - begin, "name": f"waits for {wait}", "cat": "waits"}
                    events.append({"ph": "X", **place, **span})
                at = end
        start += phase.us
    return {"traceEvents": events, "displayTimeUnit": "ns"}

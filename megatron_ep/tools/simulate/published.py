"""Published times of others, for pictures: machines/published.csv. docs/benchmarks.md and docs/simulate.md have their
sources. All use network cards of 400 Gb/s, on different hardware."""

from __future__ import annotations

import csv

from megatron_ep.tools.simulate.case import Case
from megatron_ep.tools.simulate.machine import FOLDER


def published_us(case: Case, phase: str) -> dict[str, float]:
    """Returns published us of a phase by publisher, for the shape and ranks of a case. Combined rows are bf16."""
    if not case.uses_network:
        return {}
    dtype = case.dtype if phase == "dispatch" else "bf16"
    shape = (case.mode, case.num_tokens, case.hidden, case.topk, dtype, phase, case.topology.world_size)
    with open(FOLDER / "published.csv", newline="", encoding="utf-8") as lines:
        return {line["who"]: float(line["us"]) for line in csv.DictReader(lines) if _shape(line) == shape}


def _shape(line: dict[str, str]) -> tuple[str | int, ...]:
    sizes = (int(line[name]) for name in ("tokens", "hidden", "topk"))
    return (line["mode"], *sizes, line["dtype"], line["phase"], int(line["ranks"]))

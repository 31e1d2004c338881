"""What others publish, for pictures: machines/published.csv, whose figures docs/benchmarks.md and docs/simulate.md name
with their sources. Over network cards of 400 Gb/s, each with hardware of its own."""

from __future__ import annotations

import csv

from megatron_ep.tools.simulate.case import Case
from megatron_ep.tools.simulate.machine import FOLDER


def published_us(case: Case, phase: str) -> dict[str, float]:
    """us of a phase by who publishes it, for the shape and the ranks of a case. Combine's rows are bf16."""
    if not case.uses_network:
        return {}
    dtype = case.dtype if phase == "dispatch" else "bf16"
    shape = (case.mode, case.num_tokens, case.hidden, case.topk, dtype, phase, case.topology.world_size)
    with open(FOLDER / "published.csv", newline="", encoding="utf-8") as lines:
        return {line["who"]: float(line["us"]) for line in csv.DictReader(lines) if _shape(line) == shape}


def _shape(line: dict[str, str]) -> tuple[str | int, ...]:
    sizes = (int(line[name]) for name in ("tokens", "hidden", "topk"))
    return (line["mode"], *sizes, line["dtype"], line["phase"], int(line["ranks"]))

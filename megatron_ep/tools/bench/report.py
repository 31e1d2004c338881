"""The output of a benchmark: a line about the machine, a table for each case, and all records in a JSON file.

A record is a dict of case, phase, implementation, seconds (the median, as seconds_p50), seconds_min, _p90, _p99 and
_max, bytes, gigabytes_per_second (of the median), and further values that distinguish cases.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ep.diagnosis import env

Record = dict[str, Any]
Columns = dict[str, Callable[[Record], str]]


def make_record(
    case: object, phase: str, implementation: str, seconds: Sequence[float], size: float, **more: Any
) -> Record:
    """Returns the record of a timed step.

    seconds: seconds of each round, or of each rank; not empty.
    size: bytes that a round moves.
    """
    ordered = sorted(seconds)
    return {
        "case": str(case),
        "phase": phase,
        "implementation": implementation,
        "seconds": median(ordered),
        "seconds_min": ordered[0],
        "seconds_p90": _percentile(ordered, 0.9),
        "seconds_p99": _percentile(ordered, 0.99),
        "seconds_max": ordered[-1],
        "bytes": size,
        "gigabytes_per_second": size / median(ordered) / 1e9,
        **more,
    }


@dataclass(frozen=True)
class Measured:
    """The times of a phase on one rank of a benchmark on GPUs: of each round in seconds, and the bytes of a round."""

    case: str
    phase: str
    implementation: str
    seconds: list[float]
    size: float
    settings: dict[str, Any]


def slowest(same: Sequence[Measured]) -> Record:
    """Returns the record of a phase that every rank timed: the slowest rank of each round, and the mean bytes."""
    first = same[0]
    seconds = [max(of_round) for of_round in zip(*(measured.seconds for measured in same), strict=True)]
    size = fmean(measured.size for measured in same)
    return make_record(first.case, first.phase, first.implementation, seconds, size, **first.settings)


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    """Returns the smallest value that at least this fraction of values do not exceed (nearest rank)."""
    return ordered[math.ceil(fraction * len(ordered)) - 1]


def milliseconds(key: str) -> Callable[[Record], str]:
    """Returns the cell function of a column in milliseconds."""
    return lambda record: f"{record[key] * 1e3:.3f}"


WHAT: Columns = {"phase": lambda record: record["phase"], "implementation": lambda record: record["implementation"]}
EXTREMES: Columns = {
    "min ms": milliseconds("seconds_min"),
    "median": milliseconds("seconds"),
    "max": milliseconds("seconds_max"),
}
PERCENTILES: Columns = {
    "p50 ms": milliseconds("seconds"),
    "p90": milliseconds("seconds_p90"),
    "p99": milliseconds("seconds_p99"),
}
RATE: Columns = {"GB/s": lambda record: f"{record['gigabytes_per_second']:.2f}"}


def relative(title: str, baseline: str, records: Iterable[Record]) -> Columns:
    """Returns a column: a record's median over that of the implementation `baseline` in the same phase."""
    base = {record["phase"]: record["seconds"] for record in records if record["implementation"] == baseline}
    return {title: lambda record: f"{record['seconds'] / base[record['phase']]:.2f}"}


class Report:
    """Prints a line about the machine, then each table when it is added, and updates the JSON file, which includes the
    output of `megatron-ep env`.

    path: path of the file, {"environment": ..., "records": [...]}; None: no file.
    rank: rank of this process. Only rank 0 reports.
    """

    def __init__(self, path: Path | None, rank: int = 0) -> None:
        self._path = path if rank == 0 else None
        self.records: list[Record] = []
        width = None if sys.stdout.isatty() else 160  # in a file enough for every table
        self._console = Console(width=width, highlight=False, markup=False, quiet=rank != 0)
        if rank == 0:
            self._environment = env.collect()
            self.say(env.headline(self._environment))

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def add(self, title: str, records: Sequence[Record], columns: Columns) -> None:
        """Prints the records as a table with a title, and writes all records so far to the file."""
        self.say(f"\n{title}")
        table = Table(box=None, padding=(0, 0, 0, 2))
        for name in columns:
            table.add_column(name, justify="left" if name in WHAT else "right", no_wrap=True)
        for record in records:
            table.add_row(*(cell(record) for cell in columns.values()))
        self._console.print(table)
        self.records += records
        if self._path is not None:
            content = {"environment": self._environment, "records": self.records}
            self._path.write_text(json.dumps(content, indent=2) + "\n")

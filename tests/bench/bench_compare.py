"""`tests/bench/run.py compare`: two files that one benchmark wrote, and what got slower between them beyond noise."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ep.tools.bench.report import KEY, Record, make_console, milliseconds, print_table

Pair = tuple[Record, Record]


def main(argv: Sequence[str]) -> int:
    """Prints a row for each thing that both files have timed; returns 1 if one got slower, 2 for another file."""
    parser = argparse.ArgumentParser(
        "run.py compare",
        description="What changed from the first file to the second. A difference counts when each median lies outside "
        "the other run's range from its fastest round to its 90th percentile. Only runs on one machine, one after the "
        "other, say something.",
    )
    parser.add_argument("before", type=Path, help="JSON file of --json")
    parser.add_argument("after", type=Path, help="JSON file of --json")
    options = parser.parse_args(argv)
    try:
        (machine, before), (other_machine, after) = read(options.before), read(options.after)
    except ValueError as error:
        print(f"run.py compare: {error}", file=sys.stderr)
        return 2
    if machine != other_machine:
        print("the files are of different machines or versions of them: see `environment` in both")
    rows = [(record, after[key]) for key, record in before.items() if key in after]
    print_table(make_console(), COLUMNS, rows)
    for path, keys in ((options.before, before.keys() - after.keys()), (options.after, after.keys() - before.keys())):
        for key in sorted(keys):
            print(f"only in {path}: {', '.join(key)}")
    slower = sum(change(*pair) == "SLOWER" for pair in rows)
    print(f"{slower} of {len(rows)} slower")
    return int(slower > 0)


def read(path: Path) -> tuple[Any, dict[tuple[str, ...], Record]]:
    """The environment, and the records that timed something by what they timed. Raises ValueError."""
    try:
        content = json.loads(path.read_text())
        records = {tuple(record[name] for name in KEY): record for record in content["records"] if "seconds" in record}
        return content["environment"], records
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no file of a benchmark's --json ({type(error).__name__}: {error})") from error


def change(before: Record, after: Record) -> str:
    """SLOWER, faster, or nothing when it may be noise."""

    def outside(seconds: float, run: Record) -> bool:
        return not run["seconds_min"] <= seconds <= run["seconds_p90"]

    if not (outside(after["seconds"], before) and outside(before["seconds"], after)):
        return ""
    return "SLOWER" if after["seconds"] > before["seconds"] else "faster"


COLUMNS: dict[str, Callable[[Pair], str]] = {
    "case": lambda pair: pair[0]["case"],
    "phase": lambda pair: pair[0]["phase"],
    "implementation": lambda pair: pair[0]["implementation"],
    "before ms": lambda pair: milliseconds("seconds")(pair[0]),
    "after": lambda pair: milliseconds("seconds")(pair[1]),
    "ratio": lambda pair: f"{pair[1]['seconds'] / pair[0]['seconds']:.2f}",
    "beyond noise": lambda pair: change(*pair),
}

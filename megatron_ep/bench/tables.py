"""`megatron-ep bench tables`: the tables of tests/gpu/RESULTS.md and README.md, of what benchmarks wrote to --json."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ep.bench.compare import read
from megatron_ep.bench.report import Record

Records = dict[tuple[str, ...], Record]  # by case, phase and implementation
OTHER_CLOCKS = ("(api)", "(kernels)")


def main(argv: Sequence[str]) -> int:
    """Prints Markdown; returns 2 for another file."""
    parser = argparse.ArgumentParser(
        "megatron-ep bench tables",
        description="Prints Markdown: for each file its machine and a table of medians in ms (GB/s); then the rows of "
        "README's table that the files have figures for.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of --json")
    try:
        files = [(path, *read(path)) for path in parser.parse_args(argv).files]
    except ValueError as error:
        print(f"megatron-ep bench tables: {error}", file=sys.stderr)
        return 2
    for path, environment, records in files:
        print(f"{path.name}: {_machine(environment)}\n")
        print(*results(records), "", sep="\n")
    rows = [row for _, environment, records in files for row in (*_host_row(records), *_gpus_row(environment, records))]
    if rows:
        print(*_table(["", "", "command"], rows), sep="\n")
    return 0


def results(records: Records) -> list[str]:
    """A row for each case, a column for each phase and implementation, by the events of a GPU or the host's clock."""
    timed = {key: record for key, record in records.items() if not key[1].endswith(OTHER_CLOCKS)}
    columns = list(dict.fromkeys(key[1:] for key in timed))
    rows = []
    for case in dict.fromkeys(key[0] for key in timed):
        cells = [timed.get((case, *column)) for column in columns]
        rows.append([case, *(_cell(record) if record else "" for record in cells)])
    return _table(["", *(", ".join(column) for column in columns)], rows)


def _cell(record: Record) -> str:
    milliseconds = record["seconds"] * 1e3
    digits = 2 if milliseconds < 10 else 0
    return f"{milliseconds:.{digits}f} ({record['gigabytes_per_second']:.0f} GB/s)"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" if cells[0] != "---" else "|" + "---|" * len(head) for cells in lines]


def _machine(environment: Any) -> str:
    gpus = [] if _is_without_gpus(environment) else [gpu.split(", ")[1] for gpu in environment["cuda"]["gpus"]]
    parts = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or [environment["system"]["cpu"]]
    return ", ".join([*parts, f"torch {environment['packages']['torch']}"])


def _is_without_gpus(environment: Any) -> bool:
    return bool(environment["cuda"]["gpus"][0].startswith("none"))


def _host_row(records: Records) -> list[list[str]]:
    """Beside Megatron's all-to-all, dispatch and combine together."""
    ratios = [
        record["seconds"] / records[case, phase, "ours"]["seconds"]
        for (case, phase, implementation), record in records.items()
        if implementation == "megatron_alltoall" and "+" in phase and (case, phase, "ours") in records
    ]
    if not ratios:
        return []
    return [
        ["host", f"{min(ratios):.0f} to {max(ratios):.0f} × Megatron's all-to-all over gloo", "`megatron-ep bench`"]
    ]


def _gpus_row(environment: Any, records: Records) -> list[list[str]]:
    """The quickest dispatch with a cached layout, beside the baselines of the same sizes."""
    ours = [record for key, record in records.items() if key[1:] == ("dispatch", "ours") and record.get("num_sms")]
    nccl = {key[0]: record for key, record in records.items() if key[1:] == ("dispatch", "nccl_all_to_all")}
    if not ours or not nccl:
        return []
    best = max(ours, key=lambda record: record["gigabytes_per_second"])
    baseline = next(case for case in nccl if best["case"].endswith(case.partition(" GPUs ")[2]))
    copy = records.get((baseline, "copy", "to_a_neighbour"))  # none where a process sees its own GPU alone
    of_copy = f" of the {copy['gigabytes_per_second']:.0f} that a copy reaches" if copy else ""
    return [
        [
            f"{_machine(environment).partition(',')[0]}, {best['num_sms']} SMs",
            f"dispatch {best['gigabytes_per_second']:.0f} GB/s{of_copy}; "
            f"{nccl[baseline]['seconds'] / best['seconds']:.1f} × NCCL's all-to-all with its copies",
            "`megatron-ep bench gpus`",
        ]
    ]

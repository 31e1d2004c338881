"""Fits a machine file's constants to measurements, and says how well they predict those that it held out.

    python tests/simulate/calibrate.py MEASURED.csv MACHINE.toml

The table has a line for each figure, see `Figure`; what the new constants predict for it is written there.

Lines of the set "fit" are fitted: least squares of logarithms, by
Gauss and Newton, while each constant that has a `prior` is held near it, so that one that no figure depends on stays.
Lines of the set "held" are not looked at: whole topologies are held out, not lines at random, because a prediction is
of a topology that nobody has measured.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ep.config import Config, Topology, Tuning
from megatron_ep.tools.simulate.case import Case
from megatron_ep.tools.simulate.machine import Machine, tomllib
from megatron_ep.tools.simulate.predict import predict

ROUNDS, STEP = 4, 0.08  # of the fit, and by what part a constant is changed to see what depends on it
CHUNK = 16  # rows of a put, which was the default when the figures of several nodes were measured
PRIOR = 0.15  # a constant that lies so far (of ln) from its prior counts as a figure that is as far off


@dataclass(frozen=True)
class Figure:
    """A line of the table. Ranks reach each other's memory.

    us: of the phase, measured, of the slowest rank.
    predicted: by the constants that were fitted last; nan: by none.
    """

    case: Case
    phase: str
    us: float
    is_held_out: bool
    predicted: float


def read(file: str | Path) -> list[Figure]:
    """Raises ValueError for a table that cannot be read."""
    try:
        with open(file, newline="", encoding="utf-8") as lines:
            return [_figure(line) for line in csv.DictReader(lines)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"measurements {file}: {error}") from None


def _figure(line: dict[str, str]) -> Figure:
    if line["set"] not in ("fit", "held") or line["phase"] not in ("dispatch", "combine"):
        raise ValueError(f"set must be fit or held, phase dispatch or combine: {line}")
    case = Case(
        Topology(int(line["nodes"]), int(line["ranks"])),
        Config(
            num_experts=int(line["experts"]),
            num_sms=int(line["num_sms"]),
            tuning=Tuning(
                channels=int(line["channels"]) if line["channels"] else None,
                local_pass={"on": True, "off": False, "": None}[line["local_pass"]],
                rdma_chunk_tokens=CHUNK,
            ),
        ),
        mode=line["mode"],
        num_tokens=int(line["tokens"]),
        dtype=line["dtype"],
        sum_at=line["sum_at"] or "token",
        maps_rail=True,
    )
    return Figure(case, line["phase"], float(line["us"]), line["set"] == "held", float(line["predicted"] or "nan"))


class Predictor:
    """Predicts figures, with the same tokens each time."""

    def __init__(self) -> None:
        self._choices: dict[Case, Any] = {}

    def errors(self, figures: Iterable[Figure], machine: Machine) -> list[float]:
        """ln of predicted by measured."""
        phases: dict[Case, Any] = {}
        errors = []
        for figure in figures:
            if figure.case not in self._choices:
                self._choices[figure.case] = figure.case.choices()
            if figure.case not in phases:
                choices = self._choices[figure.case]
                phases[figure.case] = predict(figure.case, machine, choices=choices).phases
            errors.append(math.log(phases[figure.case][figure.phase].us / figure.us))
        return errors


def held_out(figures: Sequence[Figure], errors: Sequence[float]) -> dict[str, dict[str, Any]]:
    """Returns for each mode the `summary` of the figures that were held out."""
    by_mode: dict[str, list[float]] = {}
    for figure, off in zip(figures, errors, strict=True):
        if figure.is_held_out:
            by_mode.setdefault(figure.case.mode, []).append(off)
    return {mode: summary(found) for mode, found in by_mode.items()}


def summary(errors: Sequence[float]) -> dict[str, Any]:
    """Median, p90 and worst of how far predictions are off, as parts."""
    off = sorted(abs(math.expm1(error)) for error in errors)
    return {
        "figures": len(off),
        "median": round(off[len(off) // 2], 4),
        "p90": round(off[int(0.9 * len(off))], 4),
        "worst": round(off[-1], 4),
    }


def fit(figures: Sequence[Figure], machine: Machine, prior: Mapping[str, float], predictor: Predictor) -> Machine:
    """The machine with those of its constants that have a prior fitted to the figures."""
    names = list(prior)
    at = torch.zeros(len(names), dtype=torch.float64)

    def machine_at(x: torch.Tensor) -> Machine:
        values = {name: prior[name] * math.exp(value) for name, value in zip(names, x.tolist(), strict=True)}
        return machine.with_constants(**values)

    def errors_at(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(predictor.errors(figures, machine_at(x)), dtype=torch.float64)

    def cost(errors: torch.Tensor, x: torch.Tensor) -> float:
        return float(errors @ errors + PRIOR**2 * (x @ x))

    errors = errors_at(at)
    for _ in range(ROUNDS):
        columns = []
        for i in range(len(names)):
            moved = at.clone()
            moved[i] += math.log1p(STEP)
            columns.append((errors_at(moved) - errors) / math.log1p(STEP))
        slopes = torch.stack(columns, dim=1)
        curvature = slopes.T @ slopes + PRIOR**2 * torch.eye(len(names), dtype=torch.float64)
        step = -torch.linalg.solve(curvature, slopes.T @ errors + PRIOR**2 * at).clamp(-0.35, 0.35)
        tried = [(at + part * step, errors_at(at + part * step)) for part in (1.0, 0.5, 0.25)]
        x, found = min(tried, key=lambda pair: cost(pair[1], pair[0]))
        if cost(found, x) > 0.995 * cost(errors, at):
            break
        at, errors = x, found
        print(f"fitted: {summary(errors.tolist())}", file=sys.stderr)
    return machine_at(at)


def write_predicted(file: str, us: Sequence[float]) -> None:
    with open(file, newline="", encoding="utf-8") as lines:
        table = list(csv.DictReader(lines))
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(table[0]), lineterminator="\n")
        writer.writeheader()
        for line, predicted in zip(table, us, strict=True):
            writer.writerow(line | {"predicted": f"{predicted:.1f}"})


def write(file: Path, found: dict[str, Any]) -> None:
    """A machine file: what it is and its constants, each with where it comes from."""

    def text(value: object) -> str:
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else f"{value}"

    lines = [f"{name} = {text(value)}" for name, value in found.items() if not isinstance(value, dict)]
    for mode, of in found["held_out"].items():
        lines += ["", f"[held_out.{mode}]", *(f"{name} = {text(value)}" for name, value in of.items())]
    for name, entry in found["constants"].items():
        lines += ["", f"[constants.{name}]", *(f"{key} = {text(value)}" for key, value in entry.items())]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m megatron_ep.tools.simulate.calibrate",
        description="Fits the constants of a machine file that have a prior to measurements, and writes them there "
        "with how far those predict what was held out.",
    )
    parser.add_argument("measured", metavar="MEASURED.csv")
    parser.add_argument("machine", metavar="MACHINE.toml", type=Path)
    options = parser.parse_args(arguments)
    try:
        figures = read(options.measured)
        with open(options.machine, "rb") as file:
            found = tomllib.load(file)
        entries = found["constants"]
        constants = {name: float(entry["value"]) for name, entry in entries.items()}
        start = Machine(options.machine.stem, found["sms"], constants, {}, {})
    except (OSError, KeyError, ValueError) as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2
    predictor = Predictor()
    prior = {name: float(entry["prior"]) for name, entry in entries.items() if "prior" in entry}
    machine = fit([figure for figure in figures if not figure.is_held_out], start, prior, predictor)
    for name in prior:
        entries[name]["value"] = float(f"{machine.constants[name]:.5g}")
        entries[name]["fitted"] = time.strftime("%Y-%m-%d", time.gmtime())
    fitted = start.with_constants(**{name: entry["value"] for name, entry in entries.items()})
    errors = predictor.errors(figures, fitted)
    for figure, off in zip(figures, errors, strict=True):
        case, tuning = figure.case, figure.case.config.tuning
        what = f"{case.topology.nodes}x{case.topology.ranks_per_node}, {case.num_sms} SMs, T = {case.num_tokens}"
        if case.is_low_latency:
            what += f", {case.dtype}, low latency, sums at {case.sum_at}"
        else:
            passes = "on" if tuning.local_pass else "off"
            what += f", {tuning.channels or 'default'} channels, {case.dtype}, pass {passes}"
        kind = "held" if figure.is_held_out else "fit "
        print(f"{kind} {what}: {figure.phase} {figure.us:g} us, {math.expm1(off):+.1%}")
    for mode, told in held_out(figures, errors).items():
        print(f"held out, {mode}: {told}")
        found["held_out"][mode] = told | {"measured": found["held_out"][mode]["measured"]}
    write(options.machine, found)
    predicted = [figure.us * math.exp(off) for figure, off in zip(figures, errors, strict=True)]
    write_predicted(options.measured, predicted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

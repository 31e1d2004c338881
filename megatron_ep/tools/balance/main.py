"""`megatron-ep balance TRACE`: how evenly a recorded run's tokens fell on its ranks, and what copies would gain."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ep.tools.arguments import numbers, reason, save

if TYPE_CHECKING:
    from megatron_ep.tools.balance.gain import Gain
    from megatron_ep.tools.balance.spread import LayerSpread, Period
    from megatron_ep.tools.balance.trace import Trace

MAX_ROWS = 12  # of a table of layers; of more layers, those with the least and the most


def main(argv: Sequence[str]) -> int:
    """Prints tables; returns 2 for a user's mistake."""
    options = _parser().parse_args(argv)
    needed = ["numpy", *(["matplotlib"] if options.picture is not None else [])]
    for module in needed:
        if importlib.util.find_spec(module) is None:
            print(f"megatron-ep balance: needs {module}: pip install {module}", file=sys.stderr)
            return 2
    try:
        _balance(options)
    except ValueError as error:
        print(f"megatron-ep balance: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-ep balance",
        description="Prints how evenly the tokens of a recorded run fell on its ranks, over time and layers, how much "
        "of that lasts, and what copies of hot experts on other ranks of a node would save. Nothing of the copies is "
        "built: the tool says whether they would be worth it. Needs no GPU.",
        epilog="example: megatron-ep balance runs/trace --ep 8,64 --node 8 --slots 2,4 --picture balance.png",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="directory that --ep-trace (a recipe's dispatcher.trace) has written, or that Megatron-Core 0.19's "
        "--moe-routing-trace-path has",
    )
    parser.add_argument("--ep", metavar="N", help="ranks that share the experts, or several: 8,64 (as recorded)")
    parser.add_argument("--node", type=int, metavar="G", help="of these, in a node (as recorded, or up to 8)")
    parser.add_argument("--first-step", type=int, metavar="N", help="omit the steps before (none)")
    parser.add_argument("--slots", default="1,2,4", metavar="S", help="copies that fit on a rank (%(default)s)")
    parser.add_argument(
        "--window", type=int, default=100, metavar="N", help="steps over which loads are averaged (%(default)s)"
    )
    parser.add_argument("--experts", type=int, metavar="E", help="of a layer; only for a trace of Megatron's")
    costs = parser.add_argument_group("costs")
    costs.add_argument(
        "--tflops", type=float, default=600.0, metavar="X", help="of the experts' products (%(default)s)"
    )
    costs.add_argument("--gb-s", type=float, default=380.0, metavar="X", help="between GPUs of a node (%(default)s)")
    costs.add_argument(
        "--min-rows", type=int, metavar="M", help="fewest rows a copy is made for (what it takes to pay)"
    )
    costs.add_argument("--expert-parameters", type=int, metavar="P", help="of one expert (as recorded)")
    costs.add_argument("--step-ms", type=float, metavar="X", help="time of a step (as recorded, if on GPUs)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="everything that the tables say, of every layer")
    output.add_argument("--picture", metavar="FILE", help="max/mean over steps and layers, as PNG, SVG or PDF")
    return parser


@dataclass(frozen=True)
class Report:
    """What is said of one number of ranks."""

    trace: Trace
    ranks_per_node: int
    layers: list[LayerSpread]
    periods: list[Period]
    gains: list[Gain]
    verdict: str


def _balance(options: argparse.Namespace) -> None:
    from megatron_ep.tools.balance.trace import regrouped, since

    _check(options)
    slots = _counts("--slots", options.slots, 1 << 10)
    wanted = None if options.ep is None else _counts("--ep", options.ep, 1 << 16)
    trace = _read(options, wanted[0] if wanted and len(wanted) == 1 else None)
    if options.first_step is not None:
        trace = since(trace, options.first_step)
    reports = [_report(regrouped(trace, ep), options, slots) for ep in wanted or [trace.expert_ranks]]
    for number, report in enumerate(reports):
        print(*([""] if number else []), *_text(report), sep="\n")
    if options.json is not None:
        save("--json", options.json, json.dumps([_as_json(report) for report in reports], indent=1) + "\n")
    if options.picture is not None:
        from megatron_ep.tools.balance.picture import draw

        try:
            draw(reports[0].trace, reports[0].layers, options.picture)
        except (OSError, ValueError) as error:
            raise ValueError(f"--picture {options.picture}: {reason(error)}") from None


def _check(options: argparse.Namespace) -> None:
    from megatron_ep.config import require_int

    for name, most in {
        "--node": 1 << 16,
        "--first-step": 1 << 31,
        "--experts": 1 << 16,
        "--window": 1 << 30,
        "--min-rows": 1 << 40,
        "--expert-parameters": 1 << 50,
    }.items():
        value = getattr(options, name[2:].replace("-", "_"))
        if value is not None:
            require_int(name, value, 1, most)
    for name in ("--tflops", "--gb-s", "--step-ms"):
        value = getattr(options, name[2:].replace("-", "_"))
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}, must be a number over 0")


def _counts(name: str, text: str, most: int) -> list[int]:
    from megatron_ep.config import require_int

    counts = numbers(name, text)
    for count in counts:
        require_int(name, count, 1, most)
    return counts


def _read(options: argparse.Namespace, expert_ranks: int | None) -> Trace:
    from megatron_ep.megatron import trace_file
    from megatron_ep.tools.balance import megatron_trace, trace

    directory = Path(options.trace)
    if not directory.is_dir():
        raise ValueError(f"{directory}: is no directory")
    if any(directory.glob(f"*{trace_file.SUFFIX}")):
        if options.experts is not None:
            raise ValueError(f"--experts is {options.experts}, but {directory} says how many there are: leave it out")
        return trace.read(directory)
    if any(directory.glob(megatron_trace.PATTERN)):
        return megatron_trace.read(directory, options.experts, expert_ranks)
    raise ValueError(
        f"{directory}: holds no trace, neither of --ep-trace (*{trace_file.SUFFIX}) nor of Megatron "
        f"({megatron_trace.PATTERN})"
    )


def _report(trace: Trace, options: argparse.Namespace, slots: Sequence[int]) -> Report:
    from megatron_ep.tools.balance import gain, spread

    node = options.node or min(trace.ranks_per_node or 8, trace.expert_ranks)
    if trace.expert_ranks % node:
        raise ValueError(f"--node is {node}, must divide the {trace.expert_ranks} ranks that share the experts")
    recorded_ms = None if trace.device in (None, "cpu") or trace.scaled > 1 else trace.step_ms
    costs = gain.Costs(
        machine=gain.Machine(options.tflops, options.gb_s),
        expert_parameters=options.expert_parameters or trace.expert_parameters,
        step_ms=options.step_ms or recorded_ms,
        min_rows=options.min_rows,
    )
    if options.step_ms is not None and costs.expert_parameters is None:
        raise ValueError("--step-ms needs --expert-parameters: the trace does not say how large an expert is")
    gains = [
        gain.gain(trace, node, number, exposure, costs)
        for number in slots
        for exposure in (gain.PLAIN, gain.OVERLAPPED)
    ]
    return Report(
        trace=trace,
        ranks_per_node=node,
        layers=spread.layers(trace, node, options.window),
        periods=spread.periods(trace),
        gains=gains,
        verdict=gain.verdict(gains),
    )


def _text(report: Report) -> list[str]:
    trace, node = report.trace, report.ranks_per_node
    steps = {step for group in trace.groups for step in group.steps.tolist()}
    passes = sum(len(group.steps) for group in trace.groups)
    rows = sum(int(group.counts.sum()) for group in trace.groups) / max(1, passes) / trace.expert_ranks * trace.scaled
    read = f"{len(steps)} of " if len(steps) < trace.recorded_steps else ""
    lines = [
        f"{trace.expert_ranks // node} x {node} ranks, {trace.num_experts} experts, top-{trace.topk}: {read}"
        f"{trace.recorded_steps} steps, {passes:,} passes of a layer, {rows:,.0f} rows a rank and pass"
    ]
    if trace.scaled > 1:
        lines.append(f"an estimate: the tokens of each rank of the trace stand for those of {trace.scaled} ranks")
    lines += ["", "rows of the rank with the most over the mean", *_layer_table(report), "", *_period_table(report)]
    return [*lines, "", *_gain_table(report), "", report.verdict]


def _layer_table(report: Report) -> list[str]:
    between = report.trace.expert_ranks > report.ranks_per_node
    names = ["p50", "p95", "most", "mean", "lasting", "momentary", *(["nodes"] if between else [])]
    names += ["2nd half", "placed"]
    lines = [f"{'layer':>8}" + "".join(f"{name:>11}" for name in names)]
    chosen = report.layers
    if len(chosen) > MAX_ROWS:
        half = MAX_ROWS // 2
        by_mean = sorted(chosen, key=lambda layer: layer.mean)
        kept = {layer.layer for layer in (*by_mean[:half], *by_mean[-half:])}
        chosen = [layer for layer in chosen if layer.layer in kept]
    for layer in chosen:
        values = [layer.p50, layer.p95, layer.most, layer.mean, layer.lasting, layer.momentary]
        values += [layer.between_nodes] if between else []
        values += [layer.second_half, layer.placed]
        lines.append(f"{layer.layer:>8}" + "".join(f"{value:11.3f}" for value in values).replace("-0.000", " 0.000"))
    if len(chosen) < len(report.layers):
        lines.append(f"{'':>8}   of {len(report.layers)} layers those with the least and the most; --json has all")
    return lines


def _period_table(report: Report) -> list[str]:
    lines = [f"{'steps':>15}{'p50':>11}{'p95':>11}{'mean':>11}"]
    for period in report.periods:
        steps = f"{period.first} to {period.last}"
        lines.append(f"{steps:>15}{period.p50:11.3f}{period.p95:11.3f}{period.mean:11.3f}")
    return lines


def _gain_table(report: Report) -> list[str]:
    knows_size = report.gains[0].slot_bytes is not None
    unit = "ms" if knows_size else "rows"
    lines = [
        "copies of hot experts inside a node; lost: to waiting, and to what of the copies nothing hides, in a step",
        f"{'slots':>8}{'':3}{'':12}{'from rows':>11}{'max/mean':>11}{'copies':>9}{'on a link':>11}{f'lost, {unit}':>13}"
        f"{'instead of':>12}{'saved':>9}" + (f"{'a rank, MB':>12}" if knows_size else ""),
    ]
    for one in report.gains:
        memory = "" if one.slot_bytes is None else f"{one.slot_bytes / 1e6:12,.1f}"
        lines.append(
            f"{one.slots:>8}{'':3}{one.exposure.name:12}{one.min_rows:>11,}{one.spread[1]:11.3f}{one.copies:9.2f}"
            f"{one.busiest:11.2f}{one.lost[1]:13,.2f}{one.lost[0]:12,.2f}{max(0.0, one.saved):9.1%}{memory}"
        )
    return lines


def _as_json(report: Report) -> dict[str, Any]:
    from megatron_ep.tools.balance import spread

    trace = report.trace
    return {
        "expert_ranks": trace.expert_ranks,
        "ranks_per_node": report.ranks_per_node,
        "num_experts": trace.num_experts,
        "topk": trace.topk,
        "recorded_steps": trace.recorded_steps,
        "scaled": trace.scaled,
        "device": trace.device,
        "step_ms": trace.step_ms,
        "layers": [_finite(dataclasses.asdict(layer)) for layer in report.layers],
        "periods": [dataclasses.asdict(period) for period in report.periods],
        "places": {str(layer): order for layer, order in spread.places(trace).items()},
        "gains": [dataclasses.asdict(one) for one in report.gains],
        "verdict": report.verdict,
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """NaN is no JSON."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}

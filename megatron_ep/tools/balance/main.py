"""`megatron-ep balance TRACE`: the balance of a recorded run's tokens over its ranks."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ep.tools.arguments import output_file, require_ints

if TYPE_CHECKING:
    from megatron_ep.tools.balance.spread import LayerSpread, Period
    from megatron_ep.tools.balance.trace import Trace

MAX_ROWS = 12  # rows of a table of layers, which has the best and worst of more layers


def main(argv: Sequence[str]) -> int:
    """Prints tables."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("numpy") is None:
        raise ValueError("needs numpy: pip install numpy")
    from megatron_ep.tools.balance import spread
    from megatron_ep.tools.balance.trace import since

    require_ints(options, 1, 1 << 31, "first_step", "experts", "ep")
    trace = _read(options)
    if options.first_step is not None:
        trace = since(trace, options.first_step)
    layers, periods = spread.layers(trace), spread.periods(trace)
    print(_headline(trace), "", "rows of the rank with the most over the mean", sep="\n")
    print(*_layer_table(layers), "", *_period_table(periods), sep="\n")
    if options.json is not None:
        report = {
            "expert_ranks": trace.expert_ranks,
            "num_experts": trace.num_experts,
            "topk": trace.topk,
            "recorded_steps": trace.recorded_steps,
            "layers": [
                {name: None if value != value else value for name, value in dataclasses.asdict(layer).items()}
                for layer in layers  # JSON has no NaN
            ],
            "periods": [dataclasses.asdict(period) for period in periods],
            "places": {str(layer): order for layer, order in spread.places(trace).items()},
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-ep balance",
        description="Prints how evenly the tokens of a recorded run fell on its ranks, over time and layers, and what "
        "another placement of the experts would change. Needs no GPU.",
        epilog="example: megatron-ep balance runs/trace --first-step 100 --json balance.json",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="directory that --ep-trace (a recipe's dispatcher.trace) has written, or that Megatron-Core 0.19's "
        "--moe-routing-trace-path has",
    )
    parser.add_argument("--first-step", type=int, metavar="N", help="omit the steps before (none)")
    theirs = parser.add_argument_group("traces of Megatron's, which lack these")
    theirs.add_argument("--experts", type=int, metavar="E", help="of a layer")
    theirs.add_argument("--ep", type=int, metavar="N", help="ranks that share the experts (all)")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="everything that the tables say, of every layer"
    )
    return parser


def _read(options: argparse.Namespace) -> Trace:
    from megatron_ep.megatron import trace_file
    from megatron_ep.tools.balance import megatron_trace, trace

    directory = Path(options.trace)
    if not directory.is_dir():
        raise ValueError(f"{directory}: is no directory")
    if any(directory.glob(f"*{trace_file.SUFFIX}")):
        for name in ("experts", "ep"):
            value = getattr(options, name)
            if value is not None:
                raise ValueError(f"--{name} is {value}, but {directory} says how many there are: omit it")
        return trace.read(directory)
    if any(directory.glob(megatron_trace.PATTERN)):
        return megatron_trace.read(directory, options.experts, options.ep)
    raise ValueError(
        f"{directory}: holds no trace, neither of --ep-trace (*{trace_file.SUFFIX}) nor of Megatron "
        f"({megatron_trace.PATTERN})"
    )


def _headline(trace: Trace) -> str:
    steps = {step for group in trace.groups for step in group.steps.tolist()}
    passes = sum(len(group.steps) for group in trace.groups)
    rows = sum(int(group.counts.sum()) for group in trace.groups) / max(1, passes) / trace.expert_ranks
    read = f"{len(steps)} of " if len(steps) < trace.recorded_steps else ""
    return (
        f"{trace.expert_ranks} ranks, {trace.num_experts} experts, top-{trace.topk}: {read}{trace.recorded_steps} "
        f"steps, {passes:,} passes of a layer, {rows:,.0f} rows a rank and pass"
    )


def _layer_table(layers: Sequence[LayerSpread]) -> list[str]:
    names = ["p50", "p95", "most", "mean", "2nd half", "placed"]
    lines = [f"{'layer':>8}" + "".join(f"{name:>11}" for name in names)]
    by_mean = sorted(layers, key=lambda layer: layer.mean)
    half = MAX_ROWS // 2
    kept = {layer.layer for layer in (by_mean[:half] + by_mean[-half:] if len(layers) > MAX_ROWS else layers)}
    for layer in layers:
        if layer.layer in kept:
            number, *values = dataclasses.astuple(layer)
            lines.append(f"{number:>8}" + "".join(f"{value:11.3f}" for value in values))
    if len(kept) < len(layers):
        lines.append(f"{'':>8}   of {len(layers)} layers those with the least and the most; --json has all")
    return lines


def _period_table(periods: Sequence[Period]) -> list[str]:
    lines = [f"{'steps':>15}{'p50':>11}{'p95':>11}{'mean':>11}"]
    for period in periods:
        steps = f"{period.first} to {period.last}"
        lines.append(f"{steps:>15}{period.p50:11.3f}{period.p95:11.3f}{period.mean:11.3f}")
    return lines

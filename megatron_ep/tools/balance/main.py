"""`megatron-ep balance TRACE`: the balance of a recorded run's tokens over its ranks."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ep.config import require_int
from megatron_ep.tools.arguments import numbers, output_file, require_ints

if TYPE_CHECKING:
    from megatron_ep.tools.balance.copies import Gain
    from megatron_ep.tools.balance.spread import LayerSpread, Period
    from megatron_ep.tools.balance.trace import Trace

MAX_ROWS = 12  # rows of a table of layers, which has the best and worst of more layers


def main(argv: Sequence[str]) -> int:
    """Prints tables."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("numpy") is None:
        raise ValueError("needs numpy: pip install numpy")
    from megatron_ep.tools.balance import spread
    from megatron_ep.tools.balance.trace import folded, merged, since

    require_ints(options, 1, 1 << 31, "first_step", "experts", "ep", "fold", "merge", "node", "hidden", "ffn", "tokens")
    trace = _read(options)
    if options.first_step is not None:
        trace = since(trace, options.first_step)
    if options.merge is not None:
        trace = merged(trace, options.merge)
    if options.fold is not None:
        trace = folded(trace, options.fold)
    gains = _gains(options, trace)
    layers, periods = spread.layers(trace), spread.periods(trace)
    print(_headline(trace), "", "rows of the rank with the most over the mean", sep="\n")
    print(*_layer_table(layers), "", *_period_table(periods), sep="\n")
    if gains:
        print("", *_gain_table(options, gains), sep="\n")
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
            "copies": [dataclasses.asdict(gain) for of_slots in gains for gain in of_slots],
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
    parser.add_argument("--fold", type=int, metavar="W", help="as if W ranks shared the experts (as many as did)")
    parser.add_argument(
        "--merge",
        type=int,
        metavar="N",
        help="add N consecutive passes of a layer to one, which has as many tokens as N times as many ranks send (1)",
    )
    copies = parser.add_argument_group(
        "prediction",
        "What copies of experts with many rows on ranks with few would gain, chosen anew in each pass. The layer is "
        "the one to predict; the trace's rows are scaled to it.",
    )
    copies.add_argument("--copies", metavar="B", help="on a rank at most; several to compare: 1,2,4")
    copies.add_argument("--node", type=int, metavar="G", help="ranks of a node, in which copies stay (all ranks)")
    copies.add_argument("--hidden", type=int, default=7168, metavar="H", help="(%(default)s)")
    copies.add_argument("--ffn", type=int, default=2048, metavar="F", help="width of an expert (%(default)s)")
    copies.add_argument("--tokens", type=int, default=4096, metavar="T", help="per rank (%(default)s)")
    copies.add_argument(
        "--share",
        type=float,
        default=0.25,
        metavar="S",
        help="part of an evenly loaded step that grows as the rows of the busiest rank do: that of the experts, and "
        "about a third of that of dispatch and combine (%(default)s)",
    )
    copies.add_argument("--gb-s", type=float, metavar="R", help="for weights and gradients (NVLink of h200_nvlink)")
    theirs = parser.add_argument_group("traces of Megatron's, which lack these")
    theirs.add_argument("--experts", type=int, metavar="E", help="of a layer")
    theirs.add_argument("--ep", type=int, metavar="N", help="ranks that share the experts (all)")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="everything that the tables say, of every layer"
    )
    return parser


def _gains(options: argparse.Namespace, trace: Trace) -> list[list[Gain]]:
    """Returns the gains of each number of copies, in the parts of the run and in the whole."""
    from megatron_ep.tools.balance import copies
    from megatron_ep.tools.simulate import Machine
    from megatron_ep.tools.simulate.main import EXPERT_TFLOPS

    if options.copies is None:
        if options.node is not None:
            raise ValueError(f"--node is {options.node}, which only --copies uses")
        return []
    ranks = trace.expert_ranks
    if options.node is not None and ranks % options.node:
        raise ValueError(f"--node is {options.node}, must divide the {ranks} ranks")
    for name, most in (("share", 1.0), ("gb_s", float("inf"))):
        value = getattr(options, name)
        if value is not None and not 0 < value <= most:
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}, must be greater than 0 and at most {most:g}")
    layer = copies.Layer(
        weights=3 * options.hidden * options.ffn,  # SwiGLU
        rows=options.tokens * trace.topk,
        share=options.share,
        tflops=EXPERT_TFLOPS,
        gb_s=options.gb_s or Machine.default(uses_network=False).constants["link"],
    )
    slots = numbers("--copies", options.copies)
    for each in slots:
        require_int("--copies", each, 1, trace.num_experts)
    return [copies.gains(trace, layer, each, options.node) for each in slots]


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


def _gain_table(options: argparse.Namespace, gains: Sequence[Sequence[Gain]]) -> list[str]:
    where = "" if options.node is None else f" within nodes of {options.node}"
    lines = [
        f"predicted with B copies a rank{where}: max/mean, copies of a pass on all ranks, and % of a step gained, from "
        "all transfers exposed to all hidden",
        f"{'steps':>15}{'without':>9}" + "".join(f"{f'B = {of_slots[0].slots}':>30}" for of_slots in gains),
    ]
    for same in zip(*gains, strict=True):
        steps = f"{same[0].first} to {same[0].last}"
        cells = (f"{g.after:9.3f}{g.copies:7.1f}{100 * g.least:6.1f} to{100 * g.most:5.1f}" for g in same)
        lines.append(f"{steps:>15}{same[0].before:9.3f}" + "".join(cells))
    return lines

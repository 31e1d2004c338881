"""`megatron-ep balance TRACE`: the balance of a recorded run's tokens over its ranks."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ep.tools.arguments import save

if TYPE_CHECKING:
    from megatron_ep.tools.balance.spread import LayerSpread, Period
    from megatron_ep.tools.balance.trace import Trace

MAX_ROWS = 12  # rows of a table of layers, which has the best and worst of more layers


def main(argv: Sequence[str]) -> int:
    """Prints tables."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("numpy") is None:
        raise ValueError("needs numpy: pip install numpy")
    _balance(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-ep balance",
        description="Prints how evenly the tokens of a recorded run fell on its ranks, over time and layers, how much "
        "of that lasts, and what another placement of the experts would change. Needs no GPU.",
        epilog="example: megatron-ep balance runs/trace --first-step 100 --json balance.json",
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="directory that --ep-trace (a recipe's dispatcher.trace) has written, or that Megatron-Core 0.19's "
        "--moe-routing-trace-path has",
    )
    parser.add_argument("--node", type=int, metavar="G", help="ranks of a node (as recorded, or up to 8)")
    parser.add_argument("--first-step", type=int, metavar="N", help="omit the steps before (none)")
    parser.add_argument(
        "--window", type=int, default=100, metavar="N", help="steps over which loads are averaged (%(default)s)"
    )
    theirs = parser.add_argument_group("traces of Megatron's, which lack these")
    theirs.add_argument("--experts", type=int, metavar="E", help="of a layer")
    theirs.add_argument("--ep", type=int, metavar="N", help="ranks that share the experts (all)")
    parser.add_argument("--json", metavar="FILE", help="everything that the tables say, of every layer")
    return parser


@dataclass(frozen=True)
class Report:
    trace: Trace
    ranks_per_node: int
    layers: list[LayerSpread]
    periods: list[Period]


def _balance(options: argparse.Namespace) -> None:
    from megatron_ep.config import require_int
    from megatron_ep.tools.balance import spread
    from megatron_ep.tools.balance.trace import since

    for name in ("node", "first_step", "window", "experts", "ep"):
        value = getattr(options, name)
        if value is not None:
            require_int("--" + name.replace("_", "-"), value, 1, 1 << 31)
    trace = _read(options)
    if options.first_step is not None:
        trace = since(trace, options.first_step)
    node = options.node or min(trace.ranks_per_node or 8, trace.expert_ranks)
    if trace.expert_ranks % node:
        raise ValueError(f"--node is {node}, must divide the {trace.expert_ranks} ranks that share the experts")
    report = Report(trace, node, spread.layers(trace, node, options.window), spread.periods(trace))
    print(*_text(report), sep="\n")
    if options.json is not None:
        save("--json", options.json, json.dumps(_as_json(report), indent=1) + "\n")


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


def _text(report: Report) -> list[str]:
    trace, node = report.trace, report.ranks_per_node
    steps = {step for group in trace.groups for step in group.steps.tolist()}
    passes = sum(len(group.steps) for group in trace.groups)
    rows = sum(int(group.counts.sum()) for group in trace.groups) / max(1, passes) / trace.expert_ranks
    read = f"{len(steps)} of " if len(steps) < trace.recorded_steps else ""
    lines = [
        f"{trace.expert_ranks // node} x {node} ranks, {trace.num_experts} experts, top-{trace.topk}: {read}"
        f"{trace.recorded_steps} steps, {passes:,} passes of a layer, {rows:,.0f} rows a rank and pass"
    ]
    return [
        *lines,
        "",
        "rows of the rank with the most over the mean",
        *_layer_table(report),
        "",
        *_period_table(report),
    ]


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


def _as_json(report: Report) -> dict[str, Any]:
    from megatron_ep.tools.balance import spread

    trace = report.trace
    return {
        "expert_ranks": trace.expert_ranks,
        "ranks_per_node": report.ranks_per_node,
        "num_experts": trace.num_experts,
        "topk": trace.topk,
        "recorded_steps": trace.recorded_steps,
        "layers": [_finite(dataclasses.asdict(layer)) for layer in report.layers],
        "periods": [dataclasses.asdict(period) for period in report.periods],
        "places": {str(layer): order for layer, order in spread.places(trace).items()},
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces NaN, which is not JSON."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()}

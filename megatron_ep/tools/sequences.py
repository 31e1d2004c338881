"""`megatron-ep sequences`: the gain of balancing attention over ranks for given documents, and the bytes it moves."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_ep.config import MAX_ROWS, Topology
from megatron_ep.sequences.plan import MAX_RANKS, SequencePlan, Shard
from megatron_ep.sequences.planner import MAX_BYTES, RowBytes, balance, bytes_between, computed_at_home, cut_evenly
from megatron_ep.tools.arguments import require_ints
from megatron_ep.tools.simulate import Machine, progress
from megatron_ep.tools.simulate.predict import machines_in_band
from megatron_ep.tools.simulate.sequences import WAYS, predict_ways, times_of


def main(argv: Sequence[str]) -> int:
    """Prints a table."""
    options = _parser().parse_args(argv)
    _check(options)
    q, kv = (
        heads * options.head_dim * torch.bfloat16.itemsize for heads in (options.query_heads, 2 * options.kv_heads)
    )
    row_bytes = RowBytes(q=q, kv=kv, out=q)
    shards = _read(options.file, options.ranks)
    plans = {"at home": SequencePlan.build(computed_at_home(shards), options.ranks)}
    started = time.process_time()
    balanced = balance(shards, options.ranks, block=options.block, row_bytes=row_bytes, max_bytes=options.max_bytes)
    planned = time.process_time()
    plans["balanced"] = SequencePlan.build(balanced, options.ranks)
    built = time.process_time()
    documents, rows = len({shard.document for shard in shards}), sum(shard.length for shard in shards)
    print(
        f"{documents:,} documents, {rows:,} rows, {options.ranks} ranks; of a core, balancing took "
        f"{1e3 * (planned - started):.0f} ms, the tables of the result {1e3 * (built - planned):.0f} ms"
    )
    _print_table(plans, row_bytes)
    if options.predict:
        _print_times(options, plans, row_bytes)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "megatron-ep sequences",
        description="Prints how evenly causal attention is spread over the ranks, and the bytes that Q, K, V and the "
        "output move in a forward pass (bf16): with attention where rows are at home, and balanced by the planner.",
        epilog="example: megatron-ep sequences lengths.txt --ranks 64 --max-bytes 2000000000",
    )
    parser.add_argument(
        "file",
        metavar="LENGTHS",
        help="a document's length a line: these documents are laid one behind the other and cut evenly over the ranks",
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="W", help="ranks that share the documents")
    parser.add_argument("--block", type=int, default=128, metavar="N", help="cut at multiples of N rows (default: 128)")
    parser.add_argument("--max-bytes", type=int, metavar="N", help="no rank sends or receives more (default: no bound)")
    parser.add_argument("--query-heads", type=int, default=64, metavar="N", help="per rank (default: 64)")
    parser.add_argument("--kv-heads", type=int, default=8, metavar="N", help="per rank (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, metavar="N", help="width of a head (default: 128)")
    times = parser.add_argument_group("what moving takes", "The protocol in virtual time, as `megatron-ep simulate`.")
    times.add_argument("--predict", action="store_true", help="print it")
    times.add_argument("--ranks-per-node", type=int, metavar="N", help="(all of them: one node)")
    times.add_argument("--machine", help="machine file, or the name of one that comes along (as of `simulate`)")
    times.add_argument("--num-sms", type=int, metavar="N", help="SMs per rank that move rows (half of a GPU)")
    times.add_argument("--no-band", action="store_true", help="one guess for what is open about the network card")
    return parser


def _check(options: argparse.Namespace) -> None:
    require_ints(options, 1, MAX_RANKS, "ranks")
    require_ints(options, 1, MAX_ROWS, "block")
    require_ints(options, 1, 1 << 12, "query_heads", "kv_heads", "head_dim")
    require_ints(options, 0, MAX_BYTES, "max_bytes")
    require_ints(options, 1, options.ranks, "ranks_per_node")
    require_ints(options, 1, 1 << 10, "num_sms")
    for name in ("ranks_per_node", "machine", "num_sms", "no_band"):
        if getattr(options, name) and not options.predict:
            raise ValueError(f"--{name.replace('_', '-')}: only with --predict")
    if options.ranks_per_node is not None and options.ranks % options.ranks_per_node:
        raise ValueError(f"--ranks-per-node is {options.ranks_per_node}, must divide the {options.ranks} ranks")


def _read(file: str, ranks: int) -> list[Shard]:
    try:
        return cut_evenly(_lengths(Path(file).read_text(encoding="utf-8")), ranks)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


def _lengths(text: str) -> list[int]:
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip().isdecimal() or int(line) > MAX_ROWS:
            raise ValueError(f"line {number}: {line!r} is no length of at most {MAX_ROWS}")
    return [int(line) for line in lines]


def _print_table(plans: dict[str, SequencePlan], row_bytes: RowBytes) -> None:
    print(f"{'attention':16}{'load, max / mean':>18}{'moved, GB':>12}{'most sent by a rank':>22}{'received':>12}")
    for name, plan in plans.items():
        moved = bytes_between(plan, row_bytes)
        sent, received = int(moved.sum(1).max()), int(moved.sum(0).max())
        print(
            f"{name:16}{_imbalance(plan):18.3f}{int(moved.sum()) / 1e9:12.3f}{sent / 1e9:22.3f}{received / 1e9:12.3f}"
        )


def _print_times(options: argparse.Namespace, plans: dict[str, SequencePlan], row_bytes: RowBytes) -> None:
    per_node = options.ranks_per_node or options.ranks
    topology = Topology(options.ranks // per_node, per_node)
    several_nodes = topology.nodes > 1
    machine = Machine.load(options.machine) if options.machine else Machine.default(several_nodes)
    machines = [machine, *(machines_in_band(machine) if several_nodes and not options.no_band else ())]
    sms = machine.sms // 2 if options.num_sms is None else options.num_sms
    print(
        f"\nPredicted on {machine.name}, {topology.nodes} x {per_node} ranks, {sms} SMs, ms of the slowest rank; no "
        "call of these was among what the constants were fitted to"
    )
    columns = (*WAYS, "there and back", "with gradients")
    print(f"{'attention':16}" + "".join(f"{name:>{max(10, len(name) + 2)}}" for name in columns) + "   waits for")
    for name, plan in plans.items():
        with progress.shown(name) as on_progress:
            found = [
                predict_ways(plan, topology, each, row_bytes=row_bytes, num_sms=sms, on_progress=on_progress)
                for each in machines
            ]
        times = [times_of(phases) for phases in found]
        line = "".join(f"{times[0][column]:{max(10, len(column) + 2)}.2f}" for column in columns)
        longest = max(WAYS, key=lambda way: found[0][way].us)
        print(f"{name:16}{line}   {longest}: {found[0][longest].bottleneck}", flush=True)
        if len(times) > 1:
            both = [each["there and back"] for each in times]
            print(f"{'':16}there and back {min(both):.2f} to {max(both):.2f}, by what is guessed of the network card")


def _imbalance(plan: SequencePlan) -> float:
    """Returns the largest load over the mean; 1 if there is no load."""
    pairs = plan.attention_pairs.double()
    return float(pairs.max() / pairs.mean()) if pairs.any() else 1.0

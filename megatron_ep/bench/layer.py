"""`megatron-ep bench`: dispatch and combine beside Megatron's all-to-all dispatcher and a memory copy, in one run.

All three move the same tokens, in turns, each rank a process with one thread. Dispatch is everything from a layer's
hidden states, routing map and probabilities to expert-grouped rows, counts and their probabilities; combine is the way
back. T tokens on this rank, H hidden, E experts, K picks of a token, R rows received.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import env
from megatron_ep import megatron as megatron_side
from megatron_ep.bench.common import positive, write_json
from megatron_ep.bench.local_ranks import LocalRanks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PHASES = ("dispatch", "combine", "dispatch+combine")
Steps = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Case:
    nodes: int
    ranks_per_node: int
    dtype: str
    tokens: int
    hidden: int
    topk: int
    experts: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        sizes = f"T={self.tokens} H={self.hidden} K={self.topk} E={self.experts}"
        return f"{self.nodes}x{self.ranks_per_node} {self.dtype} {sizes}"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark, or the one that the first argument names."""
    if argv and argv[0] in ("router", "cuda", "gpus"):
        return importlib.import_module(f"megatron_ep.bench.{argv[0]}").main(argv[1:])
    arguments = _parse(argv)
    print(env.render(), flush=True)
    beside_megatron = megatron_side.is_installed()
    if not beside_megatron:
        print("\nmegatron_alltoall skipped: megatron-core is not installed", flush=True)
    records = []
    for nodes, ranks_per_node in arguments.topologies:
        with LocalRanks(nodes * ranks_per_node, arguments.timeout) as ranks:
            for dtype in arguments.dtype:
                sizes = (arguments.tokens, arguments.hidden, arguments.topk, arguments.experts)
                case = Case(nodes, ranks_per_node, dtype, *sizes)
                measured = _records(case, ranks.run(measure, case, beside_megatron, arguments.warmup, arguments.iters))
                print(_table(case, measured), flush=True)
                records += measured
    write_json(arguments.json, records)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "megatron-ep bench",
        description="Times dispatch and combine, ours, Megatron's all-to-all over gloo, and a copy of the same bytes. "
        "Without --nodes and --ranks-per-node: 1x2 and 2x2 ranks. 'bench router' times the router, "
        "'bench cuda' all ranks on one GPU, 'bench gpus' a rank on each.",
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="nodes; all ranks run on this machine all the same")
    parser.add_argument("--ranks-per-node", type=positive, metavar="G", help="ranks of a node")
    parser.add_argument("--tokens", type=positive, default=4096, metavar="T", help="tokens of a rank (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=2048, metavar="H", help="(%(default)s)")
    parser.add_argument("--topk", type=positive, default=8, metavar="K", help="experts of a token (%(default)s)")
    parser.add_argument("--experts", type=positive, default=64, metavar="E", help="in all (%(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="(fp32 bf16)")
    parser.add_argument("--iters", type=positive, default=5, metavar="N", help="timed rounds (%(default)s)")
    parser.add_argument("--warmup", type=positive, default=2, metavar="N", help="rounds before (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="limit of one case (%(default)s s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")
    arguments = parser.parse_args(argv)
    if (arguments.nodes is None) != (arguments.ranks_per_node is None):
        parser.error("--nodes and --ranks-per-node go together")
    default = arguments.nodes is None
    arguments.topologies = [(1, 2), (2, 2)] if default else [(arguments.nodes, arguments.ranks_per_node)]
    for nodes, ranks_per_node in arguments.topologies:
        if arguments.experts % (nodes * ranks_per_node):
            parser.error(f"--experts {arguments.experts} is not a multiple of {nodes}x{ranks_per_node} ranks")
    if arguments.topk > min(arguments.experts, 32):
        parser.error(f"--topk {arguments.topk} is over {min(arguments.experts, 32)}: --experts, and at most 32")
    return arguments


# ---- on every rank


def measure(case: Case, beside_megatron: bool, warmup: int, iterations: int) -> dict[str, dict[str, Any]]:
    """Runs on every rank of a gloo world. Returns for each implementation seconds [iterations] of each phase, bytes."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(DTYPES[case.dtype])
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    weights, topk_idx = scores.softmax(dim=1).topk(case.topk, dim=1)
    with torch.no_grad():
        if beside_megatron:
            return _measure_beside_megatron(case, x, topk_idx, weights, warmup, iterations)
        config = ep.Config(num_experts=case.experts)
        with ep.Buffer(dist.group.WORLD, config, ep.Topology(case.nodes, case.ranks_per_node)) as buffer:
            steps = {"ours": _steps_of_buffer(buffer, x, topk_idx, weights)}
            return _measure_in_turns(steps, warmup, iterations)


def _measure_beside_megatron(
    case: Case, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, warmup: int, iterations: int
) -> dict[str, dict[str, Any]]:
    from megatron_ep.megatron import equivalence
    from megatron_ep.megatron.dispatcher import close_buffers, configure

    equivalence.join_layout(tensor_parallel_size=1, expert_parallel_size=case.world_size)
    configure(ep.Topology(case.nodes, case.ranks_per_node))
    config = equivalence.make_config(
        hidden_size=case.hidden,
        num_moe_experts=case.experts,
        moe_router_topk=case.topk,
        moe_router_dtype="fp32",
        params_dtype=DTYPES[case.dtype],
        num_attention_heads=1,
    )
    routing_map = torch.zeros(case.tokens, case.experts, dtype=torch.bool).scatter_(1, topk_idx, True)
    probs = torch.zeros(case.tokens, case.experts).scatter_(1, topk_idx, weights)
    steps = {
        name: _steps_of_dispatcher(equivalence.make_dispatcher(name, config), x, routing_map, probs)
        for name in equivalence.DISPATCHERS
    }
    _check_equal(steps)
    try:
        return _measure_in_turns(steps, warmup, iterations)
    finally:
        close_buffers()


def _steps_of_buffer(buffer: ep.Buffer, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> Steps:
    handles = []

    def dispatch() -> torch.Tensor:
        received = ep.dispatch(x, topk_idx, weights, buffer=buffer)
        handles.append(received.handle)
        return received.x

    return dispatch, lambda rows: ep.combine(rows, handles.pop())


def _steps_of_dispatcher(dispatcher: Any, x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Steps:
    def dispatch() -> torch.Tensor:
        sent = dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, _counts, _probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
        return rows

    def combine(rows: torch.Tensor) -> torch.Tensor:
        combined = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(combined)

    return dispatch, combine


def _check_equal(steps: dict[str, Steps]) -> None:
    """What is timed must be the same work: the same rows in the same places, the same sums."""
    (dispatch, combine), (their_dispatch, their_combine) = steps["ours"], steps["megatron_alltoall"]
    rows, their_rows = dispatch(), their_dispatch()
    assert torch.equal(rows, their_rows), "dispatch differs from Megatron's"
    tolerance = 0.1 if rows.element_size() == 2 else 1e-5  # Megatron sums 16-bit rows in 16 bits
    torch.testing.assert_close(combine(rows), their_combine(their_rows), rtol=tolerance, atol=tolerance)


def _measure_in_turns(steps: dict[str, Steps], warmup: int, iterations: int) -> dict[str, dict[str, Any]]:
    rows = steps["ours"][0]()
    steps["ours"][1](rows)
    source, target = torch.zeros_like(rows), torch.zeros_like(rows)
    steps = {**steps, "memcpy": (lambda: target.copy_(source), source.copy_)}
    results: dict[str, dict[str, Any]] = {name: {"bytes": rows.nbytes, "dispatch": [], "combine": []} for name in steps}
    del rows
    for iteration in range(warmup + iterations):
        for name, (dispatch, combine) in steps.items():
            seconds, rows = _timed(dispatch)
            combine_seconds, _ = _timed(combine, rows)
            del rows
            if iteration >= warmup:
                results[name]["dispatch"].append(seconds)
                results[name]["combine"].append(combine_seconds)
    return results


def _timed(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[float, torch.Tensor]:
    dist.barrier()
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


# ---- in the parent


def _records(case: Case, by_rank: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One record for each implementation and phase; seconds are medians of a rank's rounds, then over the ranks."""
    records = []
    for name in by_rank[0]:
        for rank in by_rank:
            both = zip(rank[name]["dispatch"], rank[name]["combine"], strict=True)
            rank[name]["dispatch+combine"] = list(map(sum, both))
        for phase in PHASES:
            seconds = [median(rank[name][phase]) for rank in by_rank]
            moved = median(rank[name]["bytes"] for rank in by_rank) * (2 if phase == "dispatch+combine" else 1)
            records.append(
                {
                    "case": f"{case} {phase}",
                    "implementation": name,
                    "phase": phase,
                    "seconds": median(seconds),
                    "seconds_min": min(seconds),
                    "seconds_max": max(seconds),
                    "bytes": moved,
                    "gigabytes_per_second": moved / median(seconds) / 1e9,
                    **asdict(case),
                }
            )
    return records


def _table(case: Case, records: list[dict[str, Any]]) -> str:
    megabytes = records[0]["bytes"] / 1e6
    lines = [
        f"\n{case}: a rank receives {megabytes:.1f} MB of expert-grouped rows",
        f"  {'implementation':18} {'phase':17} {'min':>9} {'median':>9} {'max':>9}    {'GB/s':>6}  {'/ ours':>6}",
    ]
    ours = {record["phase"]: record["seconds"] for record in records if record["implementation"] == "ours"}
    for record in records:
        seconds = [f"{record[key] * 1e3:7.1f}ms" for key in ("seconds_min", "seconds", "seconds_max")]
        rate = f"{record['gigabytes_per_second']:6.2f}  {record['seconds'] / ours[record['phase']]:6.2f}"
        lines.append(f"  {record['implementation']:18} {record['phase']:17} {' '.join(seconds)}    {rate}")
    return "\n".join(lines)

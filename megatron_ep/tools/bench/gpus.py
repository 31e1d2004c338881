"""`megatron-ep bench gpus`: dispatch and combine between the GPUs of this machine, with a process per GPU, by CUDA
events; under torchrun or in a Slurm job step between those of the job, on any number of machines.

The same run times baselines: NCCL's all-to-all with the copies of Megatron-Core's all-to-all dispatcher (rows into the
order of ranks, then into that of experts, and back), and a copy to another GPU. The time of a round is that of its
slowest rank; p50, p90 and p99 are over rounds. In addition to the GPU's time by events: "(api)", the host's time from
the call until the GPU is done, with all ranks starting together, and "(host)", until the call returns; with --graphs
"(graph)", the time in a CUDA graph of many calls, in which the GPU does not wait for the host: the time of few tokens
(with many, combine there sums nothing in parallel with its exchange). "host_waits": the host waits for counts, equal to
those of the last dispatch; "wrong_guess": half as many rows were expected. With --max-tokens cases in one hop stand
beside those through rings.
T tokens per rank, H hidden, K choices per token, E experts. Bytes of a rank: its tokens, once for each destination
rank, which is the minimum of an expert-parallel dispatch; "there and back": both ways. All-to-all sends a row per
expert. Rows are bf16, except for "dispatch fp8": fp8 rows and their scales.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import float8
from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.tools.arguments import positive, require_topk
from megatron_ep.tools.bench.gpu_case import ROUTINGS, Case, add_arguments, cases_of, draw_experts, row_bytes
from megatron_ep.tools.bench.gpu_ranks import gpu_ranks
from megatron_ep.tools.bench.report import PERCENTILES, RATE, WHAT, Measured, Record, Report, slowest
from megatron_ep.tools.bench.timing import GRAPH_CALLS, Step, captured, cuda_timer, host_timer, meet, seconds_of
from megatron_ep.tools.job_ranks import own_gpu

Steps = dict[tuple[str, str], Step]  # steps by phase and implementation
IN_GRAPHS = ("ours", "ours_with_counts")  # implementations in which the host does not wait


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    arguments = _parse(argv)
    of_load = len(cases_of(arguments, 2, 1, 1))  # at most
    timeout = 60.0 + 15.0 * len(arguments.tokens) * len(arguments.routing) * of_load
    with gpu_ranks("megatron-ep bench gpus", timeout) as ranks:
        topology = topology_of(ranks.topology, arguments.nodes, arguments.experts)
        report = Report(arguments.json, ranks.rank)
        loads = [
            cases_of(arguments, topology.nodes, topology.ranks_per_node, tokens, routing)
            for tokens in arguments.tokens
            for routing in arguments.routing
        ]
        by_rank = ranks.run(measure, loads, arguments.warmup, arguments.iters, arguments.graphs)
    by_case: dict[str, list[Record]] = {}
    for same in zip(*by_rank, strict=True):
        by_case.setdefault(same[0].case, []).append(slowest(same))
    for case, records in by_case.items():
        columns = WHAT | PERCENTILES | RATE
        report.add(f"{case}: the slowest rank, its tokens counted once for each rank that they go to", records, columns)
    return 0


def topology_of(found: ep.Topology, nodes: int | None, experts: int) -> ep.Topology:
    """Returns the topology of these ranks, on the given number of nodes if any. Raises ValueError if the numbers do not
    fit."""
    gpus = found.world_size
    if gpus < 2:
        raise ValueError(f"there is {gpus} GPU, must be at least 2")
    if nodes is not None and gpus % nodes:
        raise ValueError(f"--nodes is {nodes}, must divide the {gpus} GPUs")
    if experts % gpus:
        raise ValueError(f"--experts is {experts}, must be a multiple of {gpus} GPUs")
    return found if nodes is None else ep.Topology(nodes, gpus // nodes)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("megatron-ep bench gpus", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--nodes", type=positive, help="nodes that the GPUs are dealt to (as a buffer finds them)")
    parser.add_argument(
        "--routing", nargs="+", choices=ROUTINGS, default=["uniform"], help="how likely experts are (uniform)"
    )
    parser.add_argument(
        "--max-tokens", action="store_true", help="also with Config.max_tokens = T: calls with few tokens go in one hop"
    )
    parser.add_argument("--graphs", action="store_true", help="also the GPU's time of a call in a CUDA graph of many")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    require_topk(parser, arguments)
    return arguments


class Tokens:
    """The tokens that this rank dispatches, and their rows for all-to-all, one per expert."""

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rank)
        self.x = torch.randn(case.tokens, case.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.weights, self.ids = draw_experts(case.routing, case.tokens, case.topk, case.experts, generator)
        by_expert = self.ids.flatten().sort(stable=True)
        self.token_of_row = by_expert.indices // case.topk
        local_experts = case.experts // world_size
        ranks = self.ids // local_experts
        self.distinct_rows = sum(int((ranks == r).any(dim=1).sum()) for r in range(world_size))
        counts = torch.bincount(by_expert.values, minlength=case.experts).view(world_size, local_experts).cpu()
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, counts)
        self.sent = counts.sum(dim=1).tolist()
        incoming = torch.stack([counts[rank] for counts in gathered])  # [W, L]
        self.received = incoming.sum(dim=1).tolist()
        expert_of_row = torch.arange(local_experts).repeat(world_size).repeat_interleave(incoming.flatten())
        self.grouped = expert_of_row.sort(stable=True).indices.cuda()
        self.ungrouped = self.grouped.argsort()


def measure(loads: Sequence[Sequence[Case]], warmup: int, iterations: int, graphs: bool = False) -> list[Measured]:
    """Runs on every rank. loads: lists of cases with the same tokens. Raises AssertionError if the results of dispatch
    and all-to-all differ."""
    torch.cuda.set_device(own_gpu())
    nccl = dist.new_group(backend="nccl")
    with torch.no_grad():
        return [one for cases in loads for one in _measure(cases, nccl, warmup, iterations, graphs)]


def _measure(
    cases: Sequence[Case], nccl: dist.ProcessGroup, warmup: int, iterations: int, graphs: bool
) -> list[Measured]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = Tokens(cases[0], rank, world_size)
    sums = torch.zeros(tokens.x.shape, device="cuda", dtype=torch.float32)
    measured = []

    def run(case: str, steps: Steps, **settings: Any) -> None:
        for (phase, implementation), step in steps.items():  # separately, so that none uses another's cache
            size = size_of(phase, tokens.distinct_rows, cases[0].hidden)
            ways: dict[str, Callable[[int, int], list[float]]] = {
                "": partial(seconds_of, cuda_timer(step)),
                " (api)": partial(seconds_of, host_timer(step, before=meet, after=torch.cuda.synchronize)),
                " (host)": partial(seconds_of, host_timer(step, before=meet)),
            }
            if graphs and implementation in IN_GRAPHS:
                ways[" (graph)"] = partial(_seconds_in_graph, step)
            for way, run_rounds in ways.items():
                seconds = run_rounds(warmup, iterations)
                measured.append(Measured(case, phase + way, implementation, seconds, size, settings))

    def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = torch.empty(sum(received), rows.shape[1], device="cuda", dtype=rows.dtype)
        dist.all_to_all_single(out, rows, received, sent, group=nccl)
        return out

    def nccl_dispatch() -> torch.Tensor:
        rows = exchange(tokens.x.index_select(0, tokens.token_of_row), tokens.sent, tokens.received)
        return rows.index_select(0, tokens.grouped)

    def nccl_combine() -> torch.Tensor:
        rows = exchange(expected.index_select(0, tokens.ungrouped), tokens.received, tokens.sent)
        return sums.zero_().index_add_(0, tokens.token_of_row, rows.float()).to(rows.dtype)

    expected = nccl_dispatch()
    other = (own_gpu() + 1) % torch.cuda.device_count()  # among the visible GPUs
    neighbour = torch.empty(tokens.distinct_rows, cases[0].hidden, device=f"cuda:{other}").to(torch.bfloat16)
    source = torch.randn(neighbour.shape, device="cuda").to(torch.bfloat16)
    baselines: Steps = {
        ("dispatch", "nccl_all_to_all"): nccl_dispatch,
        ("combine", "nccl_all_to_all"): nccl_combine,
        ("copy", "to_a_neighbour" if other != own_gpu() else "to_itself"): lambda: neighbour.copy_(source),
    }
    run(f"{world_size} GPUs {cases[0].sizes}", baselines)
    for case in cases:
        topology = ep.Topology(case.nodes, case.ranks_per_node)
        with ep.Buffer(None, case.config, topology, device="cuda") as buffer:
            run(str(case), _steps(tokens, buffer, expected), **asdict(case))
            buffer.synchronize()
    return measured


def size_of(phase: str, rows: int, hidden: int) -> int:
    """Returns the bytes of `rows` rows, both ways for a phase that goes there and back."""
    ways = 2 if phase.startswith("there and back") else 1
    return ways * rows * row_bytes(hidden, fp8="fp8" in phase)


def _seconds_in_graph(step: Step, warmup: int, iterations: int) -> list[float]:
    graph = captured(step)
    seconds = seconds_of(cuda_timer(graph.replay, GRAPH_CALLS), warmup, iterations)
    meet()
    return seconds


def _steps(tokens: Tokens, buffer: ep.Buffer, expected: torch.Tensor) -> Steps:
    def host_waits() -> Any:
        return ep.dispatch(tokens.x, tokens.ids, tokens.weights, buffer=buffer)

    received = host_waits()
    assert torch.equal(received.x, expected), "dispatch differs from all-to-all"
    handle, most = received.handle, max(1, len(received.x))
    values, scales = float8.quantize(tokens.x)
    flat = ep.dispatch(tokens.x, tokens.ids, tokens.weights, buffer=buffer, layout="flat")
    most_flat = max(1, len(flat.x))
    group = rank_group_of(buffer)

    def with_counts() -> Any:
        return ep.dispatch(tokens.x, tokens.ids, tokens.weights, buffer=buffer, max_recv_tokens=most)

    def wrong_guess() -> Any:
        assert group.last_counts is not None
        group.last_counts = group.last_counts._replace(rows=most // 2)
        return host_waits()

    def there_and_back_host_waits() -> Any:
        rows = host_waits()
        return ep.combine(rows.x, rows.handle)

    def there_and_back() -> Any:
        rows = with_counts()
        return ep.combine(rows.x, rows.handle)

    def there_and_back_flat() -> Any:
        rows = ep.dispatch(
            tokens.x, tokens.ids, tokens.weights, buffer=buffer, max_recv_tokens=most_flat, layout="flat"
        )
        return ep.combine(rows.x, rows.handle)

    return {
        ("dispatch", "ours"): lambda: ep.dispatch(tokens.x, topk_weights=tokens.weights, handle=handle),
        ("dispatch", "ours_with_counts"): with_counts,
        ("dispatch", "ours_host_waits"): host_waits,
        ("dispatch fp8", "ours"): lambda: ep.dispatch(
            values, topk_weights=tokens.weights, scales=scales, handle=handle
        ),
        ("combine", "ours"): lambda: ep.combine(expected, handle),
        ("there and back", "ours_with_counts"): there_and_back,
        ("there and back", "ours_host_waits"): there_and_back_host_waits,
        ("there and back, flat", "ours_with_counts"): there_and_back_flat,
        ("dispatch", "ours_wrong_guess"): wrong_guess,
    }

"""`megatron-ep bench low-latency`: the low-latency mode on GPUs, by CUDA events: a rank on each GPU of this machine, or
all ranks on one; under torchrun or in a Slurm job step the ranks of the job, on any number of machines.

Each call is timed directly (`eager`, including the host's work if the GPU waits for it) and in a CUDA graph of many
calls (`graph`: the GPU's time per call). The time of a round is that of its slowest rank. Host: `megatron-ep bench`.
T tokens per rank, H hidden, K choices per token, E experts. Mean bytes of a rank: its tokens, once for each destination
rank; for a "pair" both ways. fp8: rows of bf16 are sent as fp8 with column-major scales, and returned as bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.meeting import job
from megatron_ep.tools.arguments import add_rounds, add_sizes, positive, require_topk
from megatron_ep.tools.bench.gpu_case import require_gpu, row_bytes
from megatron_ep.tools.bench.gpu_ranks import gpu_ranks
from megatron_ep.tools.bench.report import PERCENTILES, RATE, WHAT, Measured, Report, slowest
from megatron_ep.tools.bench.timing import GRAPH_CALLS, Step, captured, cuda_timer, host_timer, meet, seconds_of
from megatron_ep.tools.job_ranks import own_gpu

COMMAND = "megatron-ep bench low-latency"


@dataclass(frozen=True)
class Case:
    world_size: int
    nodes: int
    on_one_gpu: bool
    num_sms: int
    max_tokens: int
    tokens: int
    hidden: int
    topk: int
    experts: int

    def __str__(self) -> str:
        where = "on one GPU" if self.on_one_gpu else "GPUs" if self.nodes == 1 else f"GPUs of {self.nodes} nodes"
        sizes = f"T={self.tokens} of {self.max_tokens} H={self.hidden} K={self.topk} E={self.experts}"
        return f"{self.world_size} {where} sms={self.num_sms} {sizes}"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    arguments = _parse(argv)
    is_rank = job.adopt()
    if is_rank and arguments.ranks is not None:
        raise ValueError("--ranks: the launcher has started them")
    if not is_rank:
        require_gpu(COMMAND)
    if is_rank or (arguments.ranks is None and torch.cuda.device_count() > 1):
        with gpu_ranks(COMMAND, 60.0 + 30.0 * len(arguments.num_sms) * len(arguments.batch)) as ranks:
            report = Report(arguments.json, ranks.rank)
            cases = cases_of(arguments, ranks.world_size, ranks.topology.nodes)
            by_rank = ranks.run(measure_rank, cases, arguments.warmup, arguments.iters)
    else:
        report = Report(arguments.json)
        world_size = arguments.ranks or 8
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if max(arguments.num_sms) * world_size > sms:
            report.say(f"\n{world_size} ranks share {sms} SMs: at most {sms // world_size} of a rank")
        cases = cases_of(arguments, world_size, max_sms=sms // world_size)
        by_rank = [[measure_on_one_gpu(case, arguments.warmup, arguments.iters) for case in cases]]
    for case, of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        records = [slowest(same) for same in zip(*of_ranks, strict=True)]
        report.add(f"{case}: the slowest rank", records, WHAT | PERCENTILES | RATE)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(COMMAND, description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--ranks", type=positive, metavar="W", help="all on one GPU (a rank on each; 8 if it is one)")
    parser.add_argument("--num-sms", nargs="+", type=positive, default=[16, 24, 32], help="per rank (%(default)s)")
    parser.add_argument("--batch", nargs="+", type=positive, default=[1, 8, 32, 128], metavar="T", help="(%(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=128, help="per rank (%(default)s)")
    add_sizes(parser, hidden=7168, experts=256)
    add_rounds(parser, warmup=5, iters=30)
    arguments = parser.parse_args(argv)
    require_topk(parser, arguments)
    if max(arguments.batch) > arguments.max_tokens:
        parser.error(f"--batch {max(arguments.batch)} is over --max-tokens {arguments.max_tokens}")
    return arguments


def cases_of(
    arguments: argparse.Namespace, world_size: int, nodes: int = 1, *, max_sms: int | None = None
) -> list[Case]:
    """Returns the cases. max_sms: limit for the SMs of a rank if all ranks are on one GPU.

    Raises ValueError if the experts cannot be divided among the ranks.
    """
    if arguments.experts % world_size:
        raise ValueError(f"--experts is {arguments.experts}, must be a multiple of {world_size} ranks")
    sizes = (arguments.hidden, arguments.topk, arguments.experts)
    first = Case(world_size, nodes, max_sms is not None, 1, arguments.max_tokens, 1, *sizes)
    num_sms = dict.fromkeys(sms if max_sms is None else min(sms, max_sms) for sms in arguments.num_sms)
    return [replace(first, num_sms=sms, tokens=t) for sms in num_sms for t in arguments.batch]


def _inputs(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn(case.tokens, case.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(case.tokens, case.experts, generator=generator, device="cuda")
    weights, ids = scores.topk(case.topk, dim=1)
    return x, ids, weights


def _rows(case: Case, ids: torch.Tensor) -> int:
    ranks = ids // (case.experts // case.world_size)
    return sum(int((ranks == rank).any(dim=1).sum()) for rank in range(case.world_size))


def measure_on_one_gpu(case: Case, warmup: int, iterations: int) -> list[Measured]:
    """Times all ranks of a LocalCluster, whose launches run in sequence."""
    config = ep.Config(num_experts=case.experts, num_sms=case.num_sms, timeout=10)
    with ep.LocalCluster(1, case.world_size, config, device="cuda") as cluster, torch.no_grad():
        x, ids, weights = (list(part) for part in zip(*(_inputs(case, r) for r in range(case.world_size)), strict=True))
        rows = fmean(_rows(case, idx) for idx in ids)
        return _measure(case, cluster, x, ids, weights, rows, warmup, iterations)


def measure_rank(cases: Sequence[Case], warmup: int, iterations: int) -> list[list[Measured]]:
    """Runs on every rank, each with a separate GPU."""
    rank = dist.get_rank()
    torch.cuda.set_device(own_gpu())

    measured = []
    for case in cases:
        config = ep.Config(num_experts=case.experts, num_sms=case.num_sms, timeout=10)
        with ep.Buffer(None, config, device="cuda") as buffer, torch.no_grad():
            inputs = _inputs(case, rank)
            measured.append(_measure(case, buffer, *inputs, _rows(case, inputs[1]), warmup, iterations))
    return measured


def _measure(
    case: Case, buffer: Any, x: Any, ids: Any, weights: Any, num_rows: float, warmup: int, iterations: int
) -> list[Measured]:
    low_latency = ep.LowLatency(buffer, max_tokens=case.max_tokens, hidden=case.hidden, topk=case.topk)
    measured = []
    for phase, (step, moved) in _phases(case, low_latency, x, ids, weights, num_rows).items():
        graph = captured(step)
        timers = {
            "eager": cuda_timer(step),
            "host": host_timer(step, before=torch.cuda.synchronize),
            "graph": cuda_timer(graph.replay, GRAPH_CALLS),
        }
        for name, timer in timers.items():
            seconds = seconds_of(timer, warmup, iterations)
            measured.append(Measured(str(case), phase, name, seconds, moved, asdict(case)))
        meet()
        buffer.synchronize()
        meet()
        del graph
    return measured


def _phases(
    case: Case, low_latency: ep.LowLatency, x: Any, ids: Any, weights: Any, num_rows: float
) -> dict[str, tuple[Step, float]]:
    """Returns the timed steps, and the bytes that each moves per rank."""
    size, fp8_size = num_rows * row_bytes(case.hidden), num_rows * row_bytes(case.hidden, fp8=True)
    received = low_latency.dispatch(x, ids, weights)
    rows = received.x
    dispatch = partial(low_latency.dispatch, x, ids)
    dispatch_fp8 = partial(dispatch, fp8="fp32", scale_layout="column")

    def at_token(y: Any, got: Any, **hook: Any) -> Any:
        return low_latency.combine(y, got.handle, weights, **hook)

    def at_expert(y: Any, got: Any, **hook: Any) -> Any:
        return low_latency.combine(y, got.handle, row_weights=got.probs, sum_at="expert", **hook)

    def pair(dispatch: Any, combine: Any, y: Any = None) -> Step:
        """Returns a dispatch followed by a combine. y: output rows of the experts; None: the dispatched rows."""

        def step() -> None:
            got = dispatch()
            combine(got.x if y is None else y, got)

        return step

    def hooks(dispatch: Any, combine: Any, y: Any = None) -> Step:
        def step() -> None:
            got, hook = dispatch(return_recv_hook=True)
            hook()
            _, hook = combine(got.x if y is None else y, got, return_recv_hook=True)
            hook()

        return step

    weighted, weighted_fp8 = (partial(kind, topk_weights=weights) for kind in (dispatch, dispatch_fp8))
    return {
        "dispatch": (dispatch, size),
        "dispatch fp8": (dispatch_fp8, fp8_size),
        "combine": (partial(at_token, rows, received), size),
        "combine at expert": (partial(at_expert, rows, received), size),
        "pair": (pair(dispatch, at_token), 2 * size),
        "pair, hooks": (hooks(dispatch, at_token), 2 * size),
        "pair at expert": (pair(weighted, at_expert), 2 * size),
        "pair at expert, hooks": (hooks(weighted, at_expert), 2 * size),
        "pair fp8": (pair(dispatch_fp8, at_token, rows), size + fp8_size),
        "pair fp8 at expert": (pair(weighted_fp8, at_expert, rows), size + fp8_size),
        "pair fp8, hooks": (hooks(dispatch_fp8, at_token, rows), size + fp8_size),
    }

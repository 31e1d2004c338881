"""`megatron-ep bench`: dispatch and combine, Megatron's all-to-all dispatcher and a memory copy, in one run.

All three move the same tokens, in turns. Each rank is a process with one thread. Between the machines of a job, plain
TCP connections also carry, both ways at once, the mean bytes that a rank sends to other nodes, a token once for each of
them (plain_tcp); a record's bytes are these then, and otherwise those of the rows that a rank receives. Dispatch is
everything from a layer's hidden states, routing map and probabilities to expert-grouped rows, counts and their
probabilities; combine is the reverse. low_latency sums a token's rows on the token's rank; low_latency_sum_at_expert
first sums those of each rank there, like the normal mode; low_latency_fp8 sends bf16 rows as fp8 and returns bf16 rows.
T tokens on this rank, H hidden, E experts, K choices per token, R rows received.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.config import MAX_LOW_LATENCY_TOKENS
from megatron_ep.meeting import job
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.tools.arguments import (
    add_rounds,
    add_sizes,
    add_tokens,
    positive,
    require_memory,
    require_topk,
    seconds,
)
from megatron_ep.tools.bench import NAMES
from megatron_ep.tools.bench.plain_tcp import PlainTcp
from megatron_ep.tools.bench.report import EXTREMES, RATE, WHAT, Record, Report, make_record, relative
from megatron_ep.tools.bench.timing import Timer, host_timer, time_rounds
from megatron_ep.tools.job_ranks import JobRanks
from megatron_ep.tools.local_ranks import LocalRanks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PHASES = ("dispatch", "combine", "dispatch+combine")
Steps = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Measured:
    """The times of a rank: its bytes, and the seconds of each round by (implementation, phase)."""

    size: int
    seconds: dict[tuple[str, str], list[float]]


OTHERS = "other benchmarks, each with its own --help:" + "".join(
    f"\n  megatron-ep bench {name:<12} {what}" for name, what in NAMES.items()
)


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
    """Runs the benchmark; see --help."""
    is_rank = job.adopt()
    arguments = _parse(argv, int(os.environ["WORLD_SIZE"]) if is_rank else None)
    if is_rank:
        with JobRanks(arguments.timeout) as ranks:
            report = _begin(arguments, ranks.rank)
            [shape] = arguments.topologies or [(ranks.topology.nodes, ranks.topology.ranks_per_node)]
            _time(ranks, shape, arguments, report)
        return 0
    report = _begin(arguments)
    for shape in arguments.topologies:
        with LocalRanks(shape[0] * shape[1], arguments.timeout) as local_ranks:
            _time(local_ranks, shape, arguments, report)
    return 0


def _begin(arguments: argparse.Namespace, rank: int = 0) -> Report:
    report = Report(arguments.json, rank)
    if not megatron_side.is_installed():
        report.say("\nmegatron_alltoall skipped: megatron-core is not installed")
    return report


def _time(ranks: LocalRanks | JobRanks, shape: tuple[int, int], arguments: argparse.Namespace, report: Report) -> None:
    machines = len(set(ranks.machines)) if isinstance(ranks, JobRanks) else 1
    tcp_timeout = arguments.timeout if machines > 1 and shape == (machines, ranks.world_size // machines) else None
    for dtype in arguments.dtype:
        case = Case(*shape, dtype, arguments.tokens, arguments.hidden, arguments.topk, arguments.experts)
        given = (case, megatron_side.is_installed(), arguments.warmup, arguments.iters, tcp_timeout)
        add(report, case, ranks.run(measure, *given), crosses=tcp_timeout is not None)


def add(report: Report, case: Case, by_rank: Sequence[Measured], *, crosses: bool) -> None:
    """Reports a case. crosses: whether its bytes are those that cross to other nodes."""
    records = records_of(case, by_rank)
    what = "sends {:.1f} MB to other nodes" if crosses else "receives {:.1f} MB of expert-grouped rows"
    title = f"{case}: a rank {what.format(records[0]['bytes'] / 1e6)}"
    report.add(title, records, WHAT | EXTREMES | RATE | relative("/ ours", "ours", records))


def _parse(argv: Sequence[str], world_size: int | None) -> argparse.Namespace:
    """Parses the arguments. world_size: size of the job of this process, if any, which may determine the topology."""
    parser = argparse.ArgumentParser(
        "megatron-ep bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Times dispatch and combine of processes of this machine without a GPU: ours, Megatron's "
        "all-to-all\nover gloo, and a copy of the same bytes. Without --nodes and --ranks-per-node: 1x2 and 2x2 ranks. "
        "Under\ntorchrun or in a Slurm job step: of the job's ranks, on any number of machines.",
        epilog=OTHERS,
    )
    parser.add_argument("--nodes", type=positive, metavar="N", help="nodes that the ranks are dealt to")
    parser.add_argument("--ranks-per-node", type=positive, metavar="G", help="ranks of a node")
    add_tokens(parser)
    add_sizes(parser, hidden=2048, experts=64)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="(fp32 bf16)")
    add_rounds(parser, warmup=2, iters=5)
    parser.add_argument("--timeout", type=seconds, default=300.0, metavar="S", help="limit of one case (%(default)s s)")
    arguments = parser.parse_args(argv)
    if (arguments.nodes is None) != (arguments.ranks_per_node is None):
        parser.error("--nodes and --ranks-per-node go together")
    default = arguments.nodes is None
    local = [] if world_size else [(1, 2), (2, 2)]
    arguments.topologies = local if default else [(arguments.nodes, arguments.ranks_per_node)]
    shapes = arguments.topologies or [(1, world_size)]
    if world_size and shapes[0][0] * shapes[0][1] != world_size:
        parser.error(f"--nodes {arguments.nodes} --ranks-per-node {arguments.ranks_per_node}: the job has {world_size}")
    for nodes, ranks_per_node in shapes:
        if arguments.experts % (nodes * ranks_per_node):
            parser.error(f"--experts {arguments.experts} is not a multiple of {nodes}x{ranks_per_node} ranks")
    require_topk(parser, arguments)
    max_ranks = max(nodes * ranks for nodes, ranks in shapes)
    rows = int(os.environ.get("LOCAL_WORLD_SIZE", max_ranks)) * arguments.tokens * arguments.topk
    size = rows * arguments.hidden * max(DTYPES[name].itemsize for name in arguments.dtype)
    require_memory(parser, size, f"--tokens {arguments.tokens} --topk {arguments.topk} --hidden {arguments.hidden}")
    return arguments


# ---- on every rank


def draw(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows, weights and experts of this rank's tokens."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(DTYPES[case.dtype])
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    return x, *scores.softmax(dim=1).topk(case.topk, dim=1)


def measure(
    case: Case, beside_megatron: bool, warmup: int, iterations: int, tcp_timeout: float | None = None
) -> Measured:
    """Runs on every rank of a gloo world. tcp_timeout: limit of a wait in seconds of plain TCP connections, which are
    timed too; None: they are not."""
    x, weights, topk_idx = draw(case)
    config = ep.Config(num_experts=case.experts)
    topology = ep.Topology(case.nodes, case.ranks_per_node)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        buffer = stack.enter_context(ep.Buffer(dist.group.WORLD, config, topology))
        others: dict[str, Steps] = {}
        size = None
        if tcp_timeout is not None:
            rendezvous = StoreRendezvous(None, timedelta(seconds=tcp_timeout))
            size = round(fmean(rendezvous.gather(crossing_bytes(case, rendezvous.rank))))
            others["plain_tcp"] = _steps_of_plain_tcp(stack, rendezvous, topology, size)
        if case.tokens <= MAX_LOW_LATENCY_TOKENS:
            others["low_latency"] = _steps_of_low_latency(buffer, case, x, topk_idx)
            others["low_latency_sum_at_expert"] = _steps_of_low_latency(buffer, case, x, topk_idx, sum_at="expert")
            if x.dtype == torch.bfloat16:
                others["low_latency_fp8"] = _steps_of_low_latency(buffer, case, x, topk_idx, fp8="fp32")
        if beside_megatron:
            steps = _steps_beside_megatron(stack, case, x, topk_idx, weights)
        else:
            steps = {"ours": _steps_of_buffer(buffer, x, topk_idx, weights)}
        return _measure_in_turns(steps | others, warmup, iterations, size)


def crossing_bytes(case: Case, rank: int) -> int:
    """Returns the bytes of this rank's tokens, once for each other node that they go to."""
    x, _, topk_idx = draw(case)
    nodes = topk_idx // (case.experts // case.nodes)
    own = rank // case.ranks_per_node
    rows = sum(int((nodes == node).any(dim=1).sum()) for node in range(case.nodes) if node != own)
    return rows * x.shape[1] * x.itemsize


def _steps_of_plain_tcp(
    stack: contextlib.ExitStack, rendezvous: StoreRendezvous, topology: ep.Topology, size: int
) -> Steps:
    """Returns the steps of a connection to the same rank of the next node. size: bytes of each step, both ways."""
    rank, world = rendezvous.rank, rendezvous.world_size
    to, source = (rank + topology.ranks_per_node) % world, (rank - topology.ranks_per_node) % world
    plain = stack.enter_context(PlainTcp(rendezvous, to, source))

    def run_dispatch() -> torch.Tensor:
        plain.exchange(size)
        return torch.empty(0)

    def run_combine(rows: torch.Tensor) -> torch.Tensor:
        plain.exchange(size)
        return rows

    return run_dispatch, run_combine


def _steps_beside_megatron(
    stack: contextlib.ExitStack, case: Case, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor
) -> dict[str, Steps]:
    """Returns the steps of our dispatcher and of Megatron's, after a comparison of what they give."""
    from megatron_ep.megatron import equivalence
    from megatron_ep.megatron.dispatcher import close_buffers, configure

    stack.callback(close_buffers)
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
    return steps


def _steps_of_buffer(buffer: ep.Buffer, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> Steps:
    handles = []

    def run_dispatch() -> torch.Tensor:
        received = ep.dispatch(x, topk_idx, weights, buffer=buffer)
        handles.append(received.handle)
        return received.x

    return run_dispatch, lambda rows: ep.combine(rows, handles.pop())


def _steps_of_low_latency(
    buffer: ep.Buffer,
    case: Case,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    *,
    fp8: str | None = None,
    sum_at: str = "token",
) -> Steps:
    """Returns the steps of the low-latency mode. fp8: sends rows of bf16 as fp8; combine returns bf16."""
    low_latency = ep.LowLatency(buffer, max_tokens=case.tokens, hidden=case.hidden, topk=case.topk, dtype=x.dtype)
    handles = []
    outputs = None if fp8 is None else torch.zeros_like(low_latency.dispatch(x, topk_idx, layout="grouped").x)

    def run_dispatch() -> torch.Tensor:
        received = low_latency.dispatch(x, topk_idx, layout="grouped", fp8=fp8)
        handles.append(received.handle)
        return received.x

    def run_combine(rows: torch.Tensor) -> torch.Tensor:
        return low_latency.combine(rows if outputs is None else outputs, handles.pop(), sum_at=sum_at)

    return run_dispatch, run_combine


def _steps_of_dispatcher(dispatcher: Any, x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Steps:
    def run_dispatch() -> torch.Tensor:
        sent = dispatcher.dispatch_preprocess(x, routing_map, probs)
        rows, _counts, _probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
        return rows

    def run_combine(rows: torch.Tensor) -> torch.Tensor:
        combined = dispatcher.token_combine(dispatcher.combine_preprocess(rows))
        return dispatcher.combine_postprocess(combined)

    return run_dispatch, run_combine


def _check_equal(steps: dict[str, Steps]) -> None:
    """Raises AssertionError unless all implementations give the same rows in the same places, and the same sums."""
    (dispatch, combine), (their_dispatch, their_combine) = steps["ours"], steps["megatron_alltoall"]
    rows, their_rows = dispatch(), their_dispatch()
    assert torch.equal(rows, their_rows), "dispatch differs from Megatron's"
    tolerance = 0.1 if rows.element_size() == 2 else 1e-5  # Megatron sums 16-bit rows in 16 bits
    torch.testing.assert_close(combine(rows), their_combine(their_rows), rtol=tolerance, atol=tolerance)


def _measure_in_turns(steps: dict[str, Steps], warmup: int, iterations: int, size: int | None) -> Measured:
    """Measures the steps, and a copy of the rows. size: bytes of a step; None: those of the rows."""
    dispatch, combine = steps["ours"]
    rows = dispatch()
    combine(rows)
    source, target = torch.zeros_like(rows), torch.zeros_like(rows)
    steps = {**steps, "memcpy": (lambda: target.copy_(source), source.copy_)}
    size = rows.nbytes if size is None else size
    del rows
    timers = {
        (name, phase): timer
        for name, both in steps.items()
        for phase, timer in zip(PHASES[:2], _timers(*both), strict=True)
    }
    return Measured(size, time_rounds(timers, warmup, iterations))


def _timers(
    dispatch: Callable[[], torch.Tensor], combine: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Timer, Timer]:
    """Returns timers of a dispatch and of the combine of its result; all ranks start together."""
    received: list[torch.Tensor] = []

    def combine_received() -> tuple[torch.Tensor, torch.Tensor]:
        rows = received.pop()
        return rows, combine(rows)  # includes the time to free them

    return (
        host_timer(lambda: received.append(dispatch()), before=dist.barrier),
        host_timer(combine_received, before=dist.barrier),
    )


# ---- in the parent


def records_of(case: Case, by_rank: Sequence[Measured]) -> list[Record]:
    """Returns a record for each implementation and phase. Its seconds are the medians of each rank's rounds."""
    size = median(rank.size for rank in by_rank)
    records = []
    for name in dict.fromkeys(name for name, _ in by_rank[0].seconds):
        for phase in PHASES:
            parts = [part for part in PHASES[:2] if part in phase]
            seconds = [
                median(map(sum, zip(*(rank.seconds[name, part] for part in parts), strict=True))) for rank in by_rank
            ]
            records.append(make_record(case, phase, name, seconds, len(parts) * size, **asdict(case)))
    return records

"""`tests/bench/run.py sequences`: attention on other ranks: the way of Q, K and V there and of the output back, and
what balanced attention gains. A rank on each GPU of this machine or of a job.

Documents of lengths drawn between two bounds, T tokens for each rank. A round's time is that of its slowest rank, by
CUDA events.

The way, by a plan of the planner: "ours" beside NCCL's all-to-all with its copies, into the
order of ranks and from there to their places.

Attention: "at_home", each rank its own documents; "balanced" by that plan; "context_parallel", in the layout of
Megatron's context parallelism over all ranks. A "step" is attention with its ways: there and back where balanced; with
context parallelism K and V, by all-to-all, before it (Megatron hides a part of that behind attention).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sequence_baselines import AllToAll, Attention, attention_of, kernel_of
from sequence_case import DTYPES, Case, draw_documents, load, plans_of

import megatron_ep as ep
from megatron_ep.sequences.dispatcher import SequenceDispatcher, sms_for_sequences
from megatron_ep.sequences.plan import SequencePlan
from megatron_ep.tools.arguments import add_rounds, positive
from megatron_ep.tools.bench.gpu_ranks import gpu_ranks
from megatron_ep.tools.bench.gpus import Measured, slowest
from megatron_ep.tools.bench.report import EXTREMES, WHAT, Columns, Report, relative
from megatron_ep.tools.bench.timing import Reading, Step, Timer, cuda_timer, host_timer, meet, time_rounds
from megatron_ep.tools.job_ranks import own_gpu

COMMAND = "run.py sequences"
GRADIENTS = " + gradients"  # of a phase: forward and backward
WAIT_S, LIMIT_S = 30, 300  # the longest wait of a rank for another, and for all
BACKWARD_WORK = 2.5  # of attention, over its forward pass
OF_ATTENTION = tuple(phase + more for phase in ("attention", "step") for more in ("", GRADIENTS))
WORK: Columns = {
    "load, max / mean": lambda record: f"{record['load']:.3f}",
    "TFLOP/s": lambda record: f"{record['operations'] / record['seconds'] / 1e12:.1f}",
}
Tensors = Sequence[torch.Tensor]


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    arguments = _parse(argv)
    with gpu_ranks(COMMAND, LIMIT_S) as ranks:
        if ranks.world_size < 2:
            raise ValueError("there is 1 rank, must be at least 2")
        documents = draw_documents(arguments.tokens, *arguments.documents, ranks.world_size, arguments.seed)
        heads = arguments.query_heads, arguments.kv_heads, arguments.head_dim
        case = Case(documents, *heads, "bf16", "cuda", arguments.num_sms)
        report = Report(arguments.json, ranks.rank)
        add(report, case, ranks.run(measure, case, ranks.topology, arguments.warmup, arguments.iters))
    return 0


def add(report: Report, case: Case, by_rank: Sequence[Sequence[Measured]]) -> None:
    """by_rank: what `measure` returns on every rank."""
    report.say(f"\n{case}\ndocuments of each rank: {'; '.join(' '.join(map(str, d)) for d in case.documents)}")
    records = [slowest(same) for same in zip(*by_rank, strict=True)]
    way = [record for record in records if record["phase"] not in OF_ATTENTION]
    report.add("the way, the slowest rank", way, WHAT | EXTREMES | relative("/ ours", "ours", way))
    attention = [record for phase in OF_ATTENTION for record in records if record["phase"] == phase]
    ratio = relative("/ balanced", "balanced", attention)
    title = f"attention by {attention[0]['kernel']}, the slowest rank"
    report.add(title, attention, WHAT | EXTREMES | WORK | ratio)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(COMMAND, description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokens", type=positive, default=1 << 16, metavar="T", help="per rank (%(default)s)")
    parser.add_argument(
        "--documents",
        type=positive,
        nargs=2,
        default=[1 << 10, 1 << 16],
        metavar=("SHORTEST", "LONGEST"),
        help="tokens of a document (1024 65536)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the documents' lengths (%(default)s)")
    parser.add_argument("--query-heads", type=positive, default=64, metavar="N", help="(%(default)s)")
    parser.add_argument("--kv-heads", type=positive, default=8, metavar="N", help="(%(default)s)")
    parser.add_argument("--head-dim", type=positive, default=128, metavar="N", help="width of a head (%(default)s)")
    parser.add_argument("--num-sms", type=positive, metavar="N", help="that move rows, of each GPU (half of them)")
    add_rounds(parser, warmup=2, iters=5)
    arguments = parser.parse_args(argv)
    if arguments.query_heads % arguments.kv_heads:
        parser.error(f"--query-heads {arguments.query_heads} is not a multiple of --kv-heads {arguments.kv_heads}")
    return arguments


# ---- on every rank


def measure(case: Case, topology: ep.Topology, warmup: int, iterations: int) -> list[Measured]:
    """On GPUs or, for tests, on the host. Raises AssertionError where what is timed is not the same work."""
    group = dist.group.WORLD
    if case.device == "cuda":
        torch.cuda.set_device(own_gpu())
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=WAIT_S))
    assert group is not None
    # gradients of K and V may travel as float32
    config = ep.Config(
        case.world_size,
        num_sms=case.num_sms or sms_for_sequences(torch.device(case.device)),
        timeout=WAIT_S,
        row_bytes=max(case.row_bytes.q, 2 * case.row_bytes.kv),
    )
    with ep.Buffer(None, config, topology, device=case.device) as buffer:
        dispatcher = SequenceDispatcher(buffer)
        plans = plans_of(case)
        rounds = _Rounds(case, warmup, iterations)
        _measure_way(case, plans["balanced"], dispatcher, group, rounds)
        _measure_attention(case, plans, dispatcher, group, rounds)
        buffer.synchronize()
    return rounds.measured


class _Rounds:
    """Times steps, one by one: nobody meets another's cache."""

    def __init__(self, case: Case, warmup: int, iterations: int) -> None:
        self.measured: list[Measured] = []
        self._case, self._warmup, self._iterations = case, warmup, iterations
        self._settings = asdict(case)

    def time(self, phase: str, name: str, step: Step, *, start_alike: bool = False, **more: Any) -> None:
        """start_alike: whether ranks wait for each other before each round on a GPU, for steps that end at different
        times. more: of the record."""
        timer = self._timer(step, start_alike)
        [times] = time_rounds({0: timer}, self._warmup, self._iterations, when_warm=meet).values()
        self.measured.append(Measured(str(self._case), phase, name, times, 0, self._settings | more))

    def _timer(self, step: Step, start_alike: bool) -> Timer:
        if self._case.device == "cpu":
            return host_timer(step, before=dist.barrier)
        timer = cuda_timer(step)

        def together() -> Reading:
            meet()
            return timer()

        return together if start_alike else timer


class _Rows:
    """What a rank has at home, and gradients."""

    def __init__(self, case: Case, plan: SequencePlan) -> None:
        self._case, rank = case, dist.get_rank()
        self._generator = torch.Generator(case.device).manual_seed(rank)
        rows = int(plan.q_rows[rank].sum())
        self.qkv = self.draw(rows, rows)
        [self.out_grad] = self.draw(rows)

    def draw(self, q_rows: int, kv_rows: int | None = None) -> list[torch.Tensor]:
        """As q, and as k and v."""
        case = self._case
        heads = [(q_rows, case.query_heads)] + ([(kv_rows, case.kv_heads)] * 2 if kv_rows is not None else [])
        shape = dict(generator=self._generator, device=case.device, dtype=DTYPES[case.dtype])
        return [torch.randn(*of_rows, case.width, **shape) for of_rows in heads]  # type: ignore[call-overload]


def _with_gradients(function: Callable[..., Any], inputs: Tensors, gradients: Tensors) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, gradients)


def _without_gradients(function: Callable[..., Any], inputs: Tensors) -> Any:
    with torch.no_grad():
        return function(*inputs)


def _measure_way(
    case: Case, plan: SequencePlan, dispatcher: SequenceDispatcher, group: dist.ProcessGroup, rounds: _Rounds
) -> None:
    rows = _Rows(case, plan)
    of_q, of_kv = _exchanges(plan, case, group)

    def their_dispatch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return of_q.there(q), of_kv.there(k), of_kv.there(v)

    def our_dispatch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return dispatcher.dispatch(q, k, v, plan)

    def our_return(out: torch.Tensor) -> torch.Tensor:
        back: torch.Tensor = dispatcher.combine(out, plan)
        return back

    def both_of(dispatch: Callable[..., Tensors], back: Callable[..., torch.Tensor]) -> Callable[..., Tensors]:
        def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
            q, k, v = dispatch(q, k, v)
            return back(q), k, v

        return both

    ways = {"ours": (our_dispatch, our_return), "all_to_all": (their_dispatch, of_q.back)}
    there = _without_gradients(our_dispatch, rows.qkv)
    assert all(map(torch.equal, there, _without_gradients(their_dispatch, rows.qkv))), "dispatch is not all-to-all's"
    gradients = [rows.out_grad, *rows.draw(0, len(there[1]))[1:]]
    ours, theirs = (_with_gradients(both_of(*way), rows.qkv, gradients) for way in ways.values())
    torch.testing.assert_close(ours, theirs)
    del ours, theirs

    for name, (dispatch, back) in ways.items():
        both = both_of(dispatch, back)
        rounds.time("dispatch", name, partial(_without_gradients, dispatch, rows.qkv))
        rounds.time("return", name, partial(_without_gradients, back, there[:1]))
        rounds.time("both", name, partial(_without_gradients, both, rows.qkv))
        rounds.time("both" + GRADIENTS, name, partial(_with_gradients, both, rows.qkv, gradients))


def _exchanges(plan: SequencePlan, case: Case, group: dist.ProcessGroup) -> tuple[AllToAll, AllToAll]:
    """Returns the exchanges of Q, and of K and V."""
    rank = dist.get_rank()
    return (
        AllToAll.build(plan.q_moves(), plan, rank, group, is_sum=False, device=case.device),
        AllToAll.build(plan.kv_moves(), plan, rank, group, is_sum=True, device=case.device),
    )


def _measure_attention(
    case: Case,
    plans: Mapping[str, SequencePlan],
    dispatcher: SequenceDispatcher,
    group: dist.ProcessGroup,
    rounds: _Rounds,
) -> None:
    rank, kernel, expected = dist.get_rank(), kernel_of(case), None
    for name, plan in plans.items():
        tables, rows = plan.of_rank(rank), _Rows(case, plan)
        attention = attention_of(case, tables, kernel)
        step, there = _step_of(name, case, plan, dispatcher, group, attention, rows.qkv)
        out = _without_gradients(step, rows.qkv)
        if name == "at_home":
            expected = out
        elif name == "balanced":
            torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
        del out
        operations = 4 * case.width * case.query_heads * int(plan.attention_pairs.max())
        for phase, function, inputs, gradients in (
            ("attention", attention, there, rows.draw(tables.num_q_rows)),
            ("step", step, rows.qkv, [rows.out_grad]),
        ):
            for more, one, work in (
                ("", partial(_without_gradients, function, inputs), 1),
                (GRADIENTS, partial(_with_gradients, function, inputs, gradients), 1 + BACKWARD_WORK),
            ):
                facts = {"load": load(plan), "kernel": kernel, "operations": work * operations}
                rounds.time(phase + more, name, one, start_alike=True, **facts)


def _step_of(
    name: str,
    case: Case,
    plan: SequencePlan,
    dispatcher: SequenceDispatcher,
    group: dist.ProcessGroup,
    attention: Attention,
    qkv: Tensors,
) -> tuple[Attention, Tensors]:
    """Attention with the way there and back, from home to home; and the rows that have arrived."""

    def dispatch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        if name == "balanced":
            return dispatcher.dispatch(q, k, v, plan)
        if name == "context_parallel":
            return q, of_kv.there(k), of_kv.there(v)
        return q, k, v

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention(*dispatch(q, k, v))
        return dispatcher.combine(out, plan) if name == "balanced" else out

    _, of_kv = _exchanges(plan, case, group)
    return step, _without_gradients(dispatch, qkv)

"""`tests/bench/run.py imbalance`: what a MoE layer costs if one rank gets more rows than the others.

A process per GPU of this machine, or the ranks of a job. Each rank sends as many rows; rank 0 receives SHARE times the
mean over ranks, its experts alike. Phases, each forward and backward: "experts" alone, two grouped products of torch
whose offsets are on the device, and SwiGLU in between; "dispatch+combine", with experts that return their rows; and the
"layer" of all three. "ours": counts are exchanged in every pass, and the host does not wait for them
(`max_recv_tokens`). "nccl_all_to_all": NCCL's all-to-all with copies into the order of experts and back, with counts
that the host knows beforehand. A round is timed by CUDA events, from the moment when all GPUs start, with all of the
host's work done before; its time is that of its slowest rank. "/ even": over that with the first of the shares. T
tokens on this rank, H hidden, F width of an expert, K choices of a token, L experts on each of W ranks, bf16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from sequence_baselines import Linear
from torch.nn import functional

import megatron_ep as ep
from megatron_ep.tools.arguments import add_rounds, positive
from megatron_ep.tools.bench.gpu_ranks import gpu_ranks
from megatron_ep.tools.bench.report import PERCENTILES, WHAT, Columns, Measured, Record, Report, slowest
from megatron_ep.tools.bench.timing import Reading, Step, Timer, cuda_timer, host_timer, meet, seconds_of
from megatron_ep.tools.job_ranks import own_gpu

SLEEP_HZ = 2e9  # at least the clock of a GPU
MAX_SLEEP_S = 0.2
TIMEOUT_S = 120.0  # for everything on this machine, or until the ranks of a job have met

Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    model: str
    hidden: int
    ffn: int
    local_experts: int
    topk: int = 8
    tokens: int = 4096
    share: float = 1.0

    def __str__(self) -> str:
        sizes = f"T={self.tokens} H={self.hidden} F={self.ffn} K={self.topk} L={self.local_experts}"
        return f"{self.model} {sizes}, rank 0 has {self.share:g} x the mean of rows"


MODELS = (Case("Qwen3-30B", 2048, 768, 64), Case("DeepSeek-V3", 7168, 2048, 16))


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    parser = argparse.ArgumentParser("run.py imbalance", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokens", type=positive, default=4096, metavar="T", help="per rank (%(default)s)")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=[1.0, 1.25, 1.5, 2.0],
        metavar="SHARE",
        help="rows of rank 0 over the mean (%(default)s)",
    )
    add_rounds(parser, warmup=3, iters=10)
    arguments = parser.parse_args(argv)
    if not hasattr(functional, "grouped_mm"):
        raise ValueError(f"torch {torch.__version__} has no torch.nn.functional.grouped_mm, which needs 2.9 or later")
    cases = [model._replace(tokens=arguments.tokens, share=share) for model in MODELS for share in arguments.shares]
    with gpu_ranks("run.py imbalance", TIMEOUT_S) as ranks:
        for case in cases:
            check(case, ranks.world_size)
        report = Report(arguments.json, ranks.rank)
        by_rank = ranks.run(measure, cases, "cuda", arguments.warmup, arguments.iters)
    even: dict[tuple[str, ...], float] = {}
    for case, same in zip(cases, zip(*by_rank, strict=True), strict=True):
        records = [slowest(of_phase) for of_phase in zip(*same, strict=True)]
        report.add(f"{ranks.world_size} GPUs, {case}", records, WHAT | PERCENTILES | _over_even(even, records))
    return 0


def _over_even(even: dict[tuple[str, ...], float], records: Sequence[Record]) -> Columns:
    """even: seconds with the first share, by model, phase and implementation, to which those of new ones are added."""

    def key(record: Record) -> tuple[str, ...]:
        return record["model"], record["phase"], record["implementation"]

    for record in records:
        even.setdefault(key(record), record["seconds"])
    return {"/ even": lambda record: f"{record['seconds'] / even[key(record)]:.2f}"}


def check(case: Case, world_size: int) -> None:
    """Raises ValueError if rank 0 cannot have this share of the rows."""
    if world_size < 2:
        raise ValueError(f"there is {world_size} GPU, must be at least 2")
    if not 0 <= case.share <= world_size:
        raise ValueError(f"--shares has {case.share:g}, must be in [0, {world_size}] for {world_size} GPUs")


def draw(case: Case, world_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights fp32 and experts int64 of each token: [T, K]. T K share / W random choices, rounded, are
    experts of rank 0; within rank 0, and over the experts of the others, they are uniform."""
    device, local, shape = generator.device, case.local_experts, (case.tokens, case.topk)
    assert case.topk <= local, case

    def permutation(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device).argsort(dim=-1)

    rows = round(case.tokens * case.topk * case.share / world_size)
    first = (permutation(case.tokens * case.topk) < rows).view(shape).sum(dim=1, keepdim=True)  # choices in rank 0
    column = torch.arange(case.topk, device=device).expand(shape)
    hot = permutation(case.tokens, local).gather(1, column)
    cold = local + permutation(case.tokens, (world_size - 1) * local).gather(1, (column - first).clamp(min=0))
    return torch.rand(shape, generator=generator, device=device), torch.where(column < first, hot, cold)


# ---- on every rank


def measure(cases: Sequence[Case], device: str, warmup: int, iterations: int) -> list[list[Measured]]:
    """Runs with "cuda" or, for tests, "cpu". Raises AssertionError if the implementations differ."""
    if device == "cuda":
        torch.cuda.set_device(own_gpu())
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
    measured = []
    for case in cases:
        config = ep.Config(case.local_experts * dist.get_world_size(), row_bytes=2 * case.hidden)
        with ep.Buffer(None, config, device=device) as buffer:
            layer = _Layer(case, buffer, device, group)
            layer.check_equal()
            settings = case._asdict() | {"max_vio": layer.max_vio}
            of_case = []
            for (phase, implementation), step in layer.steps().items():
                timer = _timer(step, device, group)
                seconds = seconds_of(timer, warmup, iterations)
                of_case.append(Measured(str(case), phase, implementation, seconds, 0, settings))
            measured.append(of_case)
            buffer.synchronize()
            del layer
    return measured


def _timer(step: Step, device: str, group: dist.ProcessGroup) -> Timer:
    """On a GPU: it sleeps until the host has launched the step, then all GPUs meet, then the step is timed."""
    if device == "cpu":
        return host_timer(step, before=dist.barrier)
    met, timed, sleep = torch.zeros(1, device=device), cuda_timer(step), [MAX_SLEEP_S / 4]

    def timer() -> Reading:
        meet()
        torch.cuda._sleep(int(SLEEP_HZ * sleep[0]))
        dist.all_reduce(met, group=group)
        start = time.perf_counter()
        reading = timed()
        sleep[0] = min(MAX_SLEEP_S, 2e-3 + 2 * (time.perf_counter() - start))  # for the next round
        return reading

    return timer


class _Layer:
    """A rank's tokens and experts, and both ways to exchange rows.

    max_vio: rows of the expert with the most over the mean over all experts, less 1.
    """

    def __init__(self, case: Case, buffer: ep.Buffer, device: str, group: dist.ProcessGroup) -> None:
        rank, world_size, local = dist.get_rank(), dist.get_world_size(), case.local_experts
        self._buffer, self._group, self._topk = buffer, group, case.topk
        generator = torch.Generator(device).manual_seed(rank)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

        weights, self._ids = draw(case, world_size, generator)
        # As leaves: tokens, weights of choices, and those of the experts.
        self._leaves = (
            normal(case.tokens, case.hidden),
            weights,
            normal(local, 2 * case.ffn, case.hidden, scale=case.hidden**-0.5),
            normal(local, case.hidden, case.ffn, scale=case.ffn**-0.5),
        )
        self._gradient = normal(case.tokens, case.hidden)

        by_expert = self._ids.flatten().sort(stable=True)
        self._token_of_row, self._choice_of_row = by_expert.indices // case.topk, by_expert.indices
        self._row_of_choice = by_expert.indices.argsort()
        counts = by_expert.values.bincount(minlength=world_size * local).cpu()
        gathered = [torch.empty_like(counts) for _ in range(world_size)]
        dist.all_gather(gathered, counts)
        incoming = torch.stack(gathered).view(world_size, world_size, local)  # [source, destination, L]
        self._sent, self._received = incoming[rank].sum(dim=1).tolist(), incoming[:, rank].sum(dim=1).tolist()
        self.rows = sum(self._received)
        expert_of_row = torch.arange(local).repeat(world_size).repeat_interleave(incoming[:, rank].flatten())
        self._grouped = expert_of_row.sort(stable=True).indices.to(device)
        self._ungrouped = self._grouped.argsort()
        of_expert = incoming.sum(dim=0)
        self._offsets = of_expert[rank].cumsum(0).to(device, torch.int32)
        self.max_vio = (of_expert.max() / of_expert.double().mean()).item() - 1

    def steps(self) -> dict[tuple[str, str], Step]:
        """Returns the steps by phase and implementation, each a forward and a backward pass."""
        ways: dict[str, Callable[..., Any]] = {"ours": self._ours, "nccl_all_to_all": self._all_to_all}
        with torch.no_grad():
            x, probs, *_ = self._all_to_all_dispatch(*self._leaves[:2])
        rows, gradient = (x, probs, *self._leaves[2:]), torch.ones_like(x)
        experts = partial(self._experts, offsets=self._offsets)
        return {
            ("experts", "grouped_mm"): partial(self._pass, experts, rows, gradient),
            **{
                (phase, name): partial(self._pass, partial(way, **options), self._leaves, self._gradient)
                for phase, options in (("dispatch+combine", {"has_experts": False}), ("layer", {}))
                for name, way in ways.items()
            },
        }

    def check_equal(self) -> None:
        """Compares the outputs, and all gradients. Sums of bf16 rows may differ in their last bits."""
        ways = [self._pass(way, self._leaves, self._gradient) for way in (self._ours, self._all_to_all)]
        names = ("output", "x.grad", "weights.grad", "w1.grad", "w2.grad")
        for name, ours, theirs in zip(names, *ways, strict=True):
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                apart = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp(min=1e-6)
                assert apart < 0.02, f"{name} differs from all-to-all's by {apart:.3f} of its largest value"

    def _pass(
        self, function: Callable[..., torch.Tensor], leaves: Tensors, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the output, and the gradients of the leaves; None for those that it does not depend on."""
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        output = function(*leaves)
        return output.detach(), *torch.autograd.grad(output, leaves, gradient, allow_unused=True)

    def _ours(
        self, x: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, has_experts: bool = True
    ) -> torch.Tensor:
        most = max(1, self.rows)
        received = ep.dispatch(x, self._ids, weights, buffer=self._buffer, max_recv_tokens=most)
        rows, probs = received.x, received.probs
        if has_experts:
            offsets = received.tokens_per_expert.to(x.device).cumsum(0).to(torch.int32)
            rows = self._experts(rows, probs, w1, w2, offsets)
        else:
            rows = _scaled(rows, probs)
        output: torch.Tensor = ep.combine(rows, received.handle)
        return output

    def _all_to_all(
        self, x: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, has_experts: bool = True
    ) -> torch.Tensor:
        rows, probs = self._all_to_all_dispatch(x, weights)
        rows = self._experts(rows, probs, w1, w2, self._offsets) if has_experts else _scaled(rows, probs)
        output: torch.Tensor = Linear.apply(self._sum, self._copy, rows)
        return output

    def _all_to_all_dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = Linear.apply(
            lambda of_choice: self._send(of_choice.flatten().index_select(0, self._choice_of_row)),
            lambda rows: self._return(rows).view(weights.shape),
            weights,
        )
        return Linear.apply(self._copy, self._sum, x), probs

    def _copy(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this rank's experts, from the tokens of each rank."""
        return self._send(x.index_select(0, self._token_of_row))

    def _sum(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the sums of each token's rows, from the rows of each rank's experts."""
        return self._return(rows).view(-1, self._topk, rows.shape[1]).sum(dim=1)

    def _send(self, rows: torch.Tensor) -> torch.Tensor:
        return self._exchange(rows, self._sent, self._received).index_select(0, self._grouped)

    def _return(self, rows: torch.Tensor) -> torch.Tensor:
        ungrouped = rows.index_select(0, self._ungrouped)
        return self._exchange(ungrouped, self._received, self._sent).index_select(0, self._row_of_choice)

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows, received, sent, group=self._group)
        return out

    def _experts(
        self, x: torch.Tensor, probs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        if not self.rows:  # no product of nothing; the gradients' exchange remains
            return _scaled(x, probs)
        gate, up = functional.grouped_mm(x, w1.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
        hidden = _scaled(functional.silu(gate) * up, probs)
        return functional.grouped_mm(hidden, w2.transpose(1, 2), offs=offsets)


def _scaled(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return x * probs.unsqueeze(1).to(x.dtype)

"""`tests/bench/run.py router`: the fused gate beside Megatron's unfused function, in one run.

All take the same logits, in turns. `ours` computes what our dispatcher takes (ids, weights, counts), `ours_dense` also
what Megatron's interface wants (probs and map [T, E]), as `megatron` does. T tokens, E experts, K choices of a token.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep import megatron as megatron_side
from megatron_ep.router.api import grouped_topk
from megatron_ep.tools.arguments import add_rounds, positive
from megatron_ep.tools.bench.report import EXTREMES, WHAT, Record, Report, make_record, relative
from megatron_ep.tools.bench.timing import GRAPH_CALLS, Timer, captured, cuda_timer, host_timer, time_rounds

PHASES = ("forward", "forward+backward")
EXPERTS, TOPK, GROUPS, GROUP_TOPK = 256, 8, 8, 4
Gate = Callable[[torch.Tensor], torch.Tensor]


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    arguments = _parse(argv)
    report = Report(arguments.json)
    with_megatron = megatron_side.is_installed()
    if not with_megatron:
        report.say("\nmegatron skipped: megatron-core is not installed")
    for tokens in arguments.tokens:
        records = _measure(tokens, arguments, with_megatron)
        report.add(records[0]["case"], records, WHAT | EXTREMES | relative("/ ours", "ours", records))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "run.py router",
        description="Times sigmoid routing with expert bias, groups, renormalisation and scaling in fp32.",
    )
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 128, 4096, 40000], metavar="T")
    add_rounds(parser, warmup=3, iters=15)
    usable = torch.cuda.is_available() and hasattr(_C, "router_forward_cuda")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if usable else "cpu", help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not usable:
        parser.error("--device cuda needs a GPU and a build with CUDA kernels; see megatron-ep env")
    return arguments


def _measure(tokens: int, arguments: argparse.Namespace, with_megatron: bool) -> list[Record]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, EXPERTS, generator=generator).to(arguments.device).requires_grad_()
    bias = (torch.randn(EXPERTS, generator=generator) / 100).to(arguments.device)
    gates = _make_gates(bias, with_megatron)
    _check_equal(gates, logits)

    timers = {(name, phase): _make_timer(gates[name], logits, phase) for name in gates for phase in PHASES}
    # What ran before leaves caches and spinning threads behind.
    seconds = time_rounds(timers, arguments.warmup, arguments.iters, shuffler=Random(0))
    sizes = f"T={tokens} E={EXPERTS} K={TOPK} groups {GROUP_TOPK}/{GROUPS}"
    more = dict(
        device=arguments.device, threads=torch.get_num_threads() if arguments.device == "cpu" else None, tokens=tokens
    )
    return [
        make_record(f"{sizes} {arguments.device}", phase, name, times, 0, **more)
        for (name, phase), times in seconds.items()
    ]


def _make_gates(bias: torch.Tensor, with_megatron: bool) -> dict[str, Gate]:
    """Each returns the tensor that the backward pass starts from."""
    options: dict[str, Any] = dict(num_groups=GROUPS, group_topk=GROUP_TOPK, expert_bias=bias)
    options |= dict(score_function="sigmoid", scaling_factor=2.5)

    def ours_dense(logits: torch.Tensor) -> torch.Tensor:
        probs = grouped_topk(logits, TOPK, **options, dense=True).probs
        assert probs is not None
        return probs

    gates: dict[str, Gate] = {
        "ours": lambda logits: grouped_topk(logits, TOPK, **options).weights,
        "ours_dense": ours_dense,
    }
    if with_megatron:
        from megatron_ep.megatron.router import topk_routing_with_score_function as unfused

        gates["megatron"] = lambda logits: unfused(logits, TOPK, **options)[0]
    return gates


def _check_equal(gates: dict[str, Gate], logits: torch.Tensor) -> None:
    """What is timed must be the same work. Rounding may decide a tie of two scores, so single rows may differ."""
    with torch.no_grad():
        outputs = {name: gate(logits) for name, gate in gates.items() if name != "ours"}
    for name, probs in outputs.items():
        differs = ~torch.isclose(probs, outputs["ours_dense"], rtol=1e-4, atol=1e-6).all(dim=1)
        assert differs.sum() <= len(logits) // 1000, f"{name} differs in {int(differs.sum())} of {len(logits)} rows"


def _make_timer(gate: Gate, logits: torch.Tensor, phase: str) -> Timer:
    wait = torch.cuda.synchronize if logits.is_cuda else lambda: None
    if phase == "forward":
        leaf = logits.detach()
        if logits.is_cuda:
            return cuda_timer(captured(lambda: gate(leaf)).replay, GRAPH_CALLS)
        return host_timer(lambda: gate(leaf))
    grad = torch.randn_like(gate(logits))

    def forward_and_backward() -> None:
        logits.grad = None
        gate(logits).backward(grad)

    return host_timer(forward_and_backward, before=wait, after=wait)

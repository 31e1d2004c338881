"""`tests/bench/run.py models`: dispatch and combine of a MoE layer of four models in training, and of Megatron's
all-to-all dispatcher with permutations fused by Transformer Engine, in one run.

A process per GPU of this machine, or the ranks of a job. Experts return their rows. A round is a forward and a backward
pass, by the host's clock from the moment when all ranks start until the GPU is done; its time is that of its slowest
rank. "ours" gets what Megatron's router returns, "ours_topk_router" what `EPTopKRouter` does. T tokens on this rank, H
hidden, K choices of a token, E experts, bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ep.tools.arguments import add_rounds, positive
from megatron_ep.tools.bench.gpu_case import draw_experts
from megatron_ep.tools.bench.gpu_ranks import gpu_ranks
from megatron_ep.tools.bench.report import PERCENTILES, WHAT, Measured, Report, relative, slowest
from megatron_ep.tools.bench.timing import host_timer, meet, time_rounds
from megatron_ep.tools.job_ranks import own_gpu


class Case(NamedTuple):
    model: str
    hidden: int
    experts: int
    topk: int
    tokens: int = 0

    def __str__(self) -> str:
        return f"{self.model} T={self.tokens} H={self.hidden} K={self.topk} E={self.experts}"


MODELS = (
    Case("Qwen3-30B", 2048, 128, 8),
    Case("Qwen3-235B", 4096, 128, 8),
    Case("Mixtral", 4096, 8, 2),
    Case("DeepSeek-V3", 7168, 256, 8),
)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    parser = argparse.ArgumentParser("run.py models", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokens", nargs="+", type=positive, default=[1024, 4096], metavar="T", help="(%(default)s)")
    add_rounds(parser, warmup=5, iters=30)
    arguments = parser.parse_args(argv)
    cases = [model._replace(tokens=tokens) for model in MODELS for tokens in arguments.tokens]
    with gpu_ranks("run.py models", timeout=300.0) as ranks:
        report = Report(arguments.json, ranks.rank)
        by_rank = ranks.run(measure, cases, "cuda", arguments.warmup, arguments.iters)
        for case, same in zip(cases, zip(*by_rank, strict=True), strict=True):
            records = [slowest(of_implementation) for of_implementation in zip(*same, strict=True)]
            columns = WHAT | PERCENTILES | relative("/ all-to-all", "megatron_alltoall", records)
            report.add(f"{ranks.world_size} GPUs, {case}", records, columns)
    return 0


def measure(cases: Sequence[Case], device: str, warmup: int, iterations: int) -> list[list[Measured]]:
    """Runs on every rank, with "cuda" or, for tests, "cpu". Raises AssertionError if the implementations differ."""
    if device == "cuda":
        torch.cuda.set_device(own_gpu())
    else:
        from megatron_ep.megatron.stand_ins import host_runtime

        host_runtime.enable()
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_ep.megatron.dispatcher import close_buffers

    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
    groups = ProcessGroupCollection(ep=group, tp_ep=group, expt_tp=dist.new_subgroups(group_size=1)[0])
    measured = []
    for case in cases:
        steps = _steps(case, device, groups)
        _check_equal({name: step() for name, step in steps.items()})
        timers = {name: host_timer(step, before=meet, after=torch.cuda.synchronize) for name, step in steps.items()}
        seconds = time_rounds(timers, warmup, iterations)
        measured.append(
            [Measured(str(case), "forward+backward", name, seconds[name], 0, case._asdict()) for name in timers]
        )
        meet()
        close_buffers()
    return measured


def _steps(case: Case, device: str, groups: Any) -> dict[str, Any]:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ep.megatron.dispatcher import EPTokenDispatcher

    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=case.hidden,
        num_moe_experts=case.experts,
        moe_router_topk=case.topk,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=device == "cuda",
        expert_model_parallel_size=dist.get_world_size(),
        params_dtype=torch.bfloat16,
        add_bias_linear=False,
    )
    local = case.experts // dist.get_world_size()
    indices = list(range(dist.get_rank() * local, (dist.get_rank() + 1) * local))
    ours = EPTokenDispatcher(local, indices, config, groups)
    ours.trusts_router = True  # as a layer with either router sets it
    theirs = MoEAlltoAllTokenDispatcher(local, indices, config, groups)

    generator = torch.Generator(device).manual_seed(dist.get_rank())
    weights, ids = draw_experts("uniform", case.tokens, case.topk, case.experts, generator)
    x, grad = torch.randn(2, case.tokens, 1, case.hidden, generator=generator, device=device).to(torch.bfloat16)
    dense = torch.zeros(case.tokens, case.experts, device=device)
    routing_map, probs = dense.bool().scatter_(1, ids, True), dense.scatter(1, ids, weights)
    return {
        "ours": partial(_step, ours, x, routing_map, probs, grad),
        "ours_topk_router": partial(_step, ours, x, ids, weights, grad),
        "megatron_alltoall": partial(_step, theirs, x, routing_map, probs, grad),
    }


def _step(
    dispatcher: Any, x: torch.Tensor, routing: torch.Tensor, probs: torch.Tensor, grad: torch.Tensor
) -> list[torch.Tensor]:
    """Runs a forward and a backward pass. Returns rows, their probabilities, the output, and gradients of x, probs."""
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    sent = dispatcher.dispatch_preprocess(x, routing, probs)
    rows, _counts, row_probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(*sent))
    output = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(rows)))
    torch.autograd.backward((output, row_probs), (grad, row_probs.detach()))
    assert x.grad is not None and probs.grad is not None
    return [rows, row_probs, output, x.grad, probs.grad]


def _check_equal(results: dict[str, list[torch.Tensor]]) -> None:
    expected = results.pop("megatron_alltoall")
    for name, result in results.items():
        for what, mine, theirs in zip(("rows", "probs", "output", "x.grad"), result, expected, strict=False):
            tolerance = 0 if what in ("rows", "probs") else 0.1  # Megatron sums bf16 rows in bf16
            torch.testing.assert_close(
                mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, at=f"{name} {what}": f"{at}: {text}"
            )
        sums = [gradients[-1].double().sum() for gradients in (result, expected)]
        torch.testing.assert_close(*sums, msg=lambda text, at=name: f"{at} probs.grad: {text}")

"""`megatron-ep check`: gradients, the specification, and Megatron's own dispatcher, on the machine at hand."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.backends import job
from megatron_ep.bench.arguments import positive, seconds
from megatron_ep.bench.local_ranks import LocalRanks
from megatron_ep.errors import EPError

TOPOLOGIES = ((1, 1), (1, 4), (2, 2), (3, 2))
TIMEOUT = 60.0  # seconds, of one wait inside a launch and of one comparison with Megatron
REFERENCE_CASES = 25
MEGATRON_RANKS = 4
MEGATRON_LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {  # TP, EP, fields of TransformerConfig
    "EP 4": (1, 4, {}),
    "EP 4, recompute": (1, 4, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "EP 4, capacity drops": (1, 4, {"moe_expert_capacity_factor": 0.7}),
    "EP 4, drop and pad": (1, 4, {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True}),
    "EP 4, shared expert overlapped": (
        1,
        4,
        {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True},
    ),
    "EP 2, TP 2": (2, 2, {"moe_token_dispatcher_type": "allgather"}),
}
MEGATRON_TOLERANCE = 1e-12  # of the largest value, in fp64


def main(argv: Sequence[str]) -> int:
    """Prints a line for each check; returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        "megatron-ep check",
        description="Checks gradients, equality with the specification, and equality with Megatron's own dispatchers "
        "on this machine. Takes about half a minute.",
    )
    network = parser.add_argument_group(
        "network", "Instead: every pair of machines of a job, under torchrun or in a Slurm job step, without GPUs."
    )
    network.add_argument("--network", action="store_true", help="status 1 if a link fails, loses packets or is slow")
    network.add_argument(
        "--ranks", type=positive, metavar="W", help="without a launcher: of this machine, each as a machine (3)"
    )
    network.add_argument("--timeout", type=seconds, default=60.0, metavar="S", help="of each wait (%(default)s s)")
    arguments = parser.parse_args(argv)
    if arguments.network:
        return _check_network(arguments.ranks, arguments.timeout)
    if arguments.ranks is not None:
        parser.error("--ranks goes with --network")
    failed = 0
    started = time.perf_counter()
    for name, check in _checks():
        start = time.perf_counter()
        try:
            outcome, detail = "pass", check()
        except Exception as error:
            outcome, detail = "FAIL", f"{type(error).__name__}: {error}"
            failed += 1
        print(f"{outcome}  {name:66} {time.perf_counter() - start:6.1f} s  {detail}", flush=True)
    print(f"{failed} failed" if failed else "all passed", f"in {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


def _check_network(ranks: int | None, timeout: float) -> int:
    from megatron_ep.cli import network

    try:
        if not job.adopt():
            return network.main_of_machine(ranks or 3, timeout)
        if ranks is not None:
            raise ValueError("--ranks: the launcher has started them")
        return network.main_of_rank(timeout)
    except (ValueError, EPError) as error:
        print(f"megatron-ep check: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1


def _checks() -> Iterator[tuple[str, Callable[[], str]]]:
    for nodes, ranks_per_node in TOPOLOGIES:
        yield (
            f"gradients in fp64, {nodes}x{ranks_per_node} ranks",
            functools.partial(check_gradients, nodes, ranks_per_node),
        )
    for nodes, ranks_per_node in TOPOLOGIES:
        yield (
            f"the specification, {nodes}x{ranks_per_node} ranks",
            functools.partial(check_reference, nodes, ranks_per_node),
        )
    if not megatron_side.is_installed():
        print("skipped: megatron-core is not installed, so there is nothing of Megatron's to compare with")
        return
    with LocalRanks(MEGATRON_RANKS, TIMEOUT) as ranks:
        for name, layout in MEGATRON_LAYERS.items():
            yield (
                f"a layer as with Megatron's dispatcher, {name}",
                functools.partial(check_megatron, ranks, *layout),
            )


def _random_ids(tokens: int, topk: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """[T, K] distinct experts for each token, some of them -1."""
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :topk]
    return ids.masked_fill(torch.rand(tokens, topk, generator=generator) < 0.2, -1).contiguous()


def check_gradients(nodes: int, ranks_per_node: int) -> str:
    """torch's gradcheck through dispatch, an expert function and combine, for tokens and weights of every rank."""
    generator = torch.Generator().manual_seed(0)
    num_ranks = nodes * ranks_per_node
    num_experts, topk, hidden = 2 * num_ranks, 2, 3
    tokens = [3 - rank % 3 for rank in range(num_ranks)]
    ids = [_random_ids(count, topk, num_experts, generator) for count in tokens]
    shapes = [(count, hidden) for count in tokens] + [(count, topk) for count in tokens]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    with ep.LocalCluster(nodes, ranks_per_node, ep.Config(num_experts=num_experts, timeout=TIMEOUT)) as cluster:

        def layer(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, weights = list(tensors[:num_ranks]), list(tensors[num_ranks:])
            received = ep.dispatch(x, ids, weights, buffer=cluster)
            rows = [torch.tanh(x) * probs.unsqueeze(1) for x, probs in zip(received.x, received.probs, strict=True)]
            return tuple(ep.combine(rows, received.handle))

        torch.autograd.gradcheck(layer, inputs)
    return f"{sum(tensor.numel() for tensor in inputs)} derivatives"


def check_reference(nodes: int, ranks_per_node: int) -> str:
    """Random cases against `megatron_ep.reference`: bitwise for dispatch, and for sums of small integers in fp64."""
    generator = torch.Generator().manual_seed(0)
    num_ranks = nodes * ranks_per_node

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    for _ in range(REFERENCE_CASES):
        num_experts = num_ranks * number(1, 4)
        topk, hidden, alignment = number(1, min(8, num_experts)), number(1, 300), number(1, 4)
        ids = [_random_ids(number(0, 60), topk, num_experts, generator) for _ in range(num_ranks)]
        x = [torch.randint(-8, 9, (idx.shape[0], hidden), generator=generator).double() for idx in ids]
        weights = [torch.rand(idx.shape, generator=generator) for idx in ids]
        with ep.LocalCluster(nodes, ranks_per_node, ep.Config(num_experts=num_experts, timeout=TIMEOUT)) as cluster:
            received = ep.dispatch(x, ids, weights, buffer=cluster, expert_alignment=alignment)
            output = ep.combine(received.x, received.handle)
        rows, probs, counts = ep.reference.dispatch(x, ids, weights, num_experts, alignment)
        sums = ep.reference.combine(rows, ids, num_experts, alignment)
        _require_equal("rows", received.x, rows)
        _require_equal("probs", received.probs, probs)
        _require_equal("tokens_per_expert", received.tokens_per_expert, counts)
        _require_equal("sums", output, sums)
    return f"{REFERENCE_CASES} random cases, every bit equal"


def _require_equal(name: str, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for rank, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{name} of rank {rank} differ from the specification")


def check_megatron(ranks: LocalRanks, tp: int, ep_size: int, options: dict[str, Any]) -> str:
    """Output and all gradients of a layer with Megatron's dispatcher and with ours, a process a rank."""
    by_rank = ranks.run(_compare_layers, tp, ep_size, options)
    wrong = {name for rank in by_rank for name, difference in rank.items() if not difference <= MEGATRON_TOLERANCE}
    worst = max(difference for rank in by_rank for difference in rank.values())
    if wrong:
        raise AssertionError(f"{', '.join(sorted(wrong))} differ by up to {worst:.1e} of the largest value")
    return f"largest relative difference {worst:.0e}"


def _compare_layers(tp: int, ep_size: int, options: dict[str, Any]) -> dict[str, float]:
    from megatron_ep.megatron.equivalence import compare_layers  # here, so that only the ranks import Megatron

    return compare_layers(tp, ep_size, tokens=24, seed=0, options=options)

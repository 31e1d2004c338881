"""`megatron-ep check`: gradients, the specification, and Megatron's own dispatcher, on the machine at hand or by the
ranks of a job (`check_job.py`)."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.cli import check_common, check_job
from megatron_ep.errors import EPError
from megatron_ep.meeting import job
from megatron_ep.tools.arguments import positive, seconds
from megatron_ep.tools.local_ranks import LocalRanks

TOPOLOGIES = ((1, 1), (1, 4), (2, 2), (3, 2))
TIMEOUT = 60.0  # seconds, of one wait inside a launch and of one comparison with Megatron
REFERENCE_CASES = 25
MEGATRON_RANKS = 4


def main(argv: Sequence[str]) -> int:
    """Prints a line for each check; returns 1 if one failed."""
    parser = argparse.ArgumentParser(
        "megatron-ep check",
        description="Checks gradients, equality with the specification, and equality with Megatron's own dispatchers "
        "on this machine; under torchrun or in a Slurm job step between the ranks of the job, on any number of "
        "machines, and on their GPUs where each has one. Takes about half a minute.",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=TIMEOUT, metavar="S", help="in a job: of each wait (%(default)s s)"
    )
    network = parser.add_argument_group(
        "network", "Instead: every pair of machines of a job, under torchrun or in a Slurm job step, without GPUs."
    )
    network.add_argument("--network", action="store_true", help="status 1 if a link fails, loses packets or is slow")
    network.add_argument(
        "--ranks", type=positive, metavar="W", help="without a launcher: of this machine, each as a machine (3)"
    )
    arguments = parser.parse_args(argv)
    if arguments.ranks is not None and not arguments.network:
        parser.error("--ranks goes with --network")
    try:
        is_rank = job.adopt()
        if arguments.network:
            return _check_network(is_rank, arguments.ranks, arguments.timeout)
        if is_rank:
            return check_job.main_of_rank(arguments.timeout)
    except (EPError, dist.DistError) as error:
        print(f"megatron-ep check: {error}", file=sys.stderr)
        return 1
    return _check_here()


def _check_here() -> int:
    failed = 0
    started = time.perf_counter()
    for name, check in _checks():
        start = time.perf_counter()
        try:
            outcome, detail = "pass", check()
        except Exception as error:
            outcome, detail = "FAIL", f"{type(error).__name__}: {error}"
            failed += 1
        print(check_common.line(outcome, name, time.perf_counter() - start, detail), flush=True)
    print(check_common.summary(failed, time.perf_counter() - started))
    return 1 if failed else 0


def _check_network(is_rank: bool, ranks: int | None, timeout: float) -> int:
    from megatron_ep.tools.network import main as network

    if not is_rank:
        return network.main_of_machine(ranks or 3, timeout)
    if ranks is not None:
        raise ValueError("--ranks: the launcher has started them")
    return network.main_of_rank(timeout)


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
        print(check_common.NO_MEGATRON)
        return
    with LocalRanks(MEGATRON_RANKS, TIMEOUT) as ranks:
        yield from check_common.megatron_checks(ranks)


def check_gradients(nodes: int, ranks_per_node: int) -> str:
    """torch's gradcheck through dispatch, an expert function and combine, for tokens and weights of every rank."""
    generator = torch.Generator().manual_seed(0)
    num_ranks = nodes * ranks_per_node
    num_experts, topk, hidden = 2 * num_ranks, 2, 3
    tokens = [3 - rank % 3 for rank in range(num_ranks)]
    ids = [check_common.random_ids(count, topk, num_experts, generator) for count in tokens]
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
    for _ in range(REFERENCE_CASES):
        num_experts = num_ranks * check_common.number(1, 4, generator)
        case = check_common.RandomCase.draw(num_ranks, num_experts, generator)
        with ep.LocalCluster(nodes, ranks_per_node, ep.Config(num_experts=num_experts, timeout=TIMEOUT)) as cluster:
            found = case.run(cluster, case.x, case.ids, case.weights)
        for name, expected in case.expected().items():
            _require_equal(name, found[name], expected)
    return f"{REFERENCE_CASES} random cases, every bit equal"


def _require_equal(name: str, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for rank, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if not torch.equal(mine, theirs):
            raise AssertionError(f"{name} of rank {rank} differ from the specification")

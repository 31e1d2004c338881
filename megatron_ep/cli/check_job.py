"""`megatron-ep check` by the ranks of a job: between them, over the network that a buffer of theirs takes."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator

import torch

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.buffer.rank_group import summable_dtypes
from megatron_ep.cli import check_common
from megatron_ep.errors import EPError
from megatron_ep.tools.job_ranks import JobRanks, own_gpu

BUFFER = "a buffer of all ranks"
DIRECTIONS = 8
# For each type the step of a central difference, and its allowed error relative to the largest derivative: about the
# square of the step, and what is rounded over the step.
STEPS = {torch.float64: (1e-5, 1e-6), torch.float32: (1e-2, 1e-3)}
TOKENS, TOPK, HIDDEN = 3, 2, 5
CASES = 25


def main_of_rank(timeout: float) -> int:
    """Rank 0 prints; all return 1 if a check failed on one of them.

    timeout: seconds that a rank waits for the others.

    Raises ValueError and EPError as `JobRanks` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's and gloo's, on every rank
        return _check_all(timeout)


def _check_all(timeout: float) -> int:
    with JobRanks(timeout, device=None) as ranks:

        def say(text: str) -> None:
            if ranks.rank == 0:
                print(text, flush=True)

        failed, started = 0, time.perf_counter()
        for name, run in _checks(ranks, timeout, say):
            begun = time.perf_counter()
            try:
                outcome, detail = "pass", run()
            except EPError:  # of the ranks, who cannot tell each other any more
                raise
            except (RuntimeError, ValueError, AssertionError) as error:
                outcome, detail = "FAIL", str(error)
                failed += 1
            say(check_common.line(outcome, name, time.perf_counter() - begun, detail))
            if failed and name == BUFFER:
                break  # the others need one, and would wait as long again
        say(check_common.summary(failed, time.perf_counter() - started))
    return 1 if failed else 0


def _checks(ranks: JobRanks, timeout: float, say: Callable[[str], None]) -> Iterator[tuple[str, Callable[[], str]]]:
    yield BUFFER, functools.partial(_describe, ranks, timeout)
    name = f"gradients in fp{8 * _widest(ranks.device).itemsize}"
    yield name, functools.partial(check_gradients, ranks, timeout)
    yield "the specification", functools.partial(check_reference, ranks, timeout)
    if not megatron_side.is_installed():
        say(check_common.NO_MEGATRON)
        return
    if ranks.device == "cuda":
        say("on the host, as Megatron's dispatcher is compared:")
    try:
        yield from check_common.megatron_checks(ranks)
    finally:
        from megatron_ep.megatron.shared_buffers import close_buffers

        close_buffers()


def _widest(device: str) -> torch.dtype:
    """Returns the widest type that is summed on the device: few builds for GPUs have sums in fp64."""
    return torch.float64 if torch.float64 in summable_dtypes(device) else torch.float32


def _describe(ranks: JobRanks, timeout: float) -> str:
    fabrics = ranks.run(_fabric, ranks.world_size, ranks.device, timeout)
    machines = len(set(ranks.machines))
    return f"{ranks.world_size} ranks on {machines} machine{'s' if machines > 1 else ''}, {fabrics[0]}"


def _fabric(world_size: int, device: str, timeout: float) -> str:
    with _buffer(world_size, device, timeout) as buffer:
        topology = buffer.topology
        return f"{topology.nodes}x{topology.ranks_per_node}, {buffer.device.type}, {buffer.fabric}"


def _buffer(num_experts: int, device: str, timeout: float) -> ep.Buffer:
    place = f"cuda:{own_gpu()}" if device == "cuda" else device
    return ep.Buffer(None, ep.Config(num_experts=num_experts, timeout=timeout), device=place)


def check_gradients(ranks: JobRanks, timeout: float) -> str:
    """What backward gives along random directions of all ranks' tokens and weights, beside central differences."""
    by_rank = ranks.run(_derivatives, ranks.rank, ranks.world_size, ranks.device, timeout)
    numeric, analytic = torch.tensor(by_rank, dtype=torch.float64).sum(dim=0)  # [D] each: of the sum over all ranks
    worst = float((numeric - analytic).abs().max() / analytic.abs().max())
    if not worst <= STEPS[_widest(ranks.device)][1]:
        raise AssertionError(f"derivatives differ by up to {worst:.1e} of the largest")
    return f"{DIRECTIONS} directions, largest relative difference {worst:.0e}"


def _derivatives(rank: int, world_size: int, device: str, timeout: float) -> tuple[list[float], list[float]]:
    """This rank's share of the derivative along each direction: by differences of its outputs, and by its gradients."""
    generator = torch.Generator().manual_seed(rank)
    tokens, experts = TOKENS - rank % TOKENS, 2 * world_size
    dtype = _widest(device)
    step, _ = STEPS[dtype]
    ids = check_common.random_ids(tokens, TOPK, experts, generator).to(device)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(tokens, width, generator=generator, dtype=dtype).to(device)

    x, weights, grad = draw(HIDDEN).requires_grad_(), draw(TOPK).requires_grad_(), draw(HIDDEN)
    numeric, analytic = [], []
    with _buffer(experts, device, timeout) as buffer:

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows = ep.dispatch(x, ids, weights, buffer=buffer)
            return (ep.combine(torch.tanh(rows.x) * rows.probs.unsqueeze(1), rows.handle) * grad).sum()

        layer(x, weights).backward()
        assert x.grad is not None and weights.grad is not None
        with torch.no_grad():
            for _ in range(DIRECTIONS):
                along_x, along_weights = draw(HIDDEN), draw(TOPK)
                ahead = layer(x + step * along_x, weights + step * along_weights)
                behind = layer(x - step * along_x, weights - step * along_weights)
                numeric.append(float(ahead - behind) / (2 * step))
                analytic.append(float((x.grad * along_x).sum() + (weights.grad * along_weights).sum()))
    return numeric, analytic


def check_reference(ranks: JobRanks, timeout: float) -> str:
    """Random cases against `megatron_ep.reference`: bitwise for dispatch, and for sums of small integers."""
    by_rank = ranks.run(_differences, ranks.rank, ranks.world_size, ranks.device, timeout)
    for rank, names in enumerate(by_rank):
        if names:
            raise AssertionError(f"{', '.join(names)} of rank {rank} differ from the specification")
    return f"{CASES} random cases, every bit equal"


def _differences(rank: int, world_size: int, device: str, timeout: float) -> list[str]:
    """What of this rank's differs from the specification in one of the cases, by name."""
    found: dict[str, None] = {}  # no error yet: the other ranks go on to the next case
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same
    experts = 3 * world_size
    with _buffer(experts, device, timeout) as buffer:
        for _ in range(CASES):
            case = check_common.RandomCase.draw(world_size, experts, generator, _widest(device))
            own = [of_ranks[rank].to(device) for of_ranks in (case.x, case.ids, case.weights)]
            actual = case.run(buffer, *own)
            for name, expected in case.expected().items():
                if not torch.equal(actual[name].cpu(), expected[rank]):
                    found[name] = None
    return list(found)

"""The checks of `megatron-ep check`: each runs on all ranks, and returns a line about its result or raises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.buffer.arguments import summable_dtypes
from megatron_ep.tools.job_ranks import JobRanks, own_gpu
from megatron_ep.tools.local_ranks import LocalRanks

Ranks = LocalRanks | JobRanks

BUFFER = "a buffer of all ranks"
DIRECTIONS = 8
# For each type the step of a central difference, and its allowed error relative to the largest derivative: about the
# square of the step, and what is rounded over the step.
STEPS = {torch.float64: (1e-5, 1e-6), torch.float32: (1e-2, 1e-3)}
TOKENS, TOPK, HIDDEN = 3, 2, 5
CASES = 25
GROUPED = ", grouped experts"
MEGATRON_LAYERS: dict[str, tuple[int, dict[str, Any]]] = {  # TP, fields of TransformerConfig
    "": (1, {}),
    ", recompute": (1, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ", capacity drops": (1, {"moe_expert_capacity_factor": 0.7}),
    ", drop and pad": (1, {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True}),
    ", shared expert overlapped": (1, {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True}),
    ", TP 2": (2, {"moe_token_dispatcher_type": "allgather"}),
    GROUPED: (1, {}),
}
MEGATRON_TOLERANCE = 1e-12  # of the largest value, in fp64


@dataclass(frozen=True)
class Place:
    """The buffers of the checks. device: "cpu", or "cuda" for the GPU of each rank. topology: None: as a buffer finds
    it. timeout: seconds that one wait may take."""

    device: str
    topology: ep.Topology | None
    timeout: float

    @property
    def dtype(self) -> torch.dtype:
        """The widest type that is summed on the device: few builds for GPUs have sums in fp64."""
        return torch.float64 if torch.float64 in summable_dtypes(self.device) else torch.float32

    def buffer(self, num_experts: int) -> ep.Buffer:
        device = f"cuda:{own_gpu()}" if self.device == "cuda" else self.device
        return ep.Buffer(None, ep.Config(num_experts, timeout=self.timeout), self.topology, device=device)


def checks_of(ranks: Ranks, timeout: float) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the name of each check, and the function that runs it."""
    device = ranks.device if isinstance(ranks, JobRanks) else "cpu"
    places = {"": Place(device, None, timeout)}
    if isinstance(ranks, JobRanks):
        yield BUFFER, functools.partial(describe, ranks, places[""])
    else:
        shapes = [(nodes, ranks.world_size // nodes) for nodes in (1, 2, 4)]
        places = {f", {n}x{g} ranks": Place(device, ep.Topology(n, g), timeout) for n, g in shapes}
    for name, place in places.items():
        yield f"gradients in fp{8 * place.dtype.itemsize}{name}", functools.partial(check_gradients, ranks, place)
    for name, place in places.items():
        yield f"the specification{name}", functools.partial(check_reference, ranks, place)
    where = " on the host" if device == "cuda" else ""
    for name, (tp, options) in MEGATRON_LAYERS.items() if megatron_side.is_installed() else ():
        if ranks.world_size % tp == 0:
            yield (
                f"a layer as with Megatron's dispatcher{where}, EP {ranks.world_size // tp}{name}",
                functools.partial(check_megatron, ranks, tp, options, "grouped" if name == GROUPED else None),
            )


def describe(ranks: JobRanks, place: Place) -> str:
    """Creates a buffer. Returns its ranks, topology and fabric."""
    machines = len(set(ranks.machines))
    fabric = ranks.run(_fabric, place, ranks.world_size)[0]
    return f"{ranks.world_size} ranks on {machines} machine{'s' if machines > 1 else ''}, {fabric}"


def _fabric(place: Place, num_experts: int) -> str:
    with place.buffer(num_experts) as buffer:
        topology = buffer.topology
        return f"{topology.nodes}x{topology.ranks_per_node}, {buffer.device.type}, {buffer.fabric}"


def check_gradients(ranks: Ranks, place: Place) -> str:
    """Compares the derivatives along random directions of all ranks' tokens and weights with central differences."""
    by_rank = ranks.run(_derivatives, place)
    numeric, analytic = torch.tensor(by_rank, dtype=torch.float64).sum(dim=0)  # [D] each: of the sum over all ranks
    worst = float((numeric - analytic).abs().max() / analytic.abs().max())
    if not worst <= STEPS[place.dtype][1]:
        raise AssertionError(f"derivatives differ by up to {worst:.1e} of the largest")
    return f"{DIRECTIONS} directions, largest relative difference {worst:.0e}"


def _derivatives(place: Place) -> tuple[list[float], list[float]]:
    """Returns this rank's share of the derivative along each direction: by differences of its outputs, and by its
    gradients."""
    rank, dtype = dist.get_rank(), place.dtype
    generator = torch.Generator().manual_seed(rank)
    tokens, experts = TOKENS - rank % TOKENS, 2 * dist.get_world_size()
    step, _ = STEPS[dtype]
    ids = random_ids(tokens, TOPK, experts, generator).to(place.device)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(tokens, width, generator=generator, dtype=dtype).to(place.device)

    x, weights, grad = draw(HIDDEN).requires_grad_(), draw(TOPK).requires_grad_(), draw(HIDDEN)
    numeric, analytic = [], []
    with place.buffer(experts) as buffer:

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            rows = ep.dispatch(x, ids, weights, buffer=buffer)
            return (ep.combine(torch.tanh(rows.x) * rows.probs.unsqueeze(1), rows.handle) * grad).sum()

        layer(x, weights).backward()
        assert x.grad is not None and weights.grad is not None
        with torch.no_grad():
            for _ in range(DIRECTIONS):
                along_x, along_weights = draw(HIDDEN), draw(TOPK)
                after = layer(x + step * along_x, weights + step * along_weights)
                before = layer(x - step * along_x, weights - step * along_weights)
                numeric.append(float(after - before) / (2 * step))
                analytic.append(float((x.grad * along_x).sum() + (weights.grad * along_weights).sum()))
    return numeric, analytic


def check_reference(ranks: Ranks, place: Place) -> str:
    """Compares random cases with `megatron_ep.reference`, bit by bit; the sums of small integers are exact."""
    for rank, names in enumerate(ranks.run(_differences, place)):
        if names:
            raise AssertionError(f"{', '.join(names)} of rank {rank} differ from the specification")
    return f"{CASES} random cases, every bit equal"


def _differences(place: Place) -> list[str]:
    """Returns the names of this rank's results that differ from the specification in one of the cases."""
    found: dict[str, None] = {}  # no error yet: the other ranks go on to the next case
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same
    rank, world = dist.get_rank(), dist.get_world_size()
    experts = 3 * world
    with place.buffer(experts) as buffer:
        for _ in range(CASES):
            topk, hidden, alignment = (number(1, most, generator) for most in (min(8, experts), 300, 4))
            ids = [random_ids(number(0, 60, generator), topk, experts, generator) for _ in range(world)]
            x = [torch.randint(-8, 9, (len(idx), hidden), generator=generator).to(place.dtype) for idx in ids]
            weights = [torch.rand(idx.shape, generator=generator) for idx in ids]
            own = [of_ranks[rank].to(place.device) for of_ranks in (x, ids, weights)]
            received = ep.dispatch(*own, buffer=buffer, expert_alignment=alignment)
            sums = ep.combine(received.x, received.handle)
            rows, probs, counts = ep.reference.dispatch(x, ids, weights, experts, alignment)
            for name, actual, expected in (
                ("rows", received.x, rows),
                ("probs", received.probs, probs),
                ("tokens_per_expert", received.tokens_per_expert, counts),
                ("sums", sums, ep.reference.combine(rows, ids, experts, alignment)),
            ):
                if not torch.equal(actual.cpu(), expected[rank]):
                    found[name] = None
    return list(found)


def number(low: int, high: int, generator: torch.Generator) -> int:
    """Returns a random number in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def random_ids(tokens: int, topk: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """Returns [T, K] distinct experts for each token, some of them -1."""
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :topk]
    return ids.masked_fill(torch.rand(tokens, topk, generator=generator) < 0.2, -1).contiguous()


def check_megatron(ranks: Ranks, tp: int, options: dict[str, Any], kind: str | None) -> str:
    """Compares output and all gradients of a layer with Megatron's dispatcher and with ours, and its experts."""
    experts = {"num_moe_experts": 2 * ranks.world_size}
    by_rank = ranks.run(_compare_layers, tp, ranks.world_size // tp, options | experts, kind)
    wrong = {name for rank in by_rank for name, difference in rank.items() if not difference <= MEGATRON_TOLERANCE}
    worst = max(difference for rank in by_rank for difference in rank.values())
    if wrong:
        raise AssertionError(f"{', '.join(sorted(wrong))} differ by up to {worst:.1e} of the largest value")
    return f"largest relative difference {worst:.0e}"


def _compare_layers(tp: int, ep_size: int, options: dict[str, Any], experts: str | None) -> dict[str, float]:
    from megatron_ep.megatron import equivalence  # here, so that only the ranks import Megatron

    try:
        return equivalence.compare_layers(tp, ep_size, tokens=24, seed=0, options=options, experts=experts)
    finally:
        equivalence.close_buffers()

"""What `megatron-ep check` on this machine and by the ranks of a job have in common: a line for each check, random
cases of the specification, and the layers that are compared with Megatron's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import megatron_ep as ep
from megatron_ep.tools.job_ranks import JobRanks
from megatron_ep.tools.local_ranks import LocalRanks

NO_MEGATRON = "skipped: megatron-core is not installed, so there is nothing of Megatron's to compare with"
MEGATRON_LAYERS: dict[str, tuple[int, dict[str, Any]]] = {  # TP, fields of TransformerConfig
    "": (1, {}),
    ", recompute": (1, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    ", capacity drops": (1, {"moe_expert_capacity_factor": 0.7}),
    ", drop and pad": (1, {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True}),
    ", shared expert overlapped": (
        1,
        {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True},
    ),
    ", TP 2": (2, {"moe_token_dispatcher_type": "allgather"}),
}
MEGATRON_TOLERANCE = 1e-12  # of the largest value, in fp64


def line(outcome: str, name: str, taken: float, detail: str) -> str:
    return f"{outcome}  {name:68} {taken:6.1f} s  {detail}"


def summary(failed: int, taken: float) -> str:
    return f"{f'{failed} failed' if failed else 'all passed'} in {taken:.0f} s"


def number(low: int, high: int, generator: torch.Generator) -> int:
    """A random one, of both bounds too."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def random_ids(tokens: int, topk: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """[T, K] distinct experts for each token, some of them -1."""
    ids = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)[:, :topk]
    return ids.masked_fill(torch.rand(tokens, topk, generator=generator) < 0.2, -1).contiguous()


@dataclass(frozen=True)
class RandomCase:
    """Random inputs for E experts; x, ids and weights have one tensor per rank. Sums of the small integers are exact in
    fp32."""

    num_experts: int
    alignment: int
    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    @classmethod
    def draw(
        cls, num_ranks: int, num_experts: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
    ) -> RandomCase:
        topk = number(1, min(8, num_experts), generator)
        hidden, alignment = number(1, 300, generator), number(1, 4, generator)
        ids = [random_ids(number(0, 60, generator), topk, num_experts, generator) for _ in range(num_ranks)]
        x = [torch.randint(-8, 9, (len(idx), hidden), generator=generator).to(dtype) for idx in ids]
        weights = [torch.rand(idx.shape, generator=generator) for idx in ids]
        return cls(num_experts, alignment, x, ids, weights)

    def run(self, buffer: Any, x: Any, ids: Any, weights: Any) -> dict[str, Any]:
        """What a dispatch and a combine give, by name: of a LocalCluster lists, of a Buffer tensors."""
        received = ep.dispatch(x, ids, weights, buffer=buffer, expert_alignment=self.alignment)
        sums = ep.combine(received.x, received.handle)
        return _by_name(received.x, received.probs, received.tokens_per_expert, sums)

    def expected(self) -> dict[str, list[torch.Tensor]]:
        """Returns the results by the specification."""
        dispatched = ep.reference.dispatch(self.x, self.ids, self.weights, self.num_experts, self.alignment)
        sums = ep.reference.combine(dispatched[0], self.ids, self.num_experts, self.alignment)
        return _by_name(*dispatched, sums)


def _by_name(*found: Any) -> dict[str, Any]:
    return dict(zip(("rows", "probs", "tokens_per_expert", "sums"), found, strict=True))


def megatron_checks(ranks: LocalRanks | JobRanks) -> Iterator[tuple[str, Callable[[], str]]]:
    for name, (tp, options) in MEGATRON_LAYERS.items():
        if ranks.world_size % tp == 0:
            yield (
                f"a layer as with Megatron's dispatcher, EP {ranks.world_size // tp}{name}",
                functools.partial(check_megatron, ranks, tp, options),
            )


def check_megatron(ranks: LocalRanks | JobRanks, tp: int, options: dict[str, Any]) -> str:
    """Output and all gradients of a layer with Megatron's dispatcher and with ours, a process a rank."""
    experts = {"num_moe_experts": 2 * ranks.world_size}
    by_rank = ranks.run(_compare_layers, tp, ranks.world_size // tp, options | experts)
    wrong = {name for rank in by_rank for name, difference in rank.items() if not difference <= MEGATRON_TOLERANCE}
    worst = max(difference for rank in by_rank for difference in rank.values())
    if wrong:
        raise AssertionError(f"{', '.join(sorted(wrong))} differ by up to {worst:.1e} of the largest value")
    return f"largest relative difference {worst:.0e}"


def _compare_layers(tp: int, ep_size: int, options: dict[str, Any]) -> dict[str, float]:
    from megatron_ep.megatron.equivalence import compare_layers  # here, so that only the ranks import Megatron

    return compare_layers(tp, ep_size, tokens=24, seed=0, options=options)

"""State that steps of a dispatcher pass on, under private names that Megatron's schedules use.

1F1B overlap runs each step as a separate graph and sets the probabilities between them; the trainer removes the
capacity factor to repeat a step that was over budget.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType

import torch

ATTRIBUTE = "_comm_manager"  # attribute of a dispatcher in which Megatron expects a StepState
NEEDED = {"token_probs", "dispatched_probs"}  # without these set, the overlap's steps have no gradients between them
SCHEDULE = "megatron.core.models.gpt.fine_grained_callables"


@dataclass
class StepState:
    """The state of a dispatcher, with the names of Megatron's flex dispatcher.

    router_topk: choices per token, including TP. _max_tokens_per_rank: tokens of the last dispatch with a capacity
        factor. The trainer divides by their product to suggest a factor.
    """

    moe_expert_rank_capacity_factor: float | None
    router_topk: int = 0
    _max_tokens_per_rank: int = 0
    token_probs: torch.Tensor | None = None
    dispatched_probs: torch.Tensor | None = None
    tokens_per_expert: torch.Tensor | None = None

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        return self.tokens_per_expert


def check_overlap() -> None:
    """Raises ValueError if the installed Megatron's 1F1B overlap uses other attributes of a dispatcher."""
    import megatron.core

    try:
        used = _names_used(importlib.import_module(SCHEDULE))
    except ImportError:
        used = frozenset()
    missing, unknown = NEEDED - used, used - {*vars(StepState), *StepState.__annotations__}
    if missing or unknown:
        what = f"sets no {', '.join(sorted(missing))}" if missing else f"uses {', '.join(sorted(unknown))}"
        raise ValueError(
            f"overlap_moe_expert_parallel_comm is True, but the schedule of megatron-core {megatron.core.__version__} "
            f"{what} of a dispatcher, with which this one has not been made to work: must be False"
        )


@functools.cache
def _names_used(module: ModuleType) -> frozenset[str]:
    """Returns the attributes of any `x._comm_manager` in a module's source."""
    return frozenset(
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == ATTRIBUTE
    )

"""Calls over a fabric between machines, which all ranks of `LocalRanks` run at once. The machines are this one, under
several names."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cards import cards_with
from cases import drawn
from forced_machines import machines_of
from process_cases import SIZES, check_cases, check_low_latency_cases

import megatron_ep as ep

W = 4
X, IDS = torch.ones(8, 16), torch.arange(16).view(8, 2)


def buffer_of(timeout: float = 20.0) -> ep.Buffer:
    """Whose ranks are nodes, and where X and IDS are a rank's rows and their experts."""
    return ep.Buffer(None, ep.Config(num_experts=16, timeout=timeout), ep.Topology(W, 1))


def cards_in_any_order(fabric: str) -> AbstractContextManager[None]:
    """Cards whose writes become visible late, and in any order."""
    return nullcontext() if fabric in ("", "tcp") else cards_with(seed=1 + dist.get_rank())


def between_machines(fabric: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) where every rank is on a machine by itself."""
    with machines_of(1, fabric):
        return function(*arguments)


def inputs(hidden: int):
    return drawn((37, 0, 1, 130), 16, 3, hidden)


def layer(buffer, x, ids, weights):
    """Dispatch, something nonlinear, combine, and both backward passes."""
    lists = isinstance(x, list)
    leaves = [t.clone().requires_grad_() for t in (x if lists else [x])]
    scales = [t.clone().requires_grad_() for t in (weights if lists else [weights])]
    one = (lambda items: items) if lists else (lambda items: items[0])
    rows = ep.dispatch(one(leaves), ids, one(scales), buffer=buffer)
    out = [r.tanh() for r in rows.x] if lists else rows.x.tanh()
    y = ep.combine(out, rows.handle, weights=rows.probs)
    sum(part.double().square().sum() for part in (y if lists else [y])).backward()
    return [*(y if lists else [y])], [t.grad for t in leaves], [t.grad for t in scales]


def run_cases(fabric: str, per_machine: int, per_node: int, seeds: range) -> None:
    """Random cases of both modes, and of few tokens, have the bits of ranks of one process; no fabric: on one
    machine."""
    both = SIZES["two_channels"]
    for sizes, promise in [*((sizes, None) for sizes in SIZES.values()), (both, both.max_tokens)]:
        config = replace(sizes.config(), max_tokens=promise)
        near = machines_of(per_machine, fabric) if fabric else nullcontext()
        with cards_in_any_order(fabric), near, ep.Buffer(None, config, ep.Topology(W // per_node, per_node)) as buffer:
            assert buffer.fabric == fabric or not fabric
            check_cases(buffer, sizes, seeds)
            if sizes is both and promise is None:
                check_low_latency_cases(buffer, seeds)

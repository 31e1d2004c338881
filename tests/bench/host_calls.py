"""The calls whose host work `tests/bench/run.py host` and `tests/host_work.py` measure, the latter of other checkouts
too: this file imports nothing but the library.

T tokens, H hidden, K choices of a token, E experts, bf16.
"""

from collections.abc import Callable
from typing import Any

import torch

import megatron_ep as ep

Call = Callable[[], Any]

TOKENS, HIDDEN, TOPK, EXPERTS = 128, 7168, 8, 64


class Inputs:
    def __init__(self, device: torch.device):
        self.x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
        self.weights, self.ids = torch.rand(TOKENS, EXPERTS, device=device).topk(TOPK, dim=1)


def calls_of(given: Inputs, buffer: ep.Buffer) -> dict[str, Call]:
    x, ids, weights, leaf = given.x, given.ids, given.weights, given.x.clone().requires_grad_()
    low_latency = ep.LowLatency(buffer, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK)
    received = low_latency.dispatch(x, ids, weights)
    rows, handle = received.x, received.handle

    def dispatch(layout: str, rows: torch.Tensor = x) -> ep.Received:
        return ep.dispatch(rows, ids, weights, buffer=buffer, max_recv_tokens=TOKENS * TOPK, layout=layout)

    normal, flat = dispatch("grouped"), dispatch("flat")
    differentiable = normal.x.clone().requires_grad_()

    def dispatch_hook() -> None:
        _, hook = low_latency.dispatch(x, ids, return_recv_hook=True)
        hook()

    def combine_hook() -> None:
        _, hook = low_latency.combine(rows, handle, weights, return_recv_hook=True)
        hook()

    return {
        "low-latency dispatch": lambda: low_latency.dispatch(x, ids),
        "low-latency combine": lambda: low_latency.combine(rows, handle, weights),
        "low-latency dispatch, hook": dispatch_hook,
        "low-latency combine, hook": combine_hook,
        "dispatch from scratch": lambda: dispatch("grouped"),
        "dispatch again": lambda: ep.dispatch(x, topk_weights=weights, handle=normal.handle),
        "combine": lambda: ep.combine(normal.x, normal.handle),
        "dispatch from scratch, gradient": lambda: dispatch("grouped", leaf),
        "dispatch again, gradient": lambda: ep.dispatch(leaf, topk_weights=weights, handle=normal.handle),
        "combine, gradient": lambda: ep.combine(differentiable, normal.handle),
        "flat dispatch from scratch": lambda: dispatch("flat"),
        "flat dispatch again": lambda: ep.dispatch(x, handle=flat.handle),
        "flat combine": lambda: ep.combine(flat.x, flat.handle),
    }

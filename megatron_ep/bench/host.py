"""`megatron-ep bench host`: what the host does for a call that is launched on a GPU, by its own clock.

One rank, which sends to itself; the GPU is idle before each round of calls, and has not finished when the host has.
T tokens, H hidden, K choices of a token, E experts, bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.bench.arguments import add_rounds, positive
from megatron_ep.bench.gpu_case import require_gpu
from megatron_ep.bench.report import WHAT, Record, Report, make_record
from megatron_ep.bench.timing import host_timer, time_rounds

CALLS = 10  # of a round, in a row: fewer than a buffer lets the host be ahead of the GPU
TOKENS, HIDDEN, TOPK, EXPERTS = 128, 7168, 8, 64
CASE = f"T={TOKENS} H={HIDDEN} K={TOPK} E={EXPERTS}"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    parser = argparse.ArgumentParser("megatron-ep bench host", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--num-sms", type=positive, default=24, metavar="N", help="(%(default)s)")
    add_rounds(parser, warmup=20, iters=200)
    arguments = parser.parse_args(argv)
    require_gpu("megatron-ep bench host")
    report = Report(arguments.json)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        records = measure("cuda", arguments.num_sms, arguments.warmup, arguments.iters)
    finally:
        dist.destroy_process_group()
    columns = {"lowest us": _microseconds("seconds_min"), "p50": _microseconds("seconds")}
    report.add(f"{CASE}: host work of a call", records, WHAT | columns)
    return 0


def measure(device: str, num_sms: int, warmup: int, iterations: int) -> list[Record]:
    """The records of a buffer of the default group, which has one rank."""
    config = ep.Config(num_experts=EXPERTS, num_sms=num_sms, timeout=10)
    with ep.Buffer(None, config, device=device) as buffer, torch.no_grad():
        records = []
        for phase, step in _steps(buffer).items():

            def calls(step: Callable[[], Any] = step) -> None:
                for _ in range(CALLS):
                    step()

            timer = host_timer(calls, before=buffer.synchronize)
            [seconds] = time_rounds({0: timer}, warmup, iterations).values()
            records.append(make_record(CASE, phase, "host", [second / CALLS for second in seconds], 0))
        return records


def _steps(buffer: ep.Buffer) -> dict[str, Callable[[], Any]]:
    device = buffer.device
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    weights, ids = torch.rand(TOKENS, EXPERTS, device=device).topk(TOPK, dim=1)
    low_latency = ep.LowLatency(buffer, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK)
    received = low_latency.dispatch(x, ids, weights)
    rows, handle = received.x, received.handle
    normal = ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=TOKENS * TOPK)

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
        "dispatch from scratch": lambda: ep.dispatch(x, ids, weights, buffer=buffer, max_recv_tokens=TOKENS * TOPK),
        "dispatch again": lambda: ep.dispatch(x, topk_weights=weights, handle=normal.handle),
        "combine": lambda: ep.combine(normal.x, normal.handle),
    }


def _microseconds(key: str) -> Callable[[Record], str]:
    return lambda record: f"{record[key] * 1e6:.1f}"


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))

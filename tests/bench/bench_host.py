"""`tests/bench/run.py host`: what the host does for a call that is launched on a GPU, by its own clock.

One rank, which sends to itself; the GPU is idle before each round of calls, and has not finished when the host has.
"waiting dispatch": the parts of one in which the host waits for counts, from the call to its return, in this order.
T tokens, H hidden, K choices of a token, E experts, bf16. Calls by DeepEP's names take turns with ours of the same
kind: the same rows, and nobody waits for counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from host_calls import EXPERTS, HIDDEN, TOKENS, TOPK, Call, Inputs, calls_of

import megatron_ep as ep
from megatron_ep import deep_ep
from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.tools.arguments import add_rounds, positive
from megatron_ep.tools.bench.gpu_case import require_gpu
from megatron_ep.tools.bench.report import WHAT, Record, Report, make_record
from megatron_ep.tools.bench.timing import Timer, host_timer, time_rounds

PARTS = ("enter", "launch notify", "launch dispatch", "see counts", "take the GIL", "return")
CALLS = 10  # of a round, in a row: fewer than a buffer lets the host be ahead of the GPU
CASE = f"T={TOKENS} H={HIDDEN} K={TOPK} E={EXPERTS}"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    parser = argparse.ArgumentParser("run.py host", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--num-sms", type=positive, default=24, metavar="N", help="(%(default)s)")
    add_rounds(parser, warmup=20, iters=200)
    arguments = parser.parse_args(argv)
    require_gpu("run.py host")
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
    """The records of the default group, which has one rank."""
    with ExitStack() as stack:
        buffer = stack.enter_context(
            ep.Buffer(None, ep.Config(num_experts=EXPERTS, num_sms=num_sms, timeout=10), device=device)
        )
        inputs = Inputs(buffer.device)
        theirs = [_calls_of_buffer(inputs, num_sms, stack), _calls_of_elastic_buffer(inputs, num_sms, stack)]
        calls = {"host": calls_of(inputs, buffer), "deep_ep.Buffer": theirs[0], "deep_ep.ElasticBuffer": theirs[1]}
        records = []
        for phase in calls["host"]:
            timers = {name: _timer(of[phase], buffer) for name, of in calls.items() if phase in of}
            for name, seconds in time_rounds(timers, warmup, iterations).items():
                records.append(make_record(CASE, phase, name, [second / CALLS for second in seconds], 0))
        for phase, seconds in _parts_of_a_wait(buffer, inputs, warmup, iterations).items():
            records.append(make_record(CASE, f"waiting dispatch: {phase}", "host", seconds, 0))
        return records


def _parts_of_a_wait(buffer: ep.Buffer, given: Inputs, warmup: int, iterations: int) -> dict[str, list[float]]:
    """The seconds of each part of a dispatch whose host waits for counts, in each round. Empty where it never does."""
    backend = rank_group_of(buffer).live_backend()
    rounds, marks, launch = [], list[int](), backend.launch

    def marked(*args: Any) -> Any:
        marks.append(time.monotonic_ns())
        result = launch(*args)
        marks.append(time.monotonic_ns())
        return result

    with mock.patch.object(backend, "launch", marked):
        for _ in range(warmup + iterations):
            buffer.synchronize()
            marks.clear()
            start = time.monotonic_ns()
            ep.dispatch(given.x, given.ids, given.weights, buffer=buffer)
            end = time.monotonic_ns()
            rounds.append([start, marks[0], *backend.launcher.count_times(), marks[1], end])
    if len(rounds[0]) < len(PARTS) + 1:
        return {}
    spans = [[(b - a) / 1e9 for a, b in pairwise(times)] for times in rounds[warmup:]]
    return {part: list(of_part) for part, of_part in zip(PARTS, zip(*spans, strict=True), strict=True)}


def _timer(call: Call, buffer: ep.Buffer) -> Timer:
    def calls() -> None:
        for _ in range(CALLS):
            call()

    return host_timer(calls, before=buffer.synchronize)


def _calls_of_buffer(given: Inputs, num_sms: int, stack: ExitStack) -> dict[str, Call]:
    x, ids, weights = given.x, given.ids, given.weights
    buffer = deep_ep.Buffer(dist.group.WORLD)
    stack.callback(buffer.destroy)
    config = deep_ep.Config(num_sms)
    *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    dispatch = partial(
        buffer.dispatch,
        x,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=in_rank,
        topk_idx=ids,
        topk_weights=weights,
        num_worst_tokens=TOKENS * TOPK,
        config=config,
    )
    rows, *_, handle, _ = dispatch()
    assert isinstance(rows, torch.Tensor) and handle is not None

    def low_latency_dispatch(has_hook: bool = False) -> Any:
        result = buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=has_hook)
        hook = result[-1]
        if hook is not None:
            hook()
        return result

    received, _, of_received, _, _ = low_latency_dispatch()

    def low_latency_combine(has_hook: bool = False) -> None:
        *_, hook = buffer.low_latency_combine(received, ids, weights, of_received, return_recv_hook=has_hook)
        if hook is not None:
            hook()

    return {
        "low-latency dispatch": low_latency_dispatch,
        "low-latency combine": low_latency_combine,
        "low-latency dispatch, hook": lambda: low_latency_dispatch(has_hook=True),
        "low-latency combine, hook": lambda: low_latency_combine(has_hook=True),
        "flat dispatch from scratch": dispatch,
        "flat dispatch again": lambda: buffer.dispatch(x, handle),
        "flat combine": lambda: buffer.combine(rows, handle),
    }


def _calls_of_elastic_buffer(given: Inputs, num_sms: int, stack: ExitStack) -> dict[str, Call]:
    x, ids, weights = given.x, given.ids, given.weights
    buffer = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN)
    stack.callback(buffer.destroy)
    dispatch = partial(buffer.dispatch, x, ids, weights, num_experts=EXPERTS, num_sms=num_sms, do_cpu_sync=False)
    grouped, *_, grouped_handle, _ = dispatch(do_expand=True)
    flat, *_, flat_handle, _ = dispatch(do_expand=False)
    assert isinstance(grouped, torch.Tensor) and isinstance(flat, torch.Tensor)
    return {
        "dispatch from scratch": partial(dispatch, do_expand=True),
        "dispatch again": partial(buffer.dispatch, x, topk_weights=weights, handle=grouped_handle, do_expand=True),
        "combine": lambda: buffer.combine(grouped, grouped_handle),
        "flat dispatch from scratch": partial(dispatch, do_expand=False),
        "flat dispatch again": lambda: buffer.dispatch(x, handle=flat_handle),
        "flat combine": lambda: buffer.combine(flat, flat_handle),
    }


def _microseconds(key: str) -> Callable[[Record], str]:
    return lambda record: f"{record[key] * 1e6:.1f}"

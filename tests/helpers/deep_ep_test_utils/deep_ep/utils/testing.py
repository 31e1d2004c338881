"""`deep_ep.utils.testing`: timing of calls and kernels."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

FLUSHED_BYTES = 256 << 20  # more than a GPU's cache
# The kernels of this library for each name of a DeepEP kernel, by which tests ask for times.
KERNELS = {
    "dispatch": ("notify_kernel", "dispatch_kernel", "own_rows_kernel"),
    "dispatch_impl": ("notify_kernel", "dispatch_kernel", "own_rows_kernel"),
    "dispatch_copy_epilogue_impl": ("intra_rank_permute_kernel",),
    "combine": ("combine_kernel",),
    "combine_impl": ("combine_kernel",),
    "combine_reduce_epilogue_impl": ("intra_rank_reduce_kernel",),
}


def bench(
    fn: Callable[[], Any], num_warmups: int = 50, num_tests: int = 50, post_fn: Callable[[], Any] | None = None
) -> tuple[float, float, float]:
    """Returns mean, least and most seconds of calls on the current stream with a cold cache, except the first call."""
    for _ in range(num_warmups):
        fn()
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    pairs = []
    for _ in range(num_tests):
        flushed.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        fn()
        events[1].record()
        pairs.append(events)
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in pairs][1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
    **ignored: Any,
) -> Any:
    """Returns for each name the seconds of its kernels in one call; NaN if none ran.

    num_kernels_per_period: launches per call. If it is not 1, the seconds of each launch are returned, as a list.
    """
    names = [kernel_names] if isinstance(kernel_names, str) else list(kernel_names)
    fn()
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere if suppress_kineto_output else sys.stdout),
        profile(activities=[ProfilerActivity.CUDA]) as profiler,
    ):
        for _ in range(num_tests):
            if barrier_comm_profiling:
                (barrier or dist.barrier)()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    launches = list(_launches(profiler))
    results = [seconds_of(launches, KERNELS.get(name, (name,)), num_tests, num_kernels_per_period) for name in names]
    return results[0] if isinstance(kernel_names, str) else tuple(results)


def _launches(profiler: Any) -> Iterator[tuple[str, float, float]]:
    """Yields (name, start, microseconds) for each event on the GPU."""
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            yield event.name, event.time_range.start, event.time_range.elapsed_us()


def seconds_of(
    launches: Sequence[tuple[str, float, float]], parts: Sequence[str], num_calls: int, per_call: int
) -> float | list[float]:
    ours = sorted((start, us) for name, start, us in launches if any(part in name for part in parts))
    if not ours:
        return math.nan if per_call == 1 else [math.nan] * per_call
    if per_call == 1:
        return sum(us for _, us in ours) / num_calls / 1e6
    return [sum(us for _, us in ours[i::per_call]) / len(ours[i::per_call]) / 1e6 for i in range(per_call)]

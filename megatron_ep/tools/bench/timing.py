"""The timing loop of all benchmarks, with the host's clock or CUDA events.

A timer runs a step once and returns a reading: a function that returns the seconds of the step. CUDA events are read
after all rounds, so that the rounds of a GPU have no gaps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Step = Callable[[], Any]
Reading = Callable[[], float]
Timer = Callable[[], Reading]
Name = TypeVar("Name")

GRAPH_CALLS = 20  # calls of a step in a CUDA graph, so that the host's work is not measured


def host_timer(step: Step, before: Step = lambda: None, after: Step = lambda: None) -> Timer:
    """Times by the host's clock, from the end of `before` (such as a barrier) to the end of `after` (such as a wait for
    a GPU)."""

    def timer() -> Reading:
        before()
        start = time.perf_counter()
        result = step()
        after()
        seconds = time.perf_counter() - start
        del result  # freed outside of the measured time
        return lambda: seconds

    return timer


def cuda_timer(step: Step, calls: int = 1) -> Timer:
    """Times by CUDA events around the step on the current stream. Its seconds are divided by `calls`."""

    def timer() -> Reading:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()

        def reading() -> float:
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / calls

        return reading

    return timer


def meet() -> None:
    """Waits until the GPU, if this process uses one, is done and all ranks, if there are others, are here."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """Returns a CUDA graph of GRAPH_CALLS calls of a step. All ranks capture together."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            step()
    meet()
    return graph


def time_rounds(
    timers: Mapping[Name, Timer],
    warmup: int,
    iterations: int,
    when_warm: Step = lambda: None,
    shuffler: Random | None = None,
) -> dict[Name, list[float]]:
    """Returns the seconds [iterations] of each timer. Each round runs all timers once.

    warmup: number of rounds before the timed ones.
    when_warm: called after the warmup.
    shuffler: draws the order of each round; None keeps the order of `timers`.
    """
    order = list(timers)
    readings: dict[Name, list[Reading]] = {name: [] for name in timers}
    for iteration in range(warmup + iterations):
        if iteration == warmup:
            when_warm()
        if shuffler is not None:
            shuffler.shuffle(order)
        for name in order:
            reading = timers[name]()
            if iteration >= warmup:
                readings[name].append(reading)
    return {name: [reading() for reading in of_name] for name, of_name in readings.items()}


def seconds_of(timer: Timer, warmup: int, iterations: int) -> list[float]:
    """Returns the seconds [iterations] of a timer that all ranks run, which begin together."""
    return time_rounds({"": timer}, warmup, iterations, when_warm=meet)[""]

"""`megatron-ep bench NAME`: a benchmark of `bench.NAMES`; without a name, a layer on the host."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from megatron_ep.meeting import job
from megatron_ep.tools.bench import NAMES


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names, and imports only its module."""
    if argv and argv[0] in NAMES:
        name, argv = argv[0].replace("-", "_"), argv[1:]
    elif argv and not argv[0].startswith("-"):
        raise ValueError(f"no benchmark {argv[0]!r}; there are {', '.join(NAMES)}")
    else:
        name = "layer"
    return run(importlib.import_module(f"megatron_ep.tools.bench.{name}").main, argv)


def run(benchmark: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs one benchmark. Returns its exit status. Raises ValueError for sizes that do not fit."""
    try:
        job.adopt()  # sets torchrun's variables in a Slurm job step
        return benchmark(argv)
    except RuntimeError as error:
        import torch  # imported late, because some benchmarks need no torch and start faster

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"these sizes do not fit: {str(error).partition('. ')[0]}") from None

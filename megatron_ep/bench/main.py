"""`megatron-ep bench NAME`, of `bench.NAMES`: without a name, a layer on the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megatron_ep.bench import NAMES
from megatron_ep.meeting import job


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names, each of which imports what it needs."""
    if argv and argv[0] in NAMES:
        name, argv = argv[0].replace("-", "_"), argv[1:]
    elif argv and not argv[0].startswith("-"):
        print(f"megatron-ep bench: no benchmark {argv[0]!r}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    else:
        name = "layer"
    try:
        job.adopt()  # or a Slurm step tells too little of itself
        status: int = importlib.import_module(f"megatron_ep.bench.{name}").main(argv)
    except ValueError as error:
        print(f"megatron-ep bench: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        import torch  # some of them need no torch, and start faster without

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        print(f"megatron-ep bench: these sizes do not fit: {str(error).partition('. ')[0]}", file=sys.stderr)
        return 2
    return status

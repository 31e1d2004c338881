"""`megatron-ep bench NAME`, of `NAMES`: without a name, a layer on the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

NAMES = ("router", "agreement", "cuda", "gpus", "low-latency", "compare", "tables")


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names, each of which imports what it needs."""
    if argv and argv[0] in NAMES:
        name, argv = argv[0].replace("-", "_"), argv[1:]
    else:
        name = "layer"
    import torch

    try:
        status: int = importlib.import_module(f"megatron_ep.bench.{name}").main(argv)
    except torch.OutOfMemoryError as error:
        print(f"megatron-ep bench: these sizes do not fit: {str(error).partition('. ')[0]}", file=sys.stderr)
        return 2
    return status

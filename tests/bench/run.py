"""Runs a benchmark that answers a question of the developers: python tests/bench/run.py NAME, each with its --help.

The modules bench_NAME.py of this folder, which take the loop and the report of `megatron-ep bench`:
    imbalance  a layer if one of several GPUs gets more rows than the others, and NCCL's all-to-all
    models     dispatch and combine of a layer of four models in training, on several GPUs, and Megatron's all-to-all
    router     the gate, on the CPU or a GPU
    sequences  attention on other ranks: the way there and back, and what balance gains
"""

import importlib
import sys

from megatron_ep.tools.bench.main import run

NAMES = ("imbalance", "models", "router", "sequences")


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in NAMES:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return run(importlib.import_module(f"bench_{argv[0]}").main, argv[1:])
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

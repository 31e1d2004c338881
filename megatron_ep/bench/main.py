"""`megatron-ep bench [router | cuda | gpus | low-latency | compare]`: without a name, a layer on the host."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names, each of which imports what it needs."""
    if argv and argv[0] == "router":
        from megatron_ep.bench import router

        return router.main(argv[1:])
    if argv and argv[0] == "cuda":
        from megatron_ep.bench import cuda

        return cuda.main(argv[1:])
    if argv and argv[0] == "gpus":
        from megatron_ep.bench import gpus

        return gpus.main(argv[1:])
    if argv and argv[0] == "low-latency":
        from megatron_ep.bench import low_latency

        return low_latency.main(argv[1:])
    if argv and argv[0] == "compare":
        from megatron_ep.bench import compare

        return compare.main(argv[1:])
    from megatron_ep.bench import layer

    return layer.main(argv)

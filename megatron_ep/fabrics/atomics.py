"""Checks for native atomics between GPUs: with them a rank that gives up writes its reason to the others, and the first
reason stays. GPUs that are joined by PCIe alone mostly lack them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics import gpu


def native_atomics(first: int, second: int) -> bool:
    """Returns whether two GPUs, by their index in this process, have native atomics on each other's memory."""
    return first == second or (_C.has_native_atomics(first, second) and _C.has_native_atomics(second, first))


def _seen() -> dict[str, int]:
    """Returns the index of each GPU that this process sees, by UUID."""
    return {gpu.uuid(i): i for i in range(torch.cuda.device_count())}


def are_native(own: str | None, gpus: Sequence[str | None]) -> bool:
    """Returns whether native atomics are known between this GPU and all others, which means that NVLink joins them.

    own, gpus: UUIDs. Nothing is known about a GPU that this process does not see.
    """
    seen = _seen()
    return all(
        gpu == own or (str(gpu) in seen and str(own) in seen and native_atomics(seen[str(own)], seen[str(gpu)]))
        for gpu in gpus
    )


def check(rank: int, gpus: Sequence[str | None], mapped: Sequence[int]) -> None:
    """Raises EPError if native atomics are missing between this rank's GPU and that of a rank that it maps (`mapped`).

    A GPU that this process does not see (CUDA_VISIBLE_DEVICES) is not checked; the process that owns it may see both.
    gpus: UUID of each rank's GPU.
    """
    seen = _seen()
    own = seen.get(str(gpus[rank]))
    for other in mapped:
        peer = seen.get(str(gpus[other]))
        if own is not None and peer is not None and not native_atomics(own, peer):
            raise EPError(
                f"rank {rank} on {gpus[rank]} and rank {other} on {gpus[other]} cannot share memory: these GPUs have "
                "no native atomics on each other's (see nvidia-smi topo -p2p a), without which a rank that gives up "
                "cannot stop the other; left is a network, with MEGATRON_EP_RANKS_PER_NODE=1 and MEGATRON_EP_FABRIC="
                "nvshmem, nccl or tcp"
            )


def report() -> str:
    """Names the GPUs of this process that lack native atomics; returns "" if none do."""
    pairs = itertools.combinations(range(torch.cuda.device_count()), 2)
    lacking = [f"{first} and {second}" for first, second in pairs if not native_atomics(first, second)]
    names = ", ".join(lacking)
    return f"GPUs without native atomics on each other's memory, which it needs: {names}" if lacking else ""

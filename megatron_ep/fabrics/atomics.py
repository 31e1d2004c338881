"""Whether GPUs have native atomics on each other's memory, by which a rank that gives up tells the others why: the
first reason stays. Over PCIe alone mostly they have none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from megatron_ep import _C
from megatron_ep.errors import EPError
from megatron_ep.fabrics import gpu


def native_atomics(first: int, second: int) -> bool:
    """Between two GPUs that this process sees, by their index; a GPU has them on its own memory."""
    return first == second or (_C.has_native_atomics(first, second) and _C.has_native_atomics(second, first))


def _seen() -> dict[str, int]:
    """The GPUs that this process sees: their index by their UUID."""
    return {gpu.uuid(i): i for i in range(torch.cuda.device_count())}


def are_native(own: str | None, gpus: Sequence[str | None]) -> bool:
    """Whether this GPU is known to have them with all others, which is to say that NVLink joins them.

    own, gpus: UUIDs. Of a GPU that this process does not see nothing is known.
    """
    seen = _seen()
    return all(
        gpu == own or (str(gpu) in seen and str(own) in seen and native_atomics(seen[str(own)], seen[str(gpu)]))
        for gpu in gpus
    )


def check(rank: int, gpus: Sequence[str | None], mapped: Sequence[int]) -> None:
    """Raises EPError if this rank's GPU lacks them with that of a rank whose memory it is to map.

    Of a GPU that this process does not see (CUDA_VISIBLE_DEVICES) nothing is known; its own processes may see both.

    gpus: of all ranks, their UUIDs.
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
    """Which GPUs that this process sees lack them; "" if none do."""
    pairs = itertools.combinations(range(torch.cuda.device_count()), 2)
    lacking = [f"{first} and {second}" for first, second in pairs if not native_atomics(first, second)]
    names = ", ".join(lacking)
    return f"GPUs without native atomics on each other's memory, which it needs: {names}" if lacking else ""

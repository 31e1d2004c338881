"""Decides which ranks form a node: ranks that can load and store each other's memory. By default these are the ranks of
one host, or of one NVLink domain, which may span the hosts of a rack.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import uuid
from collections.abc import Sequence
from pathlib import Path

from megatron_ep.config import Topology

VARIABLE = "MEGATRON_EP_RANKS_PER_NODE"
NVML = "libnvidia-ml.so.1"
# A process cannot map the memory of another host without a channel of NVIDIA's IMEX service.
IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
MAX_NAMED = 8  # hosts, in a message


def topology_of(places: Sequence[str], ranks_per_node: str | None) -> Topology:
    """Returns the topology of ranks for which the user gives none.

    places: host or NVLink domain of each rank, as shown to users.
    ranks_per_node: value of MEGATRON_EP_RANKS_PER_NODE, which replaces `places`; None if it is not set.

    Raises ValueError if the variable is no divisor of the number of ranks, or if a place has another number of ranks
    than the others, or ranks that are not consecutive.
    """
    world = len(places)
    if ranks_per_node is not None:
        size = int(ranks_per_node) if ranks_per_node.isascii() and ranks_per_node.isdigit() else 0
        if size < 1 or world % size:
            raise ValueError(
                f"environment variable {VARIABLE} is {ranks_per_node!r}, must be a divisor of the {world} ranks"
            )
        return Topology(world // size, size)
    runs = [(place, len(list(run))) for place, run in itertools.groupby(places)]
    how = f"Topology(nodes, ranks_per_node), or {VARIABLE} in the environment,"
    if len(runs) > len(set(places)):
        raise ValueError(
            f"topology is None, and the ranks of one host do not follow each other: {_listed(runs)}. Number the ranks "
            f"host by host (as torchrun does; Slurm: --distribution=block); {how} says otherwise"
        )
    sizes = [size for _, size in runs]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"topology is None, and the hosts have different numbers of the group's ranks: {_listed(runs)}. Start "
            f"equally many ranks on each; {how} may also cut hosts into nodes, here of at most "
            f"{math.gcd(*sizes)} ranks"
        )
    return Topology(len(runs), sizes[0])


def _listed(runs: Sequence[tuple[str, int]]) -> str:
    """Formats the ranks of each place: rank 0-3 on a, rank 4-5 on b."""
    texts, first = [], 0
    for place, size in runs:
        ranks = f"rank {first}" if size == 1 else f"rank {first}-{first + size - 1}"
        texts.append(f"{ranks} on {place}")
        first += size
    return ", ".join(texts[:MAX_NAMED]) + (", ..." if len(texts) > MAX_NAMED else "")


class _FabricInfo(ctypes.Structure):
    """The structure nvmlGpuFabricInfo_v2_t of NVML's API reference."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )
    VERSION = 2
    COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


def nvlink_domain(gpu_uuid: str) -> str | None:
    """Returns the multi-host NVLink domain of a GPU; None if it has none, if it is unknown, or if this process may not
    map the memory of other hosts.

    gpu_uuid: UUID in NVML's format, "GPU-...".
    """
    if not any(IMEX_CHANNELS.glob("channel*")):
        return None
    try:
        nvml = ctypes.CDLL(NVML)
        info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | _FabricInfo.VERSION << 24)
        gpu = ctypes.c_void_p()
        if nvml.nvmlInit_v2():
            return None
        try:
            failed = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid.encode(), ctypes.byref(gpu))
            failed = failed or nvml.nvmlDeviceGetGpuFabricInfoV(gpu, ctypes.byref(info))
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # the driver is missing, or older than such domains
        return None
    cluster = bytes(info.cluster)
    if failed or info.status or info.state != _FabricInfo.COMPLETED or not any(cluster):
        return None
    return f"NVLink domain {uuid.UUID(bytes=cluster)}, clique {info.clique}"

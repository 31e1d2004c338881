"""How the ranks of a buffer on GPUs reach each other, and what each way needs.

p2p: the processes of one machine map each other's memory through CUDA IPC; if it has several nodes, puts between them
are copies. nvshmem: several machines, one-sided puts and signals between them; a rank that gives up stops its own node
at once, the other nodes when their own waits expire. The variable MEGATRON_EP_FABRIC=p2p or =nvshmem forces one;
otherwise ranks on one machine use p2p and ranks on several use nvshmem.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_ep.errors import EPError

VARIABLE = "MEGATRON_EP_FABRIC"
FABRICS = ("p2p", "nvshmem")


def choose(hosts: Sequence[str]) -> str:
    """The fabric for ranks on these hosts, one each. Raises ValueError for an unknown one, EPError for an unfit one."""
    machines = sorted(set(hosts))
    chosen = os.environ.get(VARIABLE) or ("p2p" if len(machines) == 1 else "nvshmem")
    if chosen not in FABRICS:
        raise ValueError(f"environment variable {VARIABLE} is {chosen!r}, must be one of {', '.join(FABRICS)}")
    if chosen == "p2p" and len(machines) > 1:
        raise EPError(
            f"{VARIABLE}=p2p connects the processes of one machine, but the ranks run on {', '.join(machines)}"
        )
    if chosen == "nvshmem":
        load_nvshmem()
    return chosen


def load_nvshmem() -> ModuleType:
    """The extension for NVSHMEM with the library that it needs. Raises EPError that says what is missing."""
    if importlib.util.find_spec("megatron_ep._nvshmem") is None:
        raise EPError(
            "the nvshmem fabric was not built: it needs nvcc and the package nvidia-nvshmem-cu13 at build time "
            "(pip install --no-build-isolation)"
        )
    library = _nvshmem_library()
    if library is None:
        raise EPError("the nvshmem fabric needs the package nvidia-nvshmem-cu13, whose library was not found")
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("megatron_ep._nvshmem")
    except (OSError, ImportError) as error:
        raise EPError(f"the nvshmem fabric cannot be loaded with {library}: {error}") from error


def _nvshmem_library() -> Path | None:
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    return next((path for folder in folders if (path := folder / "lib/libnvshmem_host.so.3").is_file()), None)


def report() -> dict[str, str]:
    """What each fabric lacks here, for `megatron-ep env`."""
    from megatron_ep import _C

    facts = {"p2p": "built" if hasattr(_C, "CudaGroup") else "not built: there was no nvcc"}
    try:
        load_nvshmem()
        facts["nvshmem"] = f"built, loads with {_nvshmem_library()}"
    except EPError as error:
        facts["nvshmem"] = str(error)
    facts["chosen"] = os.environ.get(VARIABLE) or "p2p on one machine, nvshmem on several"
    return facts

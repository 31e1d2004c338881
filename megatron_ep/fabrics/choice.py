"""Chooses the fabric between the ranks of a buffer, and loads the library that it needs.

p2p connects processes that map each other's memory (`peer_memory.py`), of one machine or of one NVLink domain; puts
between several nodes are copies then. The other fabrics connect several machines. nvshmem and nccl (GIN) use one-sided
puts and signals of a library; a rank that gives up stops its own node immediately and other nodes within two seconds
(`failure_broadcast.py`). NVSHMEM connects only one group of ranks in the life of a process. With verbs and tcp, a
thread of the host sends for the GPUs (`proxied.py`) through a network card (`verbs.py`) or over TCP, which needs
neither a library nor a card. With mlx5, GPUs or host ranks post to an NVIDIA network card themselves (`verbs.py`); it
has run on no card, and is never chosen unless it is asked for. MEGATRON_EP_FABRIC, equal on all ranks, forces a fabric.
Otherwise ranks on one machine or in one domain use p2p, and ranks on several machines use the first of nvshmem, nccl
and verbs that all ranks can use, or else tcp.

Ranks on the host share memory within a machine, and use verbs, or else tcp, between machines.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megatron_ep.diagnosis import cuda_version
from megatron_ep.errors import EPError
from megatron_ep.fabrics import cards as rdma

VARIABLE = "MEGATRON_EP_FABRIC"
NVSHMEM_LIBRARY = "libnvshmem_host.so.3"
NCCL_LIBRARY = "libnccl.so.2"
MLX5, VERBS, TCP = "mlx5", "verbs", "tcp"
BY_CARD = (MLX5, VERBS)
OF_HOST = (*BY_CARD, TCP)  # fabrics that ranks on the host can use


@dataclass(frozen=True)
class Choice:
    """The name of a fabric, and why it was chosen."""

    name: str
    reason: str


def choose(
    hosts: Sequence[str],
    wanted: Sequence[str | None],
    gather: Callable[[Any], list[Any]],
    lacks_memory: Callable[[], str] | None = None,
) -> Choice:
    """Returns the fabric for ranks on GPUs. Collective if they are not all on one machine.

    hosts, wanted: machine and MEGATRON_EP_FABRIC of each rank; None: unset.
    gather: all-gathers an object.
    lacks_memory: if all ranks are in one NVLink domain: returns why they cannot map each other's memory, or "".
        Collective.

    Raises on all ranks alike ValueError for an unknown fabric, EPError if the forced fabric cannot be used or differs.
    """
    forced = _wanted_by_all(wanted)
    machines = sorted(set(hosts))
    reason = f"{VARIABLE} says so" if forced else f"{len(machines)} machines" if len(machines) > 1 else "one machine"
    if len(machines) == 1 and forced in (None, "p2p"):
        return Choice("p2p", reason)
    if lacks_memory is not None and forced in (None, "p2p"):
        if not (lacking := lacks_memory()):
            return Choice("p2p", f"{reason} of one NVLink domain")
        if forced:
            raise EPError(f"{VARIABLE}=p2p: {lacking}")
        reason = f"{reason} of one NVLink domain, but {lacking}"
    if forced == "p2p":
        raise EPError(
            f"{VARIABLE}=p2p connects the processes of one machine, but the ranks run on {', '.join(machines)}"
        )
    return _first_of([*NETWORKS, VERBS], forced, reason, gather, on_gpus=True)


def choose_for_host(machines: int, wanted: Sequence[str | None], gather: Callable[[Any], list[Any]]) -> Choice:
    """Returns the fabric for ranks on the host of `machines` machines. Collective if there are several; raises as
    `choose`.

    wanted: see `choose`; a fabric that only GPUs can use is ignored, and any on one machine."""
    forced = _wanted_by_all(wanted)
    if machines == 1:
        return Choice("shared memory", "host backend")
    forced = forced if forced in OF_HOST else None
    reason = f"host backend on {machines} machines"
    reason = f"{reason}, {VARIABLE} says so" if forced else reason
    return _first_of([VERBS], forced, reason, gather, on_gpus=False)


def _first_of(
    names: Sequence[str], forced: str | None, reason: str, gather: Callable[[Any], list[Any]], *, on_gpus: bool
) -> Choice:
    """Returns the forced fabric, or the first in `names` that all ranks can use, or tcp."""
    lacking: list[str] = []
    for name in names if forced is None else () if forced == TCP else (forced,):
        missing = gather(what_lacks(name, on_gpus=on_gpus) if forced or rdma.has_cards() else rdma.NO_CARD)
        if not any(missing):
            return Choice(name, "; ".join([reason, *lacking]))
        lacking.append(_by_rank(missing))
    if forced and lacking:
        raise EPError("; ".join(lacking))
    return Choice(TCP, "; ".join([reason, *dict.fromkeys(lacking)]))


def wanted_here() -> str | None:
    """Returns the fabric that MEGATRON_EP_FABRIC names in this process; None: it is not set. Raises ValueError for an
    unknown one."""
    return _wanted_by_all([os.environ.get(VARIABLE) or None])


def _wanted_by_all(wanted: Sequence[str | None]) -> str | None:
    values = f"environment variable {VARIABLE} is {_by_rank([repr(name) if name else 'unset' for name in wanted])}"
    fabrics = ("p2p", *NETWORKS, *OF_HOST)
    if any(name and name not in fabrics for name in wanted):
        now = ": ibgda is called mlx5 now; for IBGDA of NVSHMEM it is nvshmem" if "ibgda" in wanted else ""
        raise ValueError(f"{values}, must be one of {', '.join(fabrics)}{now}")
    if len(set(wanted)) > 1:
        raise EPError(f"{values}, must be the same on all ranks")
    return wanted[0]


def what_lacks(name: str, *, on_gpus: bool) -> str:
    """Returns why this rank cannot load the fabric; "" if it can."""
    try:
        if name in NETWORKS:
            NETWORKS[name]()
            return ""
        from megatron_ep.fabrics import verbs

        if name == MLX5:
            verbs.try_direct(torch.cuda.current_device() if on_gpus and torch.cuda.is_available() else None)
        else:
            verbs.usable()
        return ""
    except Exception as error:  # other ranks wait for the answer, whatever the error is
        return str(error) or type(error).__name__


def cards_for(fabric: str, rank: int, machines: Sequence[str], **near: Any) -> list[Any]:
    """See `verbs.cards_for`, which is not loaded for a fabric without cards."""
    if fabric not in BY_CARD:
        return []
    from megatron_ep.fabrics import verbs

    return verbs.cards_for(fabric, rank, machines, **near)


def _by_rank(answers: Sequence[str]) -> str:
    """Formats the answers of ranks: each distinct answer once, with its ranks unless all gave it."""
    if len(set(answers)) == 1:
        return answers[0]
    ranks: dict[str, list[str]] = {}
    for rank, answer in enumerate(answers):
        ranks.setdefault(answer, []).append(str(rank))
    return ", ".join(f"{answer} on rank {' and '.join(those)}" for answer, those in ranks.items() if answer)


def load_nvshmem() -> ModuleType:
    """Loads the extension for NVSHMEM and its library. Raises EPError that names what is missing."""
    library = _in_wheel("nvidia.nvshmem", NVSHMEM_LIBRARY)
    module = _load("nvshmem", library)
    built, found = module.BUILT_FOR, module.library_version()
    if built[0] != found[0] or built > found:
        raise EPError(
            f"the nvshmem fabric was built for NVSHMEM {_dotted(built)}, of which it uses what is not public "
            f"(nvshmemi_init_thread): it works with {built[0]}.x from {_dotted(built)} on, but {library} is "
            f"{_dotted(found)}: build megatron_ep where it runs"
        )
    return module


def load_nccl() -> ModuleType:
    """Loads the extension for NCCL's device API, with the library that torch has loaded or else that of the wheel.
    Raises EPError that names what is missing."""
    library = _loaded(NCCL_LIBRARY) or _in_wheel("nvidia.nccl", NCCL_LIBRARY)
    module = _load("nccl", library, least=" >= 2.28.7")
    built, found = module.BUILT_FOR, module.library_version()
    if built != found:  # NCCL's structures differ between versions
        raise EPError(
            f"the nccl fabric was built for NCCL {_version(built)}, but {library} is {_version(found)}: "
            "build megatron_ep where it runs"
        )
    return module


NETWORKS: dict[str, Callable[[], ModuleType]] = {"nvshmem": load_nvshmem, "nccl": load_nccl}


def _load(name: str, library: Path | None, least: str = "") -> ModuleType:
    package = cuda_version.package(name)
    if importlib.util.find_spec(f"megatron_ep._{name}") is None:
        raise EPError(
            f"the {name} fabric was not built: it needs nvcc and the package {package}{least} at build time "
            "(pip install --no-build-isolation)"
        )
    if library is None:
        raise EPError(f"the {name} fabric needs the package {package}, whose library was not found")
    try:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module(f"megatron_ep._{name}")
    except (OSError, ImportError) as error:
        raise EPError(f"the {name} fabric cannot be loaded with {library}: {error}") from error


def _in_wheel(package: str, library: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    return next((path for folder in folders if (path := folder / "lib" / library).is_file()), None)


def _loaded(library: str) -> Path | None:
    """Returns the path of a library that this process has loaded; None if it has not."""
    with open("/proc/self/maps") as maps:  # names in it are resolved: libnccl.so.2 may be a link to libnccl.so.2.28.9
        paths = (Path("/" + line.rstrip().partition("/")[2]) for line in maps)
        return next((path for path in paths if f"{path.name}.".startswith(f"{library}.")), None)


def _version(code: int) -> str:
    """Formats NCCL_VERSION_CODE in its layout since NCCL 2.9."""
    return _dotted((code // 10000, code // 100 % 100, code % 100))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def report() -> dict[str, str]:
    """Returns what each fabric lacks on this machine, for `megatron-ep env`."""
    from megatron_ep import _C
    from megatron_ep.fabrics import atomics, gpu, peer_memory

    has_cuda = hasattr(_C, "cuda_launcher")
    without = "" if has_cuda else f"not built: {_C.build_info()['without cuda']}"
    facts = {"p2p": without}
    if has_cuda:
        foreign = cuda_version.mismatch(_C.build_info()["cuda"])
        facts["p2p"] = foreign or "; ".join(filter(None, ("built", atomics.report())))
        if not foreign and torch.cuda.is_available():
            facts["memory that other processes can map"] = peer_memory.report()
    for name, load in NETWORKS.items():
        try:
            load()
            facts[name] = f"built, loads with {_loaded(NVSHMEM_LIBRARY if name == 'nvshmem' else NCCL_LIBRARY)}"
        except EPError as error:
            facts[name] = str(error)
    gpus = [gpu.pci_address(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    facts["nvshmem's ibgda"] = _told("nvshmem_env", lambda nvshmem_env: nvshmem_env.report())
    facts[MLX5] = _told("verbs", lambda verbs: verbs.report(direct=True))
    facts[VERBS] = _told("verbs", lambda verbs: verbs.report())
    facts["card of each rank"] = _told("verbs", lambda verbs: verbs.report_of_ranks(gpus))
    facts[TCP] = "built, needs nothing else" if has_cuda else f"built for the host; for GPUs {without}"
    try:
        wanted = wanted_here()
    except ValueError as error:
        return {**facts, "chosen": str(error), "chosen on the host": str(error)}
    networks = "nvshmem, nccl, verbs or else tcp" if rdma.has_cards() else f"tcp ({rdma.NO_CARD})"
    chosen = wanted or f"p2p on one machine, {networks} on several"
    facts["chosen"] = chosen if has_cuda else f"none for GPUs, {without}"
    facts["chosen on the host"] = f"shared memory on one machine, {_report_of_host(wanted)} on several"
    return facts


def _told(module: str, tell: Callable[[Any], str]) -> str:
    """Returns what a module of this folder tells; if somebody has removed it from the package, that it is missing."""
    try:
        return tell(importlib.import_module(f"megatron_ep.fabrics.{module}"))
    except ModuleNotFoundError as error:
        return str(error)


def _report_of_host(wanted: str | None) -> str:
    if wanted in OF_HOST:
        return wanted
    chosen = _first_of([VERBS], None, "", lambda lacking: [lacking], on_gpus=False)
    return chosen.name if chosen.name != TCP else f"{TCP} ({chosen.reason.removeprefix('; ')})"

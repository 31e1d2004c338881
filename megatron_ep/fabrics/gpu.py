"""The GPU of a process: which device it is, the SMs that a launch takes, and work deferred until CUDA may be called."""

from __future__ import annotations

import atexit
import ctypes
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.config import Config
from megatron_ep.diagnosis import cuda_version
from megatron_ep.errors import EPError

log = logging.getLogger(__name__)

# SMs of one rank that fill its NVLink: 450 GB/s each way (H100 and H200 data sheets) / about 20 GB/s of rows that an SM
# moves (H200) = 22.5, rounded up to a multiple of eight.
DEFAULT_SMS = 24


def check_device(device: str | torch.device) -> torch.device:
    """Returns the device with its index. Raises ValueError unless it is the CPU or a GPU, and for a GPU unless this
    build has the CUDA backend, for the CUDA version of torch."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device is {device!r}, must be 'cpu' or 'cuda'") from None
    if wanted.type == "cpu":
        return wanted
    if wanted.type != "cuda":
        raise ValueError(f"device is {device!r}, must be 'cpu' or 'cuda'")
    if torch.version.cuda is None:
        raise ValueError(f"device is {device!r}, but torch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, but torch {torch.__version__} finds no GPU on this machine")
    if not hasattr(_C, "cuda_launcher"):
        raise ValueError(
            f"device is {device!r}, but megatron_ep was built without the CUDA backend: install the wheel "
            f"+cu{cuda_version.major()}, or build it with nvcc"
        )
    if foreign := cuda_version.mismatch(_C.build_info()["cuda"]):
        raise ValueError(f"device is {device!r}, but {foreign}")
    if wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, must be one of the {torch.cuda.device_count()} GPUs that torch finds")
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


def uuid(device: int | torch.device) -> str:
    """Returns the UUID of a GPU, as NVML writes it."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def pci_address(device: torch.device) -> str | None:
    """Returns the PCI address of a GPU, as Linux writes it; None if this torch does not provide it."""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def num_sms(config: Config, device: torch.device, local_ranks: int, wanted: int = DEFAULT_SMS) -> int:
    """Returns the SMs that a launch uses for each rank that this process has on its GPU.

    wanted: their number where `config.num_sms` is None and the GPU has as many.
    """
    if config.num_sms is not None:
        return config.num_sms
    return max(1, min(wanted, torch.cuda.get_device_properties(device).multi_processor_count // local_ranks))


_deferred: deque[Callable[[], None]] = deque()
MODULES = ("megatron_ep._C", "megatron_ep._nvshmem", "megatron_ep._nccl")  # their destructors defer what they free


def defer(work: Callable[[], None]) -> None:
    """Leaves to `run_deferred` what a finalizer may not do while a CUDA graph is captured."""
    _deferred.append(work)


@atexit.register
def run_deferred() -> None:
    """Runs what finalizers have deferred, unless this thread captures a CUDA graph. Finalizers may run while any thread
    captures one, and most CUDA calls would end the capture. Called where the GPU is waited for or memory allocated."""
    if _stuck or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return
    while _deferred:
        work = _deferred.popleft()
        try:
            work()
        except Exception as error:
            log.error("a buffer of megatron_ep that was never closed could not be closed: %s", error)
        del work  # frees what it refers to before the modules catch up
    for name in MODULES:
        module: Any = sys.modules.get(name)
        if hasattr(module, "run_deferred"):
            module.run_deferred()


def prepare_to_allocate() -> None:
    """Frees what was deferred and waits for the GPU, so that launches on an earlier buffer's memory have ended. Raises
    EPError if this process can no longer use its GPU."""
    check_not_stuck()
    run_deferred()
    torch.cuda.synchronize()


_stuck: list[Any] = []


def check_not_stuck() -> None:
    """Raises EPError if a launch of this process does not end, because CUDA would wait for it forever."""
    if _stuck:
        raise EPError("an earlier launch of this process does not end, so this process can use its GPU no more")


def is_stuck(group: Any) -> bool:
    """Returns whether a launch of this compiled group does not end."""
    return group in _stuck


def keep_for_ever(group: Any) -> None:
    """Keeps a compiled group alive, because its destructor would wait for launches that do not end."""
    if not is_stuck(group):
        _stuck.append(group)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # keeps it alive at the exit of the process too

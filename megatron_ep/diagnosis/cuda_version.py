"""The CUDA versions of torch, of NVIDIA's packages, and of the extension. Their major versions have to be equal.

Imports the standard library only. The version of torch is read from its files, because a broken torch does not import.
"""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

MAJORS = ("12", "13")
PACKAGES = ("nccl", "nvshmem")


def of_torch(name: str) -> str | None:
    """Returns an attribute of torch.version, `__version__` or `cuda`; None if it is None or torch is missing."""
    try:
        spec = importlib.util.find_spec("torch")  # imports nothing
        text = Path(str(spec and spec.origin)).with_name("version.py").read_text()
    except (ImportError, ValueError, OSError):
        return None
    found = re.search(rf"^{name}(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def major() -> str:
    """Returns the major version of torch's CUDA; for a torch without CUDA the newest supported one, to suggest it."""
    return (of_torch("cuda") or MAJORS[-1]).partition(".")[0]


def package(name: str) -> str:
    """Returns the name of NVIDIA's package of nccl or nvshmem for torch's CUDA version."""
    return f"nvidia-{name}-cu{major()}"


def foreign_packages() -> list[str]:
    """Returns the installed packages of another CUDA version than torch's, which hide those that fit."""
    others = [f"nvidia-{name}-cu{other}" for name in PACKAGES for other in MAJORS if other != major()]
    return [name for name in others if of_torch("cuda") and _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def mismatch(built_with: str | None) -> str | None:
    """Returns why an extension built with this CUDA (None: without) cannot be used with torch; None if it can."""
    cuda = of_torch("cuda")
    if built_with is None or cuda is None or built_with.partition(".")[0] == major():
        return None
    return (
        f"megatron_ep was built with CUDA {built_with}, but torch {of_torch('__version__')} with CUDA {cuda}: install "
        f"the wheel +cu{major()}, or build megatron_ep with nvcc {major()}"
    )

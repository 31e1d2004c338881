"""Which CUDA: torch's, and with it that of NVIDIA's packages; and that of the extension, which has to be of one major
version with torch's.

Imports the standard library only. What torch says of itself is read from its file, so that a broken torch says it, too.
"""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

MAJORS = ("12", "13")
PACKAGES = ("nccl", "nvshmem")


def of_torch(name: str) -> str | None:
    """What torch.version has under this name, `__version__` or `cuda`. None: nothing, or there is no torch."""
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
    """NVIDIA's package of nccl or nvshmem that goes with torch."""
    return f"nvidia-{name}-cu{major()}"


def foreign_packages() -> list[str]:
    """Installed ones of another CUDA than torch's: they lie where those that fit belong."""
    others = [f"nvidia-{name}-cu{other}" for name in PACKAGES for other in MAJORS if other != major()]
    return [name for name in others if of_torch("cuda") and _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def mismatch(built_with: str | None) -> str | None:
    """Why an extension that this CUDA has compiled (None: none has) cannot be used on a GPU beside torch, if so."""
    cuda = of_torch("cuda")
    if built_with is None or cuda is None or built_with.partition(".")[0] == major():
        return None
    return (
        f"megatron_ep was built with CUDA {built_with}, but torch {of_torch('__version__')} with CUDA {cuda}: install "
        f"the wheel +cu{major()}, or build megatron_ep with nvcc {major()}"
    )

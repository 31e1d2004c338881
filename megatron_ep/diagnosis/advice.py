"""Advice on what is missing or incompatible in the report on a machine (env.py).

Imports the standard library only.
"""

import re
import sys
from typing import Any

from megatron_ep.diagnosis import cuda_version
from megatron_ep.diagnosis.tried_versions import TRIED

NONE = "not installed"
CORES = ((0, 16, 1), (0, 20))  # oldest Megatron-Core, and the first one excluded, as in pyproject.toml
# Oldest driver of each CUDA version, from its release notes, table of minor version compatibility.
DRIVERS = {"12": 525, "13": 580}
LEAST_CAPABILITY = (8, 0)
SHARED_MEMORY_GIB = 1.0  # containers have 64 MiB by default


def advice(report: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns one sentence for each topic with a problem."""
    packages, gpus = report["packages"], [line.split(", ") for line in report["cuda"]["gpus"] if ", " in line]
    found = {
        "extension": _extension(report["extension"], bool(gpus)),
        "torch": _torch(packages["torch"], bool(gpus)),
        "packages": _packages(),
        "driver": _driver(report["extension"], gpus),
        "GPU": _gpu(report["extension"], gpus),
        "megatron-core": _core(packages["megatron-core"], packages["torch"]),
        "several machines": _network(report, bool(gpus)),
        "/dev/shm": _shared_memory(report["memory"]["/dev/shm"]),
    }
    return {topic: sentence for topic, sentence in found.items() if sentence}


def _extension(facts: dict[str, Any], has_gpus: bool) -> str | None:
    if not facts["imports"]:
        return "it does not import, see above: install a wheel for this Python, or `pip install .` in a checkout"
    built = _cuda(facts)
    if built is None and has_gpus:
        nvcc = f"build where there is nvcc {cuda_version.major()}"
        return f"it cannot use the GPUs: install the wheel +cu{cuda_version.major()}, or {nvcc}"
    return cuda_version.mismatch(built)


def _cuda(extension: dict[str, Any]) -> str | None:
    build = extension.get("build")
    return build.get("cuda") if isinstance(build, dict) else None


def _torch(version: str, has_gpus: bool) -> str | None:
    if version == NONE:
        return "`pip install torch`"
    if _numbers(version) < (2, 7):
        return f"{version} is too old: 2.7 or later"
    if has_gpus and cuda_version.of_torch("cuda") is None:
        return f"{version} knows no CUDA: to use the GPUs install torch for CUDA 12 or 13"
    return None


def _packages() -> str | None:
    foreign = cuda_version.foreign_packages()
    return f"torch has CUDA {cuda_version.major()}: `pip uninstall {' '.join(foreign)}`" if foreign else None


def _driver(extension: dict[str, Any], gpus: list[list[str]]) -> str | None:
    built = _cuda(extension)
    if built is None or not gpus:
        return None
    least = DRIVERS.get(built.partition(".")[0])
    if least is None or _numbers(gpus[0][3]) >= (least,):
        return None
    return f"{gpus[0][3]} is older than CUDA {built} needs: {least} or later, or the wheel +cu12 and torch for CUDA 12"


def _gpu(extension: dict[str, Any], gpus: list[list[str]]) -> str | None:
    for gpu in gpus:
        capability = _numbers(gpu[4])
        if capability < LEAST_CAPABILITY:
            least = ".".join(map(str, LEAST_CAPABILITY))
            return f"{gpu[1]}: the kernels need compute capability {least} or later"
        if _cuda(extension) and not _runs_on(extension["build"]["architectures"], capability):
            own = "".join(map(str, capability))
            return f"{gpu[1]}: nothing was built for it, build again with MEGATRON_EP_ARCHITECTURES={own}"
    return None


def _runs_on(architectures: str, capability: tuple[int, ...]) -> bool:
    """Returns whether code of one of these architectures runs on a GPU. Machine code runs on GPUs of its major version
    and its or a later minor version, PTX on all later GPUs. With suffix "f" both run only on GPUs of their major
    version, with "a" only on that exact version."""
    own = 10 * capability[0] + capability[1]
    for name in architectures.split(","):
        found = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", name)
        if found is None:  # such as "native"
            return True
        number, only, kind = int(found[1]), found[2], found[3]
        is_portable = kind != "-real" and not only
        if number == own or (number < own and only != "a" and (is_portable or number // 10 == capability[0])):
            return True
    return False


def _core(version: str, torch: str) -> str | None:
    if version == NONE:
        return "for Megatron: `pip install 'megatron_ep[megatron]'`"
    oldest, before = CORES
    if not oldest <= _numbers(version) < before:
        bounds = f"{'.'.join(map(str, oldest))} or later, before {'.'.join(map(str, before))}"
        return f"{version} is not supported: {bounds}"
    own = (f"{sys.version_info[0]}.{sys.version_info[1]}", torch.partition("+")[0])
    if torch == NONE or version in TRIED.get(own, ()):
        return None
    return f"{version} has not been tested with torch {own[1]} on Python {own[0]}: try `megatron-ep check`"


def _network(report: dict[str, dict[str, Any]], has_gpus: bool) -> str | None:
    fabrics = report["cuda"]["fabrics"]
    cards = report["system"]["network cards"] != ["none"]
    if not isinstance(fabrics, dict) or not (cards and has_gpus and _cuda(report["extension"])):
        return None
    if any(fabrics[name].startswith("built") for name in cuda_version.PACKAGES):
        return None
    # As `fabrics.choice` does: a port that is up is reported as "NAME: up, ADDRESS".
    chosen = "verbs" if ": up, " in fabrics.get("verbs", "") else "tcp"
    install = f"`pip install {cuda_version.package('nvshmem')}`"
    return f"neither nvshmem nor nccl can be used, so that GPUs would use {chosen}: {install}, and rebuild"


def _shared_memory(text: str) -> str | None:
    size = re.match(r"([\d.]+) GiB", text)
    if size and float(size[1]) >= SHARED_MEMORY_GIB:
        return None
    return f"{text}: ranks of one machine need more, `--ipc host` or `--shm-size 16g` in a container"


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers at the beginning of a version: (2, 9, 0) for 2.9.0a0+nv25.9."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()

"""The report on the machine for bug reports: `megatron-ep env`, or `python -m megatron_ep.env`.

Imports the standard library only. Versions are read from package metadata and the extension is imported by another
process, so the report is complete when torch or the extension is missing, broken, or crashes on import.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from megatron_ep.diagnosis import cuda_version
from megatron_ep.diagnosis.advice import advice

PACKAGE_DIR = Path(__file__).resolve().parents[1]
PACKAGES = (
    "megatron_ep",
    "torch",
    "megatron-core",
    "transformer-engine",
    "numpy",
    "triton",
    *(f"nvidia-{name}-cu{major}" for name in cuda_version.PACKAGES for major in cuda_version.MAJORS),
)
MAX_VALUE = 200  # characters of an environment variable's value that are shown
VARIABLES = {
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("CXX", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "PYTHONPATH", "TORCHDYNAMO_DISABLE"),
}
VARIABLE_PREFIXES = (
    "MEGATRON_EP_",
    "SLURM_",
    "TORCHELASTIC_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "NVSHMEM_",
    "GLOO_",
    "UCX_",
)
SECRET = re.compile("TOKEN|JWT|SECRET|PASSWORD|CREDENTIAL|API_?KEY")
COMMAND_LIMIT_S = 60.0
GPU_FIELDS = "index,name,memory.total,driver_version,compute_cap"

Report = dict[str, dict[str, Any]]


def collect() -> Report:
    """Returns sections of named facts, JSON-serialisable. The value of a missing fact says so; nothing is raised."""
    report = {
        "system": _system(),
        "memory": _memory(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": {"nvcc": _nvcc(), "gpus": _gpus(), "nvlink domains": _domains(), "fabrics": _fabrics()},
        "extension": _extension(),
        "environment": _environment(),
    }
    return report | {"to do": advice(report)}


def render(report: Report | None = None) -> str:
    """Formats the report (default: a new one) by section, with one or more lines per fact."""
    lines = []
    for section, facts in (collect() if report is None else report).items():
        lines.append(f"{section}:")
        width = max((len(name) for name in facts), default=0)
        for name, value in facts.items():
            first, *rest = text(value).splitlines() or ["-"]
            lines.append(f"  {name:<{width}}  {first}")
            lines += [" " * (width + 4) + line for line in rest]
        if not facts:
            lines.append("  nothing" if section == "to do" else "  -")
        lines.append("")
    return "\n".join(lines[:-1])


def headline(report: Report) -> str:
    """Summarizes the report in one line, for the head of a table of measurements."""
    packages, system = report["packages"], report["system"]
    gpus = [gpu.split(", ")[1] for gpu in report["cuda"]["gpus"] if ", " in gpu]
    parts = [
        *(f"{name} {packages[name].partition(',')[0]}" for name in ("megatron_ep", "torch", "megatron-core")),
        f"Python {system['python'].partition(' ')[0]}",
        f"{system['cpu']}, {system['cpus'].partition(',')[0]} CPUs",
        *([f"{len(gpus)} x {gpus[0]}"] if gpus else []),
    ]
    return "; ".join(parts) + " (megatron-ep env tells more)"


def text(value: object) -> str:
    """Formats the value of a fact, on one or more lines."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "\n".join(f"{name}: {entry}" for name, entry in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _system() -> dict[str, Any]:
    model = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return {
        "host": platform.node(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()) or None,
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cpus": f"{os.cpu_count()}, of which this process may use {len(os.sched_getaffinity(0))}",
        "network cards": _cards(),
    }


def _cards(devices: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Returns one line per port of a card with RDMA: name, firmware, link, state, rate."""
    lines = []
    for card in sorted(devices.glob("*")):
        for port in sorted((card / "ports").glob("*")):
            facts = [_read(card / "fw_ver"), *(_read(port / name) for name in ("link_layer", "state", "rate"))]
            lines.append(f"{card.name} port {port.name}: {', '.join(fact or '-' for fact in facts)}")
    return lines or ["none"]


def _memory() -> dict[str, Any]:
    total = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    pages = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "total": _gib(int(total[1]) * 1024) if total else None,
        "/dev/shm": _shared_memory(),
        "huge pages": _read(pages / "enabled"),
        "huge pages in /dev/shm": _read(pages / "shmem_enabled"),
    }


def _shared_memory() -> str:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return f"not usable: {error}"
    return f"{_gib(usage.total)}, {_gib(usage.free)} free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _version(package: str) -> str:
    """Returns the version of a package, for torch from its files because metadata lacks the part "+cu130"."""
    if package == "torch" and (own := cuda_version.of_torch("__version__")):
        return own
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        found = _tree_version() if package == PACKAGE_DIR.name else None
        return f"{found}, not installed: imported from {PACKAGE_DIR.parent}" if found else "not installed"


def own_version() -> str:
    """Returns `megatron_ep.__version__`; "unknown" for a copy of the package without metadata or source tree."""
    try:
        return importlib.metadata.version(PACKAGE_DIR.name)
    except importlib.metadata.PackageNotFoundError:
        return _tree_version() or "unknown"


def _tree_version() -> str | None:
    """Returns the version of a source tree from which Python imports the package without an installation."""
    found = re.search(r'^version = "([^"]+)"', _read(PACKAGE_DIR.parent / "pyproject.toml") or "", re.MULTILINE)
    return found[1] if found else None


def _nvcc() -> str:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    path = shutil.which("nvcc") or next((p for h in homes if h and (p := shutil.which(f"{h}/bin/nvcc"))), None)
    if path is None:
        return "not found in PATH, CUDA_HOME or /usr/local/cuda"
    status, output = _run([path, "--version"])
    release = re.search(r"release .*", output)
    return f"{path}: {release[0] if status == 0 and release else output}"


def _gpus() -> list[str]:
    status, output = _run(["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"])
    return output.splitlines() if status == 0 and output else [f"none: nvidia-smi: {output or 'printed nothing'}"]


def _domains() -> Any:
    """Returns the multi-host NVLink domains of the GPUs of this machine. Ranks of a domain can be one node."""
    status, output = _run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    if status != 0 or not output:
        return None
    script = (
        "import json, sys; from megatron_ep.meeting.nodes import nvlink_domain as domain; "
        "print('\\n' + json.dumps([domain(gpu) for gpu in sys.argv[1:]]))"
    )
    status, output = _run([sys.executable, "-c", script, *output.split()], cwd=PACKAGE_DIR.parent)
    if status != 0:
        return f"unknown: {output}"
    return sorted({domain or "none of several hosts" for domain in json.loads(output.splitlines()[-1])})


def _fabrics() -> Any:
    """Returns what each fabric lacks, from a separate process because the extension may crash on import."""
    script = "import json, megatron_ep.fabrics.choice as f; print('\\n' + json.dumps(f.report()))"
    status, output = _run([sys.executable, "-c", script], cwd=PACKAGE_DIR.parent)
    return json.loads(output.splitlines()[-1]) if status == 0 else "unknown: the extension does not import"


def _extension() -> dict[str, Any]:
    """Returns facts about megatron_ep._C, imported in a separate process because a broken library may crash it."""
    files = sorted(PACKAGE_DIR.glob("_C.*.so"))
    usable = PACKAGE_DIR / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    facts: dict[str, Any] = {
        "files": [path.name if path == usable else f"{path.name} (for another Python)" for path in files] or "none",
        "compiler": _compiler(usable) if usable.is_file() else None,
    }
    script = "import json, megatron_ep._C as c; print('\\n' + json.dumps([c.__file__, c.build_info()], default=str))"
    status, output = _run([sys.executable, "-c", script], cwd=PACKAGE_DIR.parent)
    if status == 0:
        path, build = json.loads(output.splitlines()[-1])
        return {**facts, "imports": True, "imported from": path, "build": build}
    return {**facts, "imports": False, "error": f"{output}\n(exit status {status})".lstrip()}


def _compiler(library: Path) -> str | None:
    """Returns the compilers named in a library's .comment section, which is readable if the library does not load."""
    names = re.findall(rb"(?:GCC: \([^\0]*?\) [\d.]+|clang version [^\0]+)", library.read_bytes())
    return ", ".join(sorted({name.decode(errors="replace") for name in names})) or None


def _environment() -> dict[str, str]:
    chosen = {n: v for n, v in os.environ.items() if n in VARIABLES or n.startswith(VARIABLE_PREFIXES)}
    for name, value in chosen.items():
        if SECRET.search(name):
            chosen[name] = "(set)"
        elif len(value) > MAX_VALUE:
            chosen[name] = f"{value[:MAX_VALUE]}... ({len(value)} characters)"
    return dict(sorted(chosen.items()))


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def _run(command: list[str], cwd: Path | None = None) -> tuple[int | None, str]:
    """Runs a command. Returns its exit status, None if it did not run or end, and its output, with stderr if it failed,
    or why there is none."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, errors="replace", timeout=COMMAND_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {COMMAND_LIMIT_S:.0f} s"
    except OSError as error:
        return None, str(error)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()

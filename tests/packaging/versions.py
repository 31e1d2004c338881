"""Tries versions of Python, torch and Megatron-Core together, and notes those that work.

    versions.py PYTHON TORCH CORE ...       for example versions.py python3.12 2.9.1 0.16.1 0.17.1 0.18.2 0.19.2

CORE is a release, or the folder of a tree of Megatron-LM, which is not installed: its files are what runs. In a fresh
environment of that interpreter it installs these and a wheel of this tree, which must leave them as they are, and runs
`megatron-ep check` with each Megatron-Core. What passes goes to megatron_ep/diagnosis/tried_versions.py,
and from there to the table in docs/versions.md; what fails is printed, and makes the exit status 1. Needs pip's network
and 8 GB of disk for a while.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRIED = ROOT / "megatron_ep/diagnosis/tried_versions.py"
TABLE = ROOT / "docs/versions.md"

Tried = dict[tuple[str, str], list[str]]  # Megatron-Core by Python and torch


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MEGATRON_EP_CUDA")}
    return subprocess.run(
        command, env=clean | environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def installed(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version('{package}').partition('+')[0])"
    return run(python, "-c", code).stdout.strip()


def install(python: Path, *words: str | Path) -> None:
    done = run(python, "-m", "pip", "install", "--quiet", *words, MEGATRON_EP_CUDA="0")
    if done.returncode:
        raise RuntimeError(f"pip install {' '.join(map(str, words))}: {done.stdout}")


def smoke(python: Path, wheel: Path, torch: str, core: str) -> str:
    """What fails, if anything, with this Megatron-Core beside what the environment has."""
    if Path(core).is_dir():
        # A tree does not name triton, which it imports: torch for GPUs brings it.
        install(python, f"{wheel}[train]", f"torch=={torch}", "numpy", "packaging", "triton")
        environment = {"PYTHONPATH": core}
    else:
        install(python, f"megatron-core=={core}", f"torch=={torch}")
        install(python, f"{wheel}[megatron,train]")
        environment = {}
        if (found := installed(python, "megatron-core")) != core:
            return f"pip replaced megatron-core {core} by {found}"
    if (found := installed(python, "torch")) != torch:
        return f"pip replaced torch {torch} by {found}"
    done = run(python, "-m", "megatron_ep.cli.main", "check", **environment)
    return "" if done.returncode == 0 else f"megatron-ep check ends with status {done.returncode}:\n{done.stdout}"


def name_of(core: str) -> str:
    """What the table calls it: a release's number; a tree's own, and the name of its folder."""
    info = Path(core, "megatron/core/package_info.py")
    if not info.is_file():
        return core
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)$", info.read_text(), re.MULTILINE))
    return f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']} ({Path(core).resolve().name})"


def read(text: str) -> Tried:
    return ast.literal_eval(text.partition("TRIED = ")[2])


def added(text: str, python: str, torch: str, core: str) -> str:
    """The module with this one, too, in the order of their numbers."""
    tried = read(text)
    tried[python, torch] = sorted({*tried.get((python, torch), ()), core}, key=numbers)
    rows = ""
    for python, torch in sorted(tried, key=lambda pair: [*map(numbers, pair)]):
        cores = ", ".join(f'"{core}"' for core in tried[python, torch])
        rows += f'    ("{python}", "{torch}"): [{cores}],\n'
    return f"{text.partition('TRIED = ')[0]}TRIED = {{\n{rows}}}\n"


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def table(tried: Tried) -> str:
    """A row for each Python and torch."""
    rows = "".join(f"| {python} | {torch} | {', '.join(cores)} |\n" for (python, torch), cores in tried.items())
    return f"| Python | torch | Megatron-Core |\n|---|---|---|\n{rows}"


def with_table(page: str, tried: Tried) -> str:
    """The page with that table instead of its own."""
    return re.sub(r"\| Python \| torch \|[^\n]*\n(\|[^\n]*\n)+", lambda _: table(tried), page)


def main(interpreter: str, torch: str, *cores: str) -> int:
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "venv/bin/python")
        run(interpreter, "-m", "venv", python.parents[1])
        version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").stdout.strip()
        install(python, "build", "setuptools>=77", "pybind11", "cmake", "ninja")
        built = run(python, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, MEGATRON_EP_CUDA="0")
        if built.returncode:
            raise RuntimeError(built.stdout)
        [wheel] = Path(folder).glob("*.whl")
        for core in cores:
            problem = smoke(python, wheel, torch, core)
            print(f"Python {version}, torch {torch}, megatron-core {core}: {problem or 'passed'}", flush=True)
            if problem:
                failures.append(core)
                continue
            TRIED.write_text(added(TRIED.read_text(), version, torch, name_of(core)))
            TABLE.write_text(with_table(TABLE.read_text(), read(TRIED.read_text())))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

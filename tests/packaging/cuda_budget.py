"""Reads what `nvcc -Xptxas -v` printed, shows each kernel's resources, and fails on a spill or a passed budget.

    cuda_budget.py BUDGET_FILE [LOG ...]

Needs the standard library and c++filt (binutils) only.
"""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
BUDGET = re.compile(r"(?P<name>.*?\D)\s+(?P<registers>\d+)(\s+(?P<spills>\d+))?")


@dataclass
class Function:
    """What ptxas says of a kernel, or of a device function that it did not inline (then without registers)."""

    name: str
    architecture: str
    registers: int | None = None
    shared_bytes: int = 0  # static shared memory only
    spill_bytes: int = 0  # stores + loads


def parse_log(text: str) -> list[Function]:
    """The functions in one log, in its order, by mangled name."""
    functions: dict[tuple[str, str], Function] = {}
    kernel = function = None
    architecture = ""
    for line in text.splitlines():
        if match := ENTRY.search(line):
            name, architecture = match.groups()
            kernel = function = functions.setdefault((name, architecture), Function(name, architecture))
        elif match := PROPERTIES.search(line):
            name = match[1]
            function = functions.setdefault((name, architecture), Function(name, architecture))
        elif (match := SPILLS.search(line)) and function:
            function.spill_bytes = int(match[1]) + int(match[2])
        elif (match := REGISTERS.search(line)) and kernel:
            kernel.registers = int(match[1])
            shared = SHARED.search(line)
            kernel.shared_bytes = int(shared[1]) if shared else 0
    return list(functions.values())


def demangle(names: list[str]) -> list[str]:
    """Names as they are written in C++, without `(anonymous namespace)::`."""
    if not names:
        return []
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [name.replace("(anonymous namespace)::", "") for name in text.splitlines()]


def parse_budget(text: str) -> dict[str, tuple[int, int]]:
    """Most registers and bytes of spills, by name substring. Raises ValueError that names a line which is neither
    `NAME REGISTERS` nor `NAME REGISTERS SPILLS`."""
    budget = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = BUDGET.fullmatch(line)
        if not match:
            raise ValueError(
                f"line {number} of the budget is '{line}', expected a kernel's name, a number of registers and maybe "
                "one of bytes"
            )
        budget[match["name"]] = int(match["registers"]), int(match["spills"] or 0)
    return budget


def check(functions: list[Function], budget: dict[str, tuple[int, int]]) -> list[str]:
    """What is wrong, one sentence each: spills, passed budgets, budgets that fit no kernel, and kernels that several
    files compile: CUDA makes as many of them, and what one file sets of its own the others' launches lack."""
    problems = []
    for f in functions:
        allowed = max((spills for name, (_, spills) in budget.items() if name in f.name), default=0)
        if f.spill_bytes > allowed:
            problems.append(f"{f.name} spills {f.spill_bytes} bytes")
    kernels = [f for f in functions if f.registers is not None]
    for name, (most, spills) in budget.items():
        held = [kernel for kernel in kernels if name in kernel.name]
        if not held and not (spills and any(name in f.name for f in functions)):
            problems.append(f"the budget's '{name}' fits no kernel")
        problems += [f"{k.name} uses {k.registers} registers, {most} allowed" for k in held if k.registers > most]
    files = Counter((kernel.name, kernel.architecture) for kernel in kernels)
    problems += [f"{name} is compiled in {count} files" for (name, _), count in files.items() if count > 1]
    return problems


def main(arguments: list[str]) -> int:
    budget_file, *logs = arguments
    budget = parse_budget(Path(budget_file).read_text())
    functions = [function for log in logs for function in parse_log(Path(log).read_text())]
    for function, name in zip(functions, demangle([f.name for f in functions]), strict=True):
        function.name = name
    if not logs:
        print("there are no CUDA sources to check")
    else:
        print(f"{'registers':>9} {'shared':>7} {'spill':>6}  kernel")
    for f in sorted(functions, key=lambda f: f.name):
        registers = "-" if f.registers is None else f.registers
        print(f"{registers:>9} {f.shared_bytes:>7} {f.spill_bytes:>6}  {f.name} [{f.architecture}]")
    problems = check(functions, budget)
    if logs and not functions:
        problems.append("ptxas named no kernel: nothing was checked")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

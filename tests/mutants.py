"""Removes one fence, wait or order after the other from the kernels' source, and expects a test to fail each time.

    python tests/mutants.py [--build build/cpython-311] [--jobs N] [NAME ...]

A mutant is a statement of the source replaced by another one. All of them are compiled at once into each of the
lane-by-lane programs, and into those of send queues and cards on the host, behind a number that the variable MUTANT
chooses; `cmake --build BUILD --target simt nightly` must have built the programs as they are. A mutant is killed by
a run that fails, and survives when all runs pass. Prints a table, a line a mutant: the run that killed it, and the
seconds that took. The exit status is 1 if one survives. N: mutants that are tried at the same time, by default as many
as there are cores. NAME: only mutants in whose name it is.
"""

import argparse
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from mutants_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SOURCES = {
    "rows": "rows_warp",
    "router": "router_warp",
    "p2p": "device_warp",
    "nccl": "device_warp",
    "nvshmem": "device_warp",
    "queue": "device_warp",
    "low_latency": "low_latency_warp",
    "low_latency_nccl": "low_latency_warp",
    "low_latency_nvshmem": "low_latency_warp",
    "low_latency_queue": "low_latency_warp",
    "send_queue": "send_queue",
    "direct": "verbs",
}
TARGETS = {"send_queue": "send_queue", "direct": "verbs"}  # the others': simt_NAME
# The first run that fails is enough.
SEEDS = [["0", "2"], ["2", "5"], ["5", "10"], ["10", "15"], ["15", "20"], ["20", "25"], ["25", "30"]]
RUNS = {
    "rows": [["quotients"], ["0", "300"]],
    "router": [["configurations"]],
    "p2p": [["given_up"], ["drain"], *SEEDS, ["absent"], ["unfit"]],
    "nccl": [["put"], *SEEDS[:5]],
    "nvshmem": [["drain"], ["put"], *SEEDS],
    "queue": [["full"], ["turns"], ["told"], ["put"], *SEEDS],
    "low_latency": [["arrive"], *SEEDS, ["absent"], ["unfit"], ["ids"], ["masked"]],
    "low_latency_nccl": SEEDS[2:4],
    "low_latency_nvshmem": SEEDS[2:],
    "low_latency_queue": SEEDS[2:],
    "send_queue": [[]],
    "direct": [["tests/libfake_ibverbs.so", "direct"]],
}
LIMIT_S = 60  # of a run's time on a core: one that hangs has failed, too


def with_all_mutants(file: str, mutants: dict[int, Mutant]) -> str:
    """The file with each of its mutants behind its number."""
    source = (CSRC / file).read_text()
    at: dict[tuple[int, int], dict[int, Mutant]] = {}
    for number, mutant in mutants.items():
        if mutant.file == file:
            at.setdefault(mutant.place(source), {})[number] = mutant
    places = sorted(at)
    for (_, end), (start, _) in pairwise(places):
        if end > start:
            raise ValueError(f"{file}: mutants' statements overlap at {source[start:end]!r}")
    for start, end in reversed(places):
        statement = source[start:end]
        choices = "".join(
            f"if (chosen_mutant == {n}) {{ {m.replacement(statement)} }} else " for n, m in at[start, end].items()
        )
        source = f"{source[:start]}{choices}{{ {statement} }}{source[end:]}"
    declaration = "extern const int chosen_mutant;\n"
    if file.endswith(".cpp"):
        return declaration + source
    return source.replace("#pragma once\n", f"#pragma once\n{declaration}", 1)


def target_of(name: str) -> str:
    return TARGETS.get(name, f"simt_{name}")


_running: set[subprocess.Popen[str]] = set()


def run_command(
    command: str | Sequence[str | Path], cpu_seconds: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Its output as text. It and all that it starts are a process group, which `main` ends."""
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, shell=isinstance(command, str), **options) as process:
        _running.add(process)
        try:
            if cpu_seconds is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
            output, errors = process.communicate()
        finally:
            _running.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def build_program(name: str, mutants: dict[int, Mutant], build: Path, folder: Path) -> Path:
    """The program with the mutants that concern it."""
    target, source = target_of(name), SOURCES[name]
    mine = {number: mutant for number, mutant in mutants.items() if name in mutant.programs}
    includes = folder / f"{name}_csrc"
    for file in {mutant.file for mutant in mine.values()}:
        (includes / file).parent.mkdir(parents=True, exist_ok=True)
        (includes / file).write_text(with_all_mutants(file, mine))
    choice = folder / f"{name}_chosen_mutant.cpp"
    choice.write_text('#include <cstdlib>\nextern const int chosen_mutant = std::atoi(std::getenv("MUTANT"));\n')
    # the package of ninja may lie beside an interpreter whose environment is not activated
    ninja = shutil.which("ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if ninja is None:
        raise RuntimeError("ninja was not found: pip install ninja")
    commands = run_command([ninja, "-t", "commands", target], cwd=build)
    lines = commands.stdout.splitlines()
    if commands.returncode != 0 or not lines:
        raise RuntimeError(f"{build} does not know how to build {target}: {commands.stderr or commands.stdout}")
    compile_line = next(line for line in lines if line.endswith(f"/{source}.cpp"))
    built, ours, program = f"tests/CMakeFiles/{target}.dir/{source}.cpp.o", folder / f"{name}.o", folder / name
    steps, objects = [compile_line.replace(built, str(ours))], [str(ours)]
    for file in sorted({mutant.file for mutant in mine.values() if mutant.file.endswith(".cpp")}):
        line = next(line for line in lines if line.endswith(f" {CSRC / file}"))
        objects.append(str(folder / f"{name}_{Path(file).stem}.o"))  # taken in the place of the library's
        line = line.replace(f"-o CMakeFiles/ep_host.dir/{file}.o", f"-o {objects[-1]}")
        steps.append(line.replace(f" {CSRC / file}", f" {includes / file}"))
    # a changed file is found before the one in csrc
    steps = [line.replace(f"-I{CSRC} ", f"-I{includes} -I{CSRC} ", 1) for line in steps]
    link_line = (
        lines[-1].replace(built, " ".join([*objects, str(choice)])).replace(f"-o tests/{target}", f"-o {program}")
    )
    for line in (*steps, link_line):
        done = run_command(line, cwd=build)
        if done.returncode != 0:
            raise RuntimeError(f"{target} does not compile with its mutants:\n{done.stderr[-3000:]}")
    return program


def failure(number: int, name: str, program: Path, arguments: Sequence[str], build: Path) -> str:
    """Of a run with a mutant, or with none if the number is 0; empty: it passes."""
    done = run_command([program, *arguments], LIMIT_S, env=os.environ | {"MUTANT": str(number)}, cwd=build)
    if done.returncode == 0:
        return ""
    why = signal.Signals(-done.returncode).name if done.returncode < 0 else (done.stderr.splitlines() or ["?"])[-1]
    return f"{target_of(name)} {' '.join(arguments)}: {why}"


def killer(number: int, mutant: Mutant, programs: dict[str, Path], build: Path) -> tuple[str, float]:
    """The first run that fails with this mutant, or nothing; and the seconds until then."""
    started = time.monotonic()
    runs = ((name, arguments) for name in mutant.programs for arguments in RUNS[name])
    said = next(filter(None, (failure(number, name, programs[name], arguments, build) for name, arguments in runs)), "")
    return said, time.monotonic() - started


def try_all(chosen: dict[int, Mutant], programs: dict[str, Path], build: Path, pool: Executor) -> int:
    """Prints the table; returns how many survive. Raises RuntimeError if a run fails without any mutant."""
    runs = [(name, arguments) for name in programs for arguments in RUNS[name]]
    for said in pool.map(lambda run: failure(0, run[0], programs[run[0]], run[1], build), runs):
        if said:
            raise RuntimeError(f"without any mutant: {said}")
    survivors = 0
    results = pool.map(lambda number: killer(number, chosen[number], programs, build), chosen)
    for mutant, (said, seconds) in zip(chosen.values(), results, strict=True):
        survivors += not said
        print(
            f"{'killed' if said else 'SURVIVED':8} {seconds:6.1f} s  {mutant.file}: {mutant.name}  [{said[:110]}]",
            flush=True,
        )
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / str(sys.implementation.cache_tag))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    arguments = parser.parse_args()
    mutants = dict(enumerate(MUTANTS, 1))
    chosen = {
        n: m for n, m in mutants.items() if not arguments.names or any(part in m.name for part in arguments.names)
    }
    if not chosen:
        parser.error(f"no mutant has {' or '.join(arguments.names)} in its name")
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}, must be at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        try:
            used = [name for name in SOURCES if any(name in mutant.programs for mutant in chosen.values())]
            build = arguments.build.resolve()
            built = pool.map(lambda name: build_program(name, mutants, build, Path(folder)), used)
            programs = dict(zip(used, built, strict=True))
            survivors = try_all(chosen, programs, build, pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    os.killpg(process.pid, signal.SIGKILL)
            raise
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed, {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

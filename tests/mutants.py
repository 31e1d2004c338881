"""Removes one fence, wait or order after the other from the kernels' source, and expects a test to fail each time.

    python tests/mutants.py [--build build/cpython-311] [NAME ...]

A mutant is a statement of the source replaced by another one. All of them are compiled at once into each of the
lane-by-lane programs, behind a number that the variable MUTANT chooses; `cmake --build BUILD --target simt` must have
built the programs as they are. A mutant is killed by a run that fails, and survives when all runs pass. Prints a table;
the exit status is 1 if one survives. NAME: only mutants in whose name it is.
"""

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mutants_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SOURCES = {"rows": "rows_warp", "p2p": "device_warp", "nccl": "device_warp", "nvshmem": "device_warp"}
# The first run that fails is enough.
SEEDS = [["0", "2"], ["2", "5"], ["5", "10"], ["10", "15"], ["15", "20"], ["20", "25"], ["25", "30"]]
RUNS = {
    "rows": [["0", "300"]],
    "p2p": [["given_up"], *SEEDS, ["absent"], ["unfit"]],
    "nccl": SEEDS[:5],
    "nvshmem": [["drain"], *SEEDS],
}
LIMIT_S = 60  # of a run's time on a core: one that hangs has failed, too


@dataclass(frozen=True)
class Place:
    """Where a mutant's statement stands in its file."""

    start: int
    end: int


def place_of(mutant: Mutant, source: str) -> Place:
    """Raises ValueError unless the mutant's text occurs exactly once."""
    before, statement, after = mutant.parts()
    text = before + statement + after
    if source.count(text) != 1:
        raise ValueError(f"'{mutant.name}': its text occurs {source.count(text)} times in {mutant.file}, must once")
    start = source.index(text) + len(before)
    return Place(start, start + len(statement))


def with_all_mutants(file: str, mutants: dict[int, Mutant]) -> str:
    """The file with each of its mutants behind its number."""
    source = (CSRC / file).read_text()
    at: dict[Place, dict[int, Mutant]] = {}
    for number, mutant in mutants.items():
        if mutant.file == file:
            at.setdefault(place_of(mutant, source), {})[number] = mutant
    places = sorted(at, key=lambda place: place.start)
    for one, other in pairwise(places):
        if one.end > other.start:
            raise ValueError(f"{file}: mutants' statements overlap at {source[other.start : one.end]!r}")
    for place in reversed(places):
        choices = "".join(f"if (chosen_mutant == {n}) {{ {m.replacement} }} else " for n, m in at[place].items())
        source = f"{source[: place.start]}{choices}{{ {source[place.start : place.end]} }}{source[place.end :]}"
    return source.replace("#pragma once\n", "#pragma once\nextern const int chosen_mutant;\n", 1)


def build_program(name: str, mutants: dict[int, Mutant], build: Path, folder: Path) -> Path:
    """The lane-by-lane program with the mutants that concern it."""
    target, source = f"simt_{name}", SOURCES[name]
    mine = {number: mutant for number, mutant in mutants.items() if name in mutant.programs}
    includes = folder / f"{name}_csrc"
    for file in {mutant.file for mutant in mine.values()}:
        (includes / file).parent.mkdir(parents=True, exist_ok=True)
        (includes / file).write_text(with_all_mutants(file, mine))
    choice = folder / "chosen_mutant.cpp"
    choice.write_text('#include <cstdlib>\nextern const int chosen_mutant = std::atoi(std::getenv("MUTANT"));\n')
    commands = subprocess.run(
        ["ninja", "-t", "commands", target], cwd=build, capture_output=True, text=True, check=True
    )
    lines = commands.stdout.splitlines()
    compile_line = next(line for line in lines if line.endswith(f"/{source}.cpp"))
    built, ours, program = f"tests/CMakeFiles/{target}.dir/{source}.cpp.o", folder / f"{name}.o", folder / name
    # a changed file is found before the one in csrc
    compile_line = compile_line.replace(built, str(ours)).replace(f"-I{CSRC} ", f"-I{includes} -I{CSRC} ", 1)
    link_line = lines[-1].replace(built, f"{ours} {choice}").replace(f"-o tests/{target}", f"-o {program}")
    for line in (compile_line, link_line):
        done = subprocess.run(line, shell=True, cwd=build, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{target} does not compile with its mutants:\n{done.stderr[-3000:]}")
    return program


def limit_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))


def killers(number: int, programs: dict[str, Path]) -> Iterator[str]:
    """The runs that fail with a mutant; of no mutant if the number is 0."""
    for name, program in programs.items():
        for arguments in RUNS[name]:
            what = f"simt_{name} {' '.join(arguments)}"
            run = subprocess.run(
                [program, *arguments],
                env=os.environ | {"MUTANT": str(number)},
                capture_output=True,
                text=True,
                preexec_fn=limit_time,
            )
            if run.returncode < 0:
                yield f"{what}: {signal.Signals(-run.returncode).name}"
            elif run.returncode != 0:
                yield f"{what}: {(run.stderr.splitlines() or ['?'])[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / str(sys.implementation.cache_tag))
    arguments = parser.parse_args()
    mutants = dict(enumerate(MUTANTS, 1))
    chosen = {
        n: m for n, m in mutants.items() if not arguments.names or any(part in m.name for part in arguments.names)
    }
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        used = [name for name in SOURCES if any(name in mutant.programs for mutant in chosen.values())]
        programs = {name: build_program(name, mutants, arguments.build.resolve(), Path(folder)) for name in used}
        for killer in killers(0, programs):
            raise RuntimeError(f"without any mutant: {killer}")
        for number, mutant in chosen.items():
            killer = next(killers(number, {name: programs[name] for name in mutant.programs}), "")
            survivors += not killer
            print(f"{'killed' if killer else 'SURVIVED':9} {mutant.file}: {mutant.name}  [{killer[:110]}]", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

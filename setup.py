"""Builds the extension megatron_ep._C with a generated ninja file. Everything else is declared in pyproject.toml.

The extension is pybind11 without torch headers: it takes raw pointers, so one build works with every torch version.
Only the bindings see Python's and pybind11's headers; a change of either recompiles nothing else.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import ninja
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
BINDINGS = "csrc/bindings"
SOURCE_DIRS = ("csrc/exec/host", "csrc/fabric", "csrc/router", "csrc/launch/host", BINDINGS)
COMPILE_FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Werror=return-type -Icsrc"
LINK_FLAGS = "-shared -lrt -lpthread"
OLDEST_GCC = 12


def find_sources() -> list[str]:
    """Paths relative to the repository's root, as setuptools and the ninja file want them."""
    return sorted(str(path.relative_to(ROOT)) for folder in SOURCE_DIRS for path in (ROOT / folder).glob("*.cpp"))


def find_headers() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.[hc]*") if path.suffix != ".cpp")


def find_compiler() -> list[str]:
    """The command line prefix of g++ >= 12, from CXX or PATH. Raises CompileError when there is none."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    wanted = f"megatron_ep needs g++ >= {OLDEST_GCC} (Debian, Ubuntu: apt install g++; or name one in the variable CXX)"
    try:
        asked = subprocess.run([*command, "-dumpfullversion"], capture_output=True, text=True)
    except OSError as error:
        raise CompileError(f"{wanted}, but '{shlex.join(command)}' cannot be run: {error}") from error
    major = asked.stdout.partition(".")[0].strip()
    if not major.isdecimal() or int(major) < OLDEST_GCC:
        found = asked.stdout.strip() or "no version of g++"
        raise CompileError(f"{wanted}, but '{shlex.join(command)}' is {found}")
    return command


def python_include() -> str:
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").is_file():
        raise CompileError(f"{include}/Python.h is missing: install Python's headers (Debian, Ubuntu: python3-dev)")
    return include


class NinjaBuild(build_ext):
    """Compiles the extension in build/<interpreter>, so that the next build, isolated or not, compiles only changes."""

    def build_extension(self, ext: Extension) -> None:
        build_dir = Path("build", sys.implementation.cache_tag)
        product = build_dir / self.get_ext_filename(ext.name)
        if not any(source.startswith(BINDINGS) for source in ext.sources):
            raise CompileError(f"no source file in {BINDINGS}: is the source tree complete?")
        (ROOT / build_dir).mkdir(parents=True, exist_ok=True)
        with open(ROOT / build_dir / "build.ninja", "w") as file:
            write_ninja(ninja.Writer(file, width=120), build_dir, ext.sources, product)
        print(
            f"megatron_ep: building {ext.name} for the host backend only: this version links no CUDA code", flush=True
        )
        jobs = len(os.sched_getaffinity(0))
        command = [sys.executable, "-m", "ninja", "-f", str(build_dir / "build.ninja"), f"-j{jobs}"]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise CompileError(f"compiling {ext.name} failed; the compiler's messages are above")
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.copy_file(str(ROOT / product), target)


def write_ninja(writer: ninja.Writer, build_dir: Path, sources: list[str], product: Path) -> None:
    binding_includes = shlex.join(f"-I{path}" for path in (python_include(), pybind11.get_include()))
    writer.variable("builddir", str(build_dir))
    writer.variable("cxx", shlex.join(find_compiler()))
    writer.variable("flags", COMPILE_FLAGS)
    writer.variable("includes", "")
    writer.rule(
        "compile",
        command="$cxx -MMD -MF $out.d $flags $includes -c $in -o $out",
        depfile="$out.d",
        deps="gcc",
        description="c++ $in",
    )
    writer.rule("link", command=f"$cxx $in -o $out {LINK_FLAGS}", description="link $out")
    objects = []
    for source in sources:
        includes = {"includes": binding_includes} if source.startswith(BINDINGS) else None
        objects += writer.build(str(build_dir / f"{source}.o"), "compile", source, variables=includes)
    writer.build(str(product), "link", objects)


setup(
    ext_modules=[Extension("megatron_ep._C", sources=find_sources(), depends=find_headers())],
    cmdclass={"build_ext": NinjaBuild},
)

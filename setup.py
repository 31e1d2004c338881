"""Builds the extension megatron_ep._C with a generated ninja file. Everything else is declared in pyproject.toml.

The extension is pybind11 without torch headers: it takes raw pointers, so one build works with every torch version.
Only the bindings see Python's and pybind11's headers; a change of either recompiles nothing else.

The CUDA backend is part of it where there is an nvcc; the CUDA runtime is linked statically and finds a driver, or none, when
it is first used. The variable MEGATRON_EP_CUDA=0 leaves the backend out, =1 makes a missing nvcc an error.
"""

import os
import shlex
import shutil
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
COMPILE_FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Werror=return-type -Wno-psabi -Icsrc"
LINK_FLAGS = "-shared -lrt -lpthread"
CUDA_DIRS = ("csrc/fabric/cuda", "csrc/router", "csrc/launch/cuda")
# Machine code for Hopper; later GPUs compile the PTX when they first load it.
CUDA_FLAGS = (
    "-std=c++20 -O3 -gencode=arch=compute_90,code=[sm_90,compute_90] --expt-relaxed-constexpr -DMEGATRON_EP_CUDA "
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall -Icsrc"
)
OLDEST_GCC = 12


def find_sources() -> list[str]:
    """Paths relative to the repository's root, as setuptools and the ninja file want them."""
    return sorted(str(path.relative_to(ROOT)) for folder in SOURCE_DIRS for path in (ROOT / folder).glob("*.cpp"))


def find_cuda_sources() -> list[str]:
    """What nvcc compiles: kernels, and the host code that calls the CUDA runtime."""
    folders = [ROOT / folder for folder in CUDA_DIRS]
    kernels = [path for folder in folders for path in folder.glob("*.cu")]
    callers = [path for folder in folders if folder.name == "cuda" for path in folder.glob("*.cpp")]
    return sorted(str(path.relative_to(ROOT)) for path in kernels + callers)


def find_nvcc() -> str | None:
    """The path of nvcc, or None when the CUDA backend is not to be built. Raises CompileError when it must be and cannot."""
    wanted = os.environ.get("MEGATRON_EP_CUDA")
    if wanted == "0" or not find_cuda_sources():
        return None
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc") or next((p for h in homes if h and (p := shutil.which(f"{h}/bin/nvcc"))), None)
    if nvcc is None and wanted == "1":
        raise CompileError("MEGATRON_EP_CUDA is 1, but nvcc was not found in PATH, CUDA_HOME or /usr/local/cuda")
    return nvcc


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
        nvcc = find_nvcc()
        with open(ROOT / build_dir / "build.ninja", "w") as file:
            write_ninja(ninja.Writer(file, width=120), build_dir, ext.sources, product, nvcc)
        backends = f"the host and CUDA backends, with {nvcc}" if nvcc else "the host backend only: no nvcc, or not wanted"
        print(f"megatron_ep: building {ext.name} for {backends}", flush=True)
        jobs = len(os.sched_getaffinity(0))
        command = [sys.executable, "-m", "ninja", "-f", str(build_dir / "build.ninja"), f"-j{jobs}"]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise CompileError(f"compiling {ext.name} failed; the compiler's messages are above")
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.copy_file(str(ROOT / product), target)


def write_ninja(
    writer: ninja.Writer, build_dir: Path, sources: list[str], product: Path, nvcc: str | None
) -> None:
    binding_includes = shlex.join(f"-I{path}" for path in (python_include(), pybind11.get_include()))
    compiler = find_compiler()
    define_cuda = " -DMEGATRON_EP_CUDA" if nvcc else ""
    writer.variable("builddir", str(build_dir))
    writer.variable("cxx", shlex.join(compiler))
    writer.variable("flags", COMPILE_FLAGS)
    writer.variable("includes", "")
    writer.rule(
        "compile",
        command="$cxx -MMD -MF $out.d $flags $includes -c $in -o $out",
        depfile="$out.d",
        deps="gcc",
        description="c++ $in",
    )
    objects = []
    for source in sources:
        includes = {"includes": binding_includes + define_cuda} if source.startswith(BINDINGS) else None
        objects += writer.build(str(build_dir / f"{source}.o"), "compile", source, variables=includes)
    if nvcc is None:
        writer.rule("link", command=f"$cxx $in -o $out {LINK_FLAGS}", description="link $out")
    else:
        # nvcc takes one host compiler, by name: of a longer CXX ("ccache g++", "g++ -m64") it keeps its own default.
        host = ["-ccbin", *compiler] if len(compiler) == 1 else []
        writer.variable("nvcc", shlex.join([nvcc, *host]))
        writer.rule(
            "compile_cuda",
            command=f"$nvcc -MD -MF $out.d {CUDA_FLAGS} -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
            description="nvcc $in",
        )
        writer.rule("link", command=f"$nvcc -cudart static $in -o $out {LINK_FLAGS}", description="link $out")
        for source in find_cuda_sources():
            objects += writer.build(str(build_dir / f"{source}.o"), "compile_cuda", source)
    writer.build(str(product), "link", objects)


setup(
    ext_modules=[Extension("megatron_ep._C", sources=find_sources(), depends=find_headers())],
    cmdclass={"build_ext": NinjaBuild},
)

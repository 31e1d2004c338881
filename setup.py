"""Builds the extension megatron_ep._C with a generated ninja file. Everything else is declared in pyproject.toml.

The extension is pybind11 without torch headers: it takes raw pointers, so one build works with every torch version.
Only the bindings see Python's and pybind11's headers; a change of either recompiles nothing else.

The CUDA backend is part of it where there is an nvcc; the CUDA runtime is linked statically and looks for a driver
when it is first used. The variable MEGATRON_EP_CUDA=0 leaves the backend out, =1 makes a missing nvcc an error;
MEGATRON_EP_NVSHMEM=0 and MEGATRON_EP_NCCL=0 leave the NVSHMEM and the NCCL fabric out.
"""

import importlib.util
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
SOURCE_DIRS = (
    "csrc/exec/host",
    "csrc/fabric",
    "csrc/router/exec/host",
    "csrc/router/launch/host",
    "csrc/launch/host",
    BINDINGS,
)
COMPILE_FLAGS = "-std=c++20 -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Werror=return-type -Wno-psabi -Icsrc"
LINK_FLAGS = "-shared -lrt -lpthread"
NVSHMEM = "megatron_ep._nvshmem"
NVSHMEM_DIRS = ("csrc/launch/nvshmem", "csrc/bindings/nvshmem")
# The library's device code is linked, not included, and its headers use volatile as C++20 no longer likes it.
NVSHMEM_FLAGS = "-gencode=arch=compute_90,code=sm_90 -rdc=true -diag-suppress=3012,3013"
NCCL = "megatron_ep._nccl"
NCCL_DIRS = ("csrc/launch/nccl", "csrc/bindings/nccl")
CUDA_DIRS = ("csrc/fabric/cuda", "csrc/router/launch/cuda", "csrc/launch/cuda")
# Machine code for Hopper; later GPUs compile the PTX when they first load it.
CUDA_TARGETS = "-gencode=arch=compute_90,code=[sm_90,compute_90]"
CUDA_FLAGS = (
    "-std=c++20 -O3 --expt-relaxed-constexpr -DMEGATRON_EP_CUDA -Xcompiler=-fPIC,-fvisibility=hidden,-Wall -Icsrc"
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
    """The path of nvcc, or None when the CUDA backend is not to be built. Raises CompileError when it has to be."""
    wanted = os.environ.get("MEGATRON_EP_CUDA")
    if wanted == "0" or not find_cuda_sources():
        return None
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc") or next((p for h in homes if h and (p := shutil.which(f"{h}/bin/nvcc"))), None)
    if nvcc is None and wanted == "1":
        raise CompileError("MEGATRON_EP_CUDA is 1, but nvcc was not found in PATH, CUDA_HOME or /usr/local/cuda")
    return nvcc


def find_wheel(package: str, header: str) -> Path | None:
    """The folder of a wheel of NVIDIA's, which torch for CUDA brings along, if it has the header; else None."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    return next((folder for folder in folders if (folder / "include" / header).is_file()), None)


def find_nvshmem() -> Path | None:
    return find_wheel("nvidia.nvshmem", "nvshmem.h")


def find_nccl() -> Path | None:
    return find_wheel("nvidia.nccl", "nccl_device/gin.h")  # from 2.28.7


def fabric_extension(name: str, folders: tuple[str, ...], wheel: Path | None, missing: str) -> list[Extension]:
    """A library of its own, because it needs that of the wheel to load."""
    if find_nvcc() is None or os.environ.get(name.replace("megatron_ep._", "MEGATRON_EP_").upper()) == "0":
        return []
    if wheel is None:
        print(f"megatron_ep: {name} is left out: this Python has no {missing} (no-build-isolation?)")
        return []
    files = [path for folder in folders for path in (ROOT / folder).glob("*.c*")]
    sources = sorted(str(path.relative_to(ROOT)) for path in files)
    return [Extension(name, sources=sources, depends=find_headers())]


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


def binding_includes() -> tuple[str, str]:
    return python_include(), pybind11.get_include()


class NinjaBuild(build_ext):
    """Compiles the extension in build/<interpreter>, so that the next build, isolated or not, compiles only changes."""

    def build_extension(self, ext: Extension) -> None:
        build_dir = Path("build", sys.implementation.cache_tag)
        product = build_dir / self.get_ext_filename(ext.name)
        if not any(source.startswith(BINDINGS) for source in ext.sources):
            raise CompileError(f"no source file in {BINDINGS}: is the source tree complete?")
        (ROOT / build_dir).mkdir(parents=True, exist_ok=True)
        nvcc = find_nvcc()
        rules = build_dir / f"{ext.name}.ninja"
        with open(ROOT / rules, "w") as file:
            build = NinjaFile(ninja.Writer(file, width=120), build_dir, nvcc)
            add = {NVSHMEM: build.add_nvshmem, NCCL: build.add_nccl}.get(ext.name, build.add_main)
            add(ext.sources, product)
        backends = (
            f"the host and CUDA backends, with {nvcc}" if nvcc else "the host backend only: no nvcc, or not wanted"
        )
        print(f"megatron_ep: building {ext.name} for {backends}", flush=True)
        jobs = len(os.sched_getaffinity(0))
        command = [sys.executable, "-m", "ninja", "-f", str(rules), f"-j{jobs}"]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise CompileError(f"compiling {ext.name} failed; the compiler's messages are above")
        target = self.get_ext_fullpath(ext.name)
        self.mkpath(os.path.dirname(target))
        self.copy_file(str(ROOT / product), target)


class NinjaFile:
    """The rules, and how one library is made of its sources. Objects that two libraries need are compiled once."""

    def __init__(self, writer: ninja.Writer, build_dir: Path, nvcc: str | None) -> None:
        self.writer = writer
        self.build_dir = build_dir
        self.nvcc = nvcc
        compiler = find_compiler()
        writer.variable("builddir", str(build_dir))
        writer.variable("cxx", shlex.join(compiler))
        writer.variable("flags", COMPILE_FLAGS)
        writer.variable("includes", "")
        self._rule("compile", "$cxx -MMD -MF $out.d $flags $includes -c $in -o $out", "c++ $in")
        if nvcc is not None:
            # nvcc takes one host compiler, by name: for a longer CXX ("ccache g++", "g++ -m64") it keeps its default.
            host = ["-ccbin", *compiler] if len(compiler) == 1 else []
            writer.variable("nvcc", shlex.join([nvcc, *host]))
            writer.variable("targets", CUDA_TARGETS)
            self._rule(
                "compile_cuda", f"$nvcc -MD -MF $out.d {CUDA_FLAGS} $targets $includes -c $in -o $out", "nvcc $in"
            )

    def add_main(self, sources: list[str], product: Path) -> None:
        objects = [self._compile(source) for source in sources]
        if self.nvcc is not None:
            objects += [self._compile_cuda(source) for source in find_cuda_sources()]
        linker = "$cxx" if self.nvcc is None else "$nvcc -cudart static"
        self._link(f"{linker} $in -o $out {LINK_FLAGS}", objects, product)

    def add_nvshmem(self, sources: list[str], product: Path) -> None:
        folder = find_nvshmem()
        settings = {"targets": NVSHMEM_FLAGS, "includes": f"-I{folder}/include"}
        device_code = [self._compile_cuda(source, settings) for source in sources if source.endswith(".cu")]
        own = [self._compile(source) for source in sources if source.endswith(".cpp")]
        linked = str(self.build_dir / f"{product.name}.dlink.o")
        search = f"-L{folder}/lib"
        self.writer.rule(
            "dlink",
            f"$nvcc -gencode=arch=compute_90,code=sm_90 -dlink -Xcompiler=-fPIC $in {search} -lnvshmem_device -o $out",
        )
        self.writer.build(linked, "dlink", device_code)
        # The wheel has no libnvshmem_host.so without a version. No rpath: backends/fabrics.py finds the library.
        libraries = f"{search} -Xlinker -l:libnvshmem_host.so.3 -Xlinker -l:libnvshmem_device.a -lcudadevrt -ldl"
        command = f"$nvcc -nodlink -cudart static $in -o $out {LINK_FLAGS} {libraries}"
        self._link(command, [*device_code, *self._shared(), *own, linked], product)

    def add_nccl(self, sources: list[str], product: Path) -> None:
        folder = find_nccl()
        includes = {"includes": shlex.join(f"-I{path}" for path in (*binding_includes(), f"{folder}/include"))}
        own = [self._compile_cuda(source, includes) for source in sources]
        libraries = f"-L{folder}/lib -Xlinker -l:libnccl.so.2 -ldl"  # no libnccl.so and no rpath: as for NVSHMEM
        command = f"$nvcc -cudart static $in -o $out {LINK_FLAGS} {libraries}"
        self._link(command, [*own, *self._shared()], product)

    def _shared(self) -> list[str]:
        callers = [self._compile_cuda(f"csrc/launch/cuda/{name}.cpp") for name in ("device", "resource")]
        return [self._compile(f"{BINDINGS}/incidents.cpp"), *callers]

    def _rule(self, name: str, command: str, description: str) -> None:
        self.writer.rule(name, command=command, depfile="$out.d", deps="gcc", description=description)

    def _compile(self, source: str) -> str:
        variables = None
        if source.startswith(BINDINGS):
            includes = shlex.join(f"-I{path}" for path in binding_includes())
            variables = {"includes": includes + (" -DMEGATRON_EP_CUDA" if self.nvcc else "")}
        return self._object(source, "compile", variables)

    def _compile_cuda(self, source: str, variables: dict[str, str] | None = None) -> str:
        return self._object(source, "compile_cuda", variables)

    def _object(self, source: str, rule: str, variables: dict[str, str] | None) -> str:
        target = str(self.build_dir / f"{source}.o")
        self.writer.build(target, rule, source, variables=variables)
        return target

    def _link(self, command: str, objects: list[str], product: Path) -> None:
        self.writer.rule("link", command=command, description="link $out")
        self.writer.build(str(product), "link", objects)


setup(
    ext_modules=[
        Extension("megatron_ep._C", sources=find_sources(), depends=find_headers()),
        *fabric_extension(NVSHMEM, NVSHMEM_DIRS, find_nvshmem(), "nvidia.nvshmem"),
        *fabric_extension(NCCL, NCCL_DIRS, find_nccl(), "nvidia.nccl >= 2.28.7"),
    ],
    cmdclass={"build_ext": NinjaBuild},
)

"""Compiles the CUDA backend with the compilers of NVIDIA's wheels, of one version of CUDA, on a machine without GPU and
nvcc.

    check.py WHEELS ARCHITECTURES BUDGET     for example check.py build/cuda-12.4 80,90 cuda_budget.txt

WHEELS is where the requirements beside this file have been installed. NVIDIA's wheels of CUDA 12 have no nvcc, but all
that it is made of for a kernel: NVRTC is its compiler down to PTX, ptxas the rest. So one kernel of every kind goes
through these, and its registers and spills are held to the budget. The host's sources are compiled against that CUDA's
headers. How that nvcc would split a .cu file for the host's compiler is not seen.
"""

import ctypes
import itertools
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))

import cuda_budget  # noqa: E402

# NVRTC has no standard library. Of CCCL's, which is one for GPUs, the kernels need these; memcpy is NVRTC's own; CCCL's
# infinity and offset are no constants; of a vector they need the name alone.
HEADERS = ("array", "atomic", "climits", "cmath", "concepts", "cstdint", "type_traits", "utility")
STANDARD = {name: f"#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}" for name in HEADERS} | {
    "bit": """namespace std {
template <class To, class From> __host__ __device__ To bit_cast(From from) { return __builtin_bit_cast(To, from); }
enum class endian { little, big, native = little };
}""",
    "cstddef": """#include <cuda/std/cstddef>
namespace std { using namespace cuda::std; }
#undef offsetof
#define offsetof(type, member) ((size_t)__INTADDR__(&((type*)0)->member))""",
    "cstring": "",
    "limits": """#include <cuda/std/limits>
namespace std {
template <class T> struct numeric_limits : cuda::std::numeric_limits<T> {};
template <> struct numeric_limits<float> {
    __host__ __device__ static constexpr float infinity() { return __builtin_bit_cast(float, 0x7f800000); }
};
template <> struct numeric_limits<double> {
    __host__ __device__ static constexpr double infinity() { return __builtin_bit_cast(double, 0x7ff0000000000000); }
};
}""",
    "vector": "namespace std { template <class T> struct vector; }",
}
HOST = ("core/cuda/*.cpp", "fabric/cuda/*.cpp", "launch/cuda/*.cpp", "launch/queue/*.cpp")


class Compiler:
    """NVRTC and ptxas of the wheels. Raises RuntimeError with what they say."""

    def __init__(self, wheels: Path, headers: Path):
        [library] = wheels.glob("nvidia/*/lib/libnvrtc.so.*")
        [self._ptxas] = wheels.glob("nvidia/*/bin/ptxas")
        self._nvrtc = ctypes.CDLL(str(library))
        includes = (headers, ROOT / "csrc", *wheels.glob("nvidia/*/include"), *wheels.glob("nvidia/*/include/cccl"))
        self._options = ["--std=c++20", "-default-device", "-w", *(f"-I{folder}" for folder in includes)]

    def functions(self, source: Path, architecture: str) -> list[cuda_budget.Function]:
        """Compiled, and named as in C++."""
        with tempfile.TemporaryDirectory() as folder:
            ptx = Path(folder, "kernels.ptx")
            ptx.write_bytes(self.ptx(source, architecture))
            command = (self._ptxas, "-v", f"-arch=sm_{architecture}", "-o", ptx.with_suffix(".cubin"), ptx)
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        functions = cuda_budget.parse_log(done.stdout + done.stderr)
        for function, name in zip(functions, cuda_budget.demangle([f.name for f in functions]), strict=True):
            function.name = name
        return functions

    def ptx(self, source: Path, architecture: str) -> bytes:
        options = [option.encode() for option in (*self._options, f"--gpu-architecture=compute_{architecture}")]
        program = ctypes.c_void_p()
        self._nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
        failed = self._nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        text = self._text(program, "ProgramLog" if failed else "PTX")
        if failed:
            raise RuntimeError(text.decode())
        return text

    def _text(self, program: ctypes.c_void_p, of: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self._nvrtc, f"nvrtcGet{of}")(program, text)
        return text.value


def compile_kernels(wheels: Path, headers: Path, source: Path, architecture: str) -> list[cuda_budget.Function]:
    return Compiler(wheels, headers).functions(source, architecture)


def check_kernels(wheels: Path, budget: dict[str, tuple[int, int]], architectures: list[str]) -> list[str]:
    """What is wrong, one sentence each; prints what each kernel takes."""
    jobs = list(itertools.product(sorted(HERE.glob("*.cu")), architectures))
    # processes: NVRTC compiles one program at a time in each
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(os.cpu_count()) as processes:
        headers = Path(folder)
        for name, text in STANDARD.items():
            (headers / name).write_text(f"#pragma once\n{text}\n")
        begun = [processes.submit(compile_kernels, wheels, headers, *job) for job in jobs]
        done = [compiled.result() for compiled in begun]
    problems = []
    print(f"{'registers':>9} {'spill':>6}  kernel")
    for (source, architecture), functions in zip(jobs, done, strict=True):
        for kernel in (f for f in functions if f.registers is not None):
            print(f"{kernel.registers:>9} {kernel.spill_bytes:>6}  {kernel.name} [{kernel.architecture}]")
        held = {name: most for name, most in budget.items() if any(name in f.name for f in functions)}
        if not held:
            problems.append(f"ptxas named no kernel of the budget in {source.name} for {architecture}")
        problems += cuda_budget.check(functions, held)
    return problems


def check_host(wheels: Path) -> list[str]:
    """Files of the host's part that do not compile."""
    includes = [f"-I{folder}" for folder in wheels.glob("nvidia/*/include")]
    flags = ("-std=c++20", "-fsyntax-only", "-DMEGATRON_EP_CUDA", f"-I{ROOT / 'csrc'}", *includes)
    files = [file for pattern in HOST for file in sorted((ROOT / "csrc").glob(pattern))]
    return [f"{file} does not compile" for file in files if subprocess.run(["g++", *flags, file]).returncode]


def main(wheels: str, architectures: str, budget_file: str) -> int:
    budget = cuda_budget.parse_budget(Path(budget_file).read_text())
    problems = check_host(Path(wheels)) + check_kernels(Path(wheels), budget, architectures.split(","))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

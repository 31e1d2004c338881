"""Compiles the CUDA backend with the oldest CUDA that is supported, on a machine without GPU and nvcc.

    check.py WHEELS BUDGET ARCHITECTURE ...     for example check.py build/cuda-12.4 cuda_budget.txt 90

WHEELS is where requirements.txt has been installed. NVIDIA's wheels of CUDA 12 have no nvcc, but all that it is made of
for a kernel: NVRTC is its compiler down to PTX, ptxas the rest. So one kernel of every kind goes through these, and its
registers and spills are held to the budget. The host's sources are compiled against that CUDA's headers. How that nvcc
would split a .cu file for the host's compiler is not seen.
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))

import cuda_budget  # noqa: E402

# NVRTC has no standard library. Of CCCL's, which is one for GPUs, the kernels need these; of a vector its name alone.
HEADERS = ("array", "concepts", "cstddef", "cstdint", "type_traits", "utility")
STANDARD = {name: f"#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}" for name in HEADERS} | {
    "bit": "namespace std { template <class To, class From> __host__ __device__ To bit_cast(From from) "
    "{ return __builtin_bit_cast(To, from); } }",
    "vector": "namespace std { template <class T> struct vector; }",
}
HOST = ("core/cuda/*.cpp", "fabric/cuda/*.cpp", "launch/cuda/*.cpp", "launch/queue/*.cpp", "router/launch/cuda/*.cpp")


class Compiler:
    """NVRTC of the wheels. Raises RuntimeError with what it says."""

    def __init__(self, wheels: Path, headers: Path):
        [library] = (wheels / "nvidia/cuda_nvrtc/lib").glob("libnvrtc.so.*")
        self._nvrtc = ctypes.CDLL(str(library))
        includes = (headers, ROOT / "csrc", wheels / "nvidia/cuda_cccl/include", wheels / "nvidia/cuda_runtime/include")
        self._options = ["--std=c++20", "-default-device", "-w", *(f"-I{folder}" for folder in includes)]

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


def check_kernels(wheels: Path, folder: Path, budget: dict[str, tuple[int, int]], architecture: str) -> list[str]:
    """What is wrong, one sentence each; prints what each kernel takes."""
    for name, text in STANDARD.items():
        (folder / name).write_text(f"#pragma once\n{text}\n")
    ptx = folder / "kernels.ptx"
    ptx.write_bytes(Compiler(wheels, folder).ptx(HERE / "kernels.cu", architecture))
    ptxas = wheels / "nvidia/cuda_nvcc/bin/ptxas"
    command = (ptxas, "-v", f"-arch=sm_{architecture}", "-o", folder / "kernels.cubin", ptx)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    functions = cuda_budget.parse_log(done.stdout + done.stderr)
    for function, name in zip(functions, cuda_budget.demangle([f.name for f in functions]), strict=True):
        function.name = name
    for kernel in (f for f in functions if f.registers is not None):
        print(f"{kernel.registers:>9} {kernel.spill_bytes:>6}  {kernel.name} [{kernel.architecture}]")
    held = {name: most for name, most in budget.items() if any(name in f.name for f in functions)}
    return cuda_budget.check(functions, held) if held else ["ptxas named no kernel of the budget"]


def check_host(wheels: Path) -> list[str]:
    """Files of the host's part that do not compile."""
    includes = [f"-I{wheels / 'nvidia' / package / 'include'}" for package in ("cuda_runtime", "cuda_nvcc")]
    flags = ("-std=c++20", "-fsyntax-only", "-DMEGATRON_EP_CUDA", f"-I{ROOT / 'csrc'}", *includes)
    files = [file for pattern in HOST for file in sorted((ROOT / "csrc").glob(pattern))]
    return [f"{file} does not compile" for file in files if subprocess.run(["g++", *flags, file]).returncode]


def main(wheels: str, budget_file: str, *architectures: str) -> int:
    budget = cuda_budget.parse_budget(Path(budget_file).read_text())
    problems = check_host(Path(wheels))
    print(f"{'registers':>9} {'spill':>6}  kernel")
    for architecture in architectures:
        with tempfile.TemporaryDirectory() as folder:
            problems += check_kernels(Path(wheels), Path(folder), budget, architecture)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

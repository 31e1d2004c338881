"""Has CMake build the extension modules that csrc/CMakeLists.txt describes. All else is declared in pyproject.toml.

They are pybind11 without torch headers: they take raw pointers, so one build works with every torch version.

The CUDA backend is part of them where there is an nvcc; the CUDA runtime is linked statically and looks for a driver
when it is first used. The variable MEGATRON_EP_CUDA=0 leaves the backend out, =1 makes a missing nvcc an error;
MEGATRON_EP_ARCHITECTURES names the GPUs that it is for, MEGATRON_EP_DTYPES what combine sums on them beside bf16 and
fp32; MEGATRON_EP_NVSHMEM=0 and MEGATRON_EP_NCCL=0 leave the NVSHMEM and the NCCL fabric out.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
# In a folder for each interpreter, so that the next build, isolated or not, compiles only changes.
BUILD = ROOT / "build" / str(sys.implementation.cache_tag)


class CMakeBuild(build_ext):
    def run(self) -> None:
        # The packages of cmake and ninja may lie beside an interpreter whose environment is not activated.
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
        cmake, ninja = (shutil.which(tool, path=path) for tool in ("cmake", "ninja"))
        if cmake is None or ninja is None:
            raise CompileError("megatron_ep needs cmake and ninja to build: pip install cmake ninja")
        package = ROOT / "megatron_ep" if self.inplace else Path(self.build_lib, "megatron_ep").absolute()
        tools = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
        jobs = len(os.sched_getaffinity(0))
        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one ninja at a time in a folder
            for step in (
                ["-S", "csrc", "--preset", "default", "-B", BUILD, *tools],
                ["--build", BUILD, f"-j{jobs}"],
                ["--install", BUILD, "--prefix", package],
            ):
                if subprocess.run([cmake, *step], cwd=ROOT).returncode != 0:
                    raise CompileError("building the extension modules failed; the messages are above")


setup(ext_modules=[Extension("megatron_ep._C", [])], cmdclass={"build_ext": CMakeBuild})

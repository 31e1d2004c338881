"""The build: what the extension links, what a rebuild compiles, and what cuda-check accepts and refuses."""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Extensions to the C API alone: they compile at once, and what is tested is which files are compiled.
MODULE = """
#include <Python.h>
#include "core/answer.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "", answer()};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
"""
FABRIC = "int unrelated() { return 1; }\n"
MODULES = {"bindings/module.cpp", "tools/simulate/module.cpp"}
BINDINGS = "Unity/unity_0_cxx.cxx"  # several files as one

FINE = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4sendILi8EEvi' for 'sm_90a'
ptxas info    : Function properties for _Z4sendILi8EEvi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 2048 bytes smem, 360 bytes cmem[0]
ptxas info    : Function properties for _Z6helperv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""
SPILLS = """\
ptxas info    : Compiling entry function '_Z7forwardv' for 'sm_90a'
ptxas info    : Function properties for _Z7forwardv
    64 bytes stack frame, 60 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with the project's build files, two modules with a header, a binding and one other source. In a
    folder named as a source distribution for CUDA is."""
    tmp_path = tmp_path / "megatron_ep-0.2.0+cu13"
    for name in ("setup.py", "pyproject.toml", "csrc/CMakeLists.txt", "csrc/CMakePresets.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in {
        "README.md": "",
        "megatron_ep/__init__.py": "",
        "csrc/core/answer.h": "constexpr int answer() { return -1; }\n",
        "csrc/bindings/module.cpp": MODULE,
        "csrc/bindings/binding.cpp": "int binding() { return 3; }\n",
        "csrc/tools/simulate/module.cpp": MODULE.replace('"_C"', '"_simulate"').replace(
            "PyInit__C", "PyInit__simulate"
        ),
        "csrc/tools/simulate/clock.cpp": "int clock_of_warps() { return 4; }\n",
        "csrc/fabric/fabric.cpp": FABRIC,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def build(tree: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tree,
        env=os.environ | {"MEGATRON_EP_CUDA": "0"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def compiled(output: str) -> set[str]:
    return set(re.findall(r"Building CXX object CMakeFiles/\w+\.dir/(\S+)\.o", output))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_extension_links_neither_torch_nor_a_driver() -> None:
    extension = importlib.util.find_spec("megatron_ep._C")
    assert extension is not None
    dynamic = subprocess.run(["readelf", "-d", extension.origin], capture_output=True, text=True, check=True).stdout
    needed = [line for line in dynamic.splitlines() if "(NEEDED)" in line]
    assert needed
    assert not [line for line in needed if any(name in line for name in ("torch", "c10", "libcuda", "libpython"))]


@pytest.mark.nightly
def test_rebuild_compiles_only_what_changed(tree: Path) -> None:
    status, output = build(tree)
    assert status == 0, output
    assert compiled(output) == MODULES | {BINDINGS, "fabric/fabric.cpp", "tools/simulate/clock.cpp"}
    assert "host backend only" in output
    assert "no work to do" in build(tree)[1]

    (tree / "csrc/core/answer.h").write_text("constexpr int answer() { return 0; }\n")
    assert compiled(build(tree)[1]) == MODULES

    (tree / "csrc/bindings/binding.cpp").write_text("int binding() { return 4; }\n")
    assert compiled(build(tree)[1]) == {BINDINGS}

    (tree / "csrc/router").mkdir()
    (tree / "csrc/router/gate.cpp").write_text("int gate() { return 2; }\n")
    assert compiled(build(tree)[1]) == {"router/gate.cpp"}
    imported = subprocess.run([sys.executable, "-c", "import megatron_ep._C"], cwd=tree, capture_output=True, text=True)
    assert imported.returncode == 0, imported.stderr


@pytest.mark.nightly
def test_compile_error_fails_the_build_and_is_shown(tree: Path) -> None:
    (tree / "csrc/fabric/fabric.cpp").write_text("int unrelated() { return undeclared; }\n")
    status, output = build(tree)
    assert status != 0
    assert "undeclared" in output


@pytest.mark.nightly
def test_function_without_its_return_is_an_error(tree: Path) -> None:
    (tree / "csrc/fabric/fabric.cpp").write_text("int unrelated() {}\n")
    assert build(tree)[0] != 0


@pytest.mark.nightly
def test_compilers_that_cannot_build_are_named(tree: Path) -> None:
    for compiler, found in (
        (str(tree / "missing"), "no such file or directory"),
        (script(tree / "old", "echo 11.4.0"), "is 11.4.0"),
        (script(tree / "other", "exit 1"), "is not one"),
    ):
        status, output = build(tree, CXX=compiler)
        said = " ".join(output.split())  # CMake breaks the lines, and its versions spell differently
        assert status != 0
        assert "megatron_ep needs g++ >= 12" in said
        assert compiler in said
        assert found in said.lower()


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_types_that_are_not_summed_are_named(tree: Path) -> None:
    status, output = build(tree, MEGATRON_EP_CUDA="1", MEGATRON_EP_ARCHITECTURES="90", MEGATRON_EP_DTYPES="fp16;int8")
    assert status != 0
    assert "MEGATRON_EP_DTYPES is 'fp16;int8', must be all, or some of bf16;fp16;fp32;fp64" in " ".join(output.split())


@pytest.mark.nightly
def test_another_compiler_for_the_same_folder_is_refused(tree: Path) -> None:
    assert build(tree, CXX=script(tree / "mine", 'exec g++ "$@"'))[0] == 0
    status, output = build(tree, CXX=script(tree / "yours", 'exec g++ "$@"'))
    assert status != 0
    assert "remove that folder to change the compiler" in " ".join(output.split())


@pytest.mark.nightly
def test_a_compiler_of_two_words(tree: Path) -> None:
    cache = script(tree / "cache", 'exec "$@"')
    status, output = build(tree, CXX=f"{cache} g++")
    assert status == 0, output


@pytest.mark.parametrize(
    ("logs", "budget", "status", "says"),
    [
        ([FINE], "", 0, "96    2048      0  void send<8>(int) [sm_90a]"),
        ([FINE], "# a comment\n\nsend<8> 96  # all of it\n", 0, ""),
        ([FINE], "send<8> 95", 1, "void send<8>(int) uses 96 registers, 95 allowed"),
        ([FINE], "send<9> 95", 1, "'send<9>' fits no kernel"),
        ([FINE], "helper 95", 1, "'helper' fits no kernel"),
        ([FINE], "helper 95 4", 0, ""),
        ([FINE], "send<8>", 1, "line 1 of the budget is 'send<8>'"),
        ([FINE, SPILLS], "", 1, "forward() spills 68 bytes"),
        ([FINE, SPILLS], "forward() 255 67", 1, "forward() spills 68 bytes"),
        ([FINE, SPILLS], "forward() 255 68", 0, ""),
        ([FINE, FINE], "", 1, "void send<8>(int) is compiled in 2 files"),
        (["an output that ptxas no longer writes"], "", 1, "nothing was checked"),
        ([], "", 0, "there are no CUDA sources to check"),
    ],
)
def test_cuda_budget(tmp_path: Path, logs: list[str], budget: str, status: int, says: str) -> None:
    files = [tmp_path / "budget.txt", *(tmp_path / f"{number}.ptxas" for number in range(len(logs)))]
    for file, text in zip(files, [budget, *logs], strict=True):
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, ROOT / "tests/packaging/cuda_budget.py", *files], capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout + done.stderr

"""The C++ that tests need, built where setup.py built the extension: the targets of tests/csrc/CMakeLists.txt."""

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build" / str(sys.implementation.cache_tag)


def run(*command: str | Path) -> None:
    # cmake and ctest may lie beside an interpreter whose environment is not activated.
    environment = os.environ | {"PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout


def build(target: str) -> Path:
    """Builds a target and returns the folder of what it makes."""
    assert BUILD.is_dir(), f"{BUILD} is missing: python setup.py build_ext --inplace"
    with open(BUILD / "lock", "w") as lock:  # one ninja at a time in a folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("cmake", "--build", BUILD, "--target", target)
    return BUILD / "tests"


def run_tests(label: str) -> None:
    """Builds and runs the programs of a label."""
    folder = build(label)
    run("ctest", "--test-dir", folder, "-L", f"^{label}$", "-j2", "--no-tests=error", "--output-on-failure")

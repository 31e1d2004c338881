"""NVSHMEM's own path between nodes, without a network card: two GPUs that do not map each other's memory, as two nodes.

A thread of NVSHMEM hands the puts to UCX (`pip install libucx-cu13`). Without a card the thread of the target carries
out an atomic, through a mapping of the GPU's memory by GDRCopy, whose driver these machines lack: NVSHMEM ends one
process in the set-up, and the other waits for ever. So the symmetric heap is in the host's memory here, and
tests/csrc/fake_gdrcopy.cpp says that it is mapped already.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import cpp
import pytest
from test_gpu_fabrics import need

HERE = Path(__file__).resolve().parent
SETTINGS = {"NVSHMEM_DISABLE_P2P": "1", "NVSHMEM_REMOTE_TRANSPORT": "ucx", "NVSHMEM_HEAP_KIND": "SYSMEM"}


def test_two_nodes(tmp_path):
    need("nvshmem", 2)
    ucx = find_spec("libucx")
    if ucx is None:
        pytest.skip("UCX is not installed: pip install libucx-cu13")
    shutil.copy(cpp.build("fake_gdrcopy") / "libfake_gdrcopy.so", tmp_path / "libgdrapi.so.2")
    libraries = [str(tmp_path), *(f"{folder}/lib" for folder in ucx.submodule_search_locations)]
    environment = os.environ | SETTINGS
    environment["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")])
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", HERE.parents[1], "-p", "no:cacheprovider"]
    tests = subprocess.run(
        [*command, "-q", HERE / "test_gpu_fabrics.py", "-k", "nvshmem and 2-1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert tests.returncode == 0 and "\n5 passed" in tests.stdout and "skipped" not in tests.stdout, tests.stdout

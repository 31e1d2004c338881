"""The CUDA kernels without a GPU: compiled for the host, lane by lane, they must give the host's bits."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    "tests/csrc/device_warp.cpp",
    "tests/csrc/simt/simt.cpp",
    "csrc/launch/host/group.cpp",
    "csrc/exec/host/fibers.cpp",
    "csrc/exec/host/rows.cpp",
    "csrc/fabric/simulated.cpp",
]


# A GPU faults on an access that is not aligned to its size.
FLAGS = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]


def build(folder: Path, tree: Path = ROOT) -> Path:
    """Compiles the program, two files at a time."""
    waiting, objects, running = list(SOURCES), [], []
    while waiting or running:
        if waiting and len(running) < 2:
            source = waiting.pop(0)
            objects.append(str(folder / f"{Path(source).stem}_{len(objects)}.o"))
            command = ["g++", "-std=c++20", "-O1", *FLAGS, f"-I{ROOT}/tests/csrc/simt", f"-I{tree}/csrc", "-c"]
            running.append(subprocess.Popen([*command, tree / source, "-o", objects[-1]]))
        else:
            assert running.pop(0).wait() == 0
    subprocess.run(["g++", *FLAGS, *objects, "-lpthread", "-o", folder / "device_warp"], check=True)
    return folder / "device_warp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("device_warp"))


@pytest.mark.parametrize("block", range(2))
def test_same_bits_as_the_host(program: Path, block: int) -> None:
    done = subprocess.run(
        [program, str(20 * block), str(20 * (block + 1))], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "20 cases\n"


def test_an_absent_rank_is_reported(program: Path) -> None:
    done = subprocess.run([program, "absent"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "an absent rank is reported\n"

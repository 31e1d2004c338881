"""The CUDA kernels without a GPU: compiled for the host, lane by lane, they must give the host's bits."""

import subprocess
from pathlib import Path

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
FLAGS = ["-std=c++20", "-O1", "-fsanitize=alignment", "-fno-sanitize-recover=alignment"]


def build(folder: Path) -> Path:
    """Compiles the program, two files at a time."""
    waiting, objects, running = list(SOURCES), [], []
    while waiting or running:
        if waiting and len(running) < 2:
            source = waiting.pop(0)
            objects.append(str(folder / f"{Path(source).stem}_{len(objects)}.o"))
            command = ["g++", *FLAGS, f"-I{ROOT}/tests/csrc/simt", f"-I{ROOT}/csrc", "-c", ROOT / source]
            running.append(subprocess.Popen([*command, "-o", objects[-1]]))
        else:
            assert running.pop(0).wait() == 0
    subprocess.run(["g++", *FLAGS, *objects, "-lpthread", "-o", folder / "device_warp"], check=True)
    return folder / "device_warp"


def test_kernels_lane_by_lane(tmp_path: Path) -> None:
    """One test, so that the program is built once."""
    program = build(tmp_path)
    for arguments, says in ((["absent"], "an absent rank is reported\n"), (["0", "30"], "30 cases\n")):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout == says

"""The CUDA kernels without a GPU: compiled for the host, lane by lane, they give the host's bits over any fabric."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = [
    "tests/csrc/simt/simt.cpp",
    "csrc/launch/host/group.cpp",
    "csrc/exec/host/fibers.cpp",
    "csrc/exec/host/rows.cpp",
    "csrc/fabric/simulated.cpp",
]
PROGRAMS = {"p2p": [], "nccl": ["-DOVER_NCCL"]}
# A GPU faults on an access that is not aligned to its size.
FLAGS = ["-std=c++20", "-O1", "-fsanitize=alignment", "-fno-sanitize-recover=alignment"]


def build(folder: Path) -> None:
    """Compiles the programs, two files at a time."""
    files = {f"{name}.o": ["tests/csrc/device_warp.cpp", *flags] for name, flags in PROGRAMS.items()}
    files |= {f"shared_{i}.o": [source] for i, source in enumerate(SHARED)}
    waiting, running = list(files.items()), []
    while waiting or running:
        if waiting and len(running) < 2:
            target, (source, *flags) = waiting.pop(0)
            includes = [f"-I{ROOT}/tests/csrc/simt", f"-I{ROOT}/csrc"]
            command = ["g++", *FLAGS, *flags, *includes, "-c", ROOT / source, "-o", folder / target]
            running.append(subprocess.Popen(command))
        else:
            assert running.pop(0).wait() == 0
    for name in PROGRAMS:
        objects = [folder / f"{name}.o", *folder.glob("shared_*.o")]
        subprocess.run(["g++", *FLAGS, *objects, "-lpthread", "-o", folder / name], check=True)


def test_kernels_lane_by_lane(tmp_path: Path) -> None:
    """One test, so that the programs are built once."""
    build(tmp_path)
    for name, cases in (("p2p", 30), ("nccl", 20)):
        runs = {
            ("absent",): "an absent rank is reported\n",
            ("unfit",): "an unfit handle is reported\n",
            ("0", str(cases)): f"{cases} cases\n",
        }
        for arguments, says in runs.items():
            done = subprocess.run([tmp_path / name, *arguments], capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
            assert done.stdout == says

"""Random programs of low-latency calls whose ranks receive at different places: see csrc/low_latency_schedules.cpp."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    "tests/csrc/low_latency_schedules.cpp",
    "csrc/exec/host/fibers.cpp",
    "csrc/exec/host/rows.cpp",
    "csrc/fabric/simulated.cpp",
]
SEEDS = 10_000


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("low_latency") / "schedules"
    sources = [str(ROOT / source) for source in SOURCES]
    subprocess.run(["g++", "-std=c++20", "-O1", f"-I{ROOT}/csrc", *sources, "-o", program], check=True)
    return program


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_any_order_of_halves(schedules: Path) -> None:
    """Replayed over the same arguments, as a captured graph would."""
    assert run(schedules, "0", str(SEEDS)) == f"0 of {SEEDS} programs fail\n"


def test_three_calls_under_way_are_seen_to_go_wrong(schedules: Path) -> None:
    failing = int(run(schedules, "three", "0", "500").split()[0])
    assert failing > 250

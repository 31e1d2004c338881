"""run_tsan.sh: what it takes for a clean run, a race that was planted, and anything else."""

import shutil
import stat
import subprocess
from pathlib import Path

import cpp
import pytest

RUNNER = Path(__file__).with_name("run_tsan.sh")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def run_tsan(*binaries: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUNNER, *binaries], capture_output=True, text=True)


def test_tsan_runner_on_a_real_race(tmp_path: Path) -> None:
    programs = cpp.build("race")
    binaries = {name: str(tmp_path / name) for name in ("tsan_clean", "tsan_racy", "tsan_racy_negative")}
    for name, binary in binaries.items():
        shutil.copy(programs / ("race_atomic" if name == "tsan_clean" else "race_int"), binary)
    assert run_tsan(binaries["tsan_clean"], binaries["tsan_racy_negative"]).returncode == 0
    assert run_tsan(binaries["tsan_clean"], binaries["tsan_racy"]).returncode == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tsan_fails", "exit 3"),
        ("tsan_missed_negative", "exit 0"),
        ("tsan_crashed_negative", "exit 139"),
        ("tsan_refused_negative", "echo 'FATAL: ThreadSanitizer: unexpected memory mapping'; exit 66"),
    ],
)
def test_tsan_runner_refuses(tmp_path: Path, name: str, text: str) -> None:
    done = run_tsan(script(tmp_path / name, text))
    assert done.returncode == 1
    assert f"FAILED  {name}" in done.stdout


def test_tsan_runner_with_nothing_to_run() -> None:
    assert run_tsan().returncode == 1

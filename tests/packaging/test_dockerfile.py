"""The Dockerfile, as far as it can be examined without Docker and NVIDIA's image."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = shutil.which("hadolint", path=Path(sys.executable).parent)


def lint(file: Path) -> str:
    assert HADOLINT, "of the extra `test`"
    done = subprocess.run([HADOLINT, "--no-color", file], capture_output=True, text=True)
    assert not done.stderr
    return done.stdout


def test_is_well_formed(tmp_path: Path) -> None:
    assert lint(ROOT / "Dockerfile") == ""
    broken = tmp_path / "Dockerfile"
    broken.write_text((ROOT / "Dockerfile").read_text().replace("COPY --from=build", "COPY --from=bild"))
    assert "DL3022" in lint(broken)


def test_what_it_installs_is_what_the_build_and_the_wheel_need() -> None:
    text = (ROOT / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'"([\w-]+)', project.partition("requires = [")[2].partition("]")[0])
    assert needed and all(f" {name} " in text or f'"{name}>' in text for name in needed)
    extras = re.findall(r"\[([\w,]+)\]\"", text)
    assert extras and all(f"\n{extra} = [" in project for names in extras for extra in names.split(","))

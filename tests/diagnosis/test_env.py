"""The report on the machine: complete on a healthy one, and when what it reports on is missing or broken."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from megatron_ep.diagnosis import env

SECTIONS = ["system", "memory", "packages", "cuda", "extension", "environment", "to do"]


@pytest.fixture
def lone_package(tmp_path: Path) -> Path:
    """A package that holds nothing but the report."""
    package = tmp_path / "megatron_ep"
    (package / "diagnosis").mkdir(parents=True)
    diagnosis = ("__init__.py", "advice.py", "cuda_version.py", "env.py", "tried_versions.py")
    for name in ("__init__.py", "env.py", *(f"diagnosis/{name}" for name in diagnosis)):
        shutil.copy(Path(env.__file__).parents[1] / name, package / name)
    return package


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has no package installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin/python"


def run_env(bare: Path, package: Path) -> str:
    """The report as printed by `python -m megatron_ep.env`."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [bare, "-m", "megatron_ep.env"], cwd=package.parent, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMAND = """
import json, sys
from megatron_ep.cli.main import main
from megatron_ep.diagnosis import env
collect, made = env.collect, []
env.collect = lambda: made.append(collect()) or made[0]
assert main(["env"]) == 0
print("REPORT", json.dumps(made[0]), "MODULES", *sys.modules)
"""


@pytest.fixture(scope="module")
def printed() -> tuple[str, env.Report, set[str]]:
    """What the command `env` prints here, of which report, and the modules that it has imported."""
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True)
    text, _, rest = done.stdout.partition("REPORT ")
    report, _, modules = rest.partition(" MODULES ")
    return text, json.loads(report), set(modules.split())


def test_report_of_this_machine(printed) -> None:
    text, report, modules = printed
    assert list(report) == SECTIONS
    assert report["extension"]["imports"] is True, report["extension"]
    assert report["extension"]["build"]
    assert Path(report["extension"]["imported from"]).name in report["extension"]["files"]
    assert "GCC" in report["extension"]["compiler"]
    assert report["packages"]["torch"] == torch.__version__, "which may say more than the package's metadata"
    for section, facts in report.items():
        assert f"{section}:\n" in text
        assert all(f"  {name} " in text for name in facts)
    assert not {"torch", "numpy", "megatron", "megatron_ep._C"} & modules, "it never imports what it reports on"


def test_nothing_installed(bare: Path, lone_package: Path) -> None:
    text = run_env(bare, lone_package)
    assert "No module named 'megatron_ep._C'" in text
    assert text.count("not installed") == len(env.PACKAGES)
    to_do = text.partition("to do:\n")[2]
    assert "`pip install torch`" in to_do and "install a wheel for this Python" in to_do


def test_from_a_source_tree(bare: Path, lone_package: Path, printed) -> None:
    (lone_package.parent / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    text = run_env(bare, lone_package)
    assert f"1.2.3, not installed: imported from {lone_package.parent}" in text
    assert "megatron_ep 1.2.3; torch not installed" in env.headline({**printed[1], "packages": _packages(text)})


def _packages(text: str) -> dict[str, str]:
    """The section of a printed report."""
    lines = text.partition("packages:\n")[2].partition("\n\n")[0].splitlines()
    return {name: value.strip() for name, _, value in (line.strip().partition(" ") for line in lines)}


def test_extension_is_not_a_library(bare: Path, lone_package: Path) -> None:
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    (lone_package / name).write_bytes(b"not a library")
    (lone_package / "_C.cpython-27-x86_64-linux-gnu.so").touch()
    text = run_env(bare, lone_package)
    assert "ImportError" in text
    assert name in text
    assert "_C.cpython-27-x86_64-linux-gnu.so (for another Python)" in text


def test_extension_takes_its_process_down(bare: Path, lone_package: Path) -> None:
    (lone_package / "_C.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert f"(exit status {-signal.SIGSEGV})" in run_env(bare, lone_package)


def test_extension_hangs(lone_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lone_package / "_C.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(env, "PACKAGE_DIR", lone_package)
    monkeypatch.setattr(env, "COMMAND_LIMIT_S", 1.0)
    facts = env._extension()
    assert facts["imports"] is False
    assert "no answer within 1 s" in facts["error"]


def test_environment_shows_what_matters_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EP_TIMEOUT", "7")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_JWT", "a secret")
    monkeypatch.setenv("UNRELATED", "private")
    shown = env._environment()
    assert (shown["MEGATRON_EP_TIMEOUT"], shown["RANK"], shown["SLURM_JWT"]) == ("7", "3", "(set)")
    assert "UNRELATED" not in shown


def test_output_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU \\377, 1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert env._gpus() == ["GPU \ufffd, 1"]
    odd = tmp_path / "state"
    odd.write_bytes(b"\xff\n")
    assert env._read(odd) == "\ufffd"


def test_nvlink_domains_of_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-01234567-89ab-cdef-0123-456789abcdef\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert env._domains() == ["none of several hosts"]

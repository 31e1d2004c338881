"""What users get: the source distribution, the wheel that is built from it alone, and that wheel in an environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"MEGATRON_EP_CUDA": "0", "CMAKE_BUILD_TYPE": "None"}  # not optimised: it compiles sooner
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. Large packages are this environment's; its megatron_ep is not to be seen
    there, whether it was installed in place or is in PYTHONPATH."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=NOT_SOURCES)
    build = (sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check")
    run(*build, "--outdir", folder, folder / "tree", cwd=folder)
    shutil.rmtree(folder / "tree")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    [wheel] = folder.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [own] = (folder / "venv/lib").glob("python*/site-packages")
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv"


def test_the_command_works(environment: Path) -> None:
    command = environment / "bin/megatron-ep"
    said = run(command, "env", cwd=environment)
    assert str(environment) in said
    run(command, "check", cwd=environment)


def test_what_the_package_brings(environment: Path) -> None:
    code = """
from pathlib import Path
import megatron_ep
from megatron_ep.training import recipe
folder = Path(megatron_ep.__file__).parent
assert (folder / "py.typed").is_file() and (folder / "deep_ep/shim/deep_ep/__init__.py").is_file()
print(folder, recipe.load("tiny_moe_cpu").topology.world_size)
"""
    said = run(environment / "bin/python", "-c", code, cwd=environment)
    assert said.startswith(str(environment)) and said.split()[1] == "4"

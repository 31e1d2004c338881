"""What users get: the source distribution, the wheel that is built from it alone, and that wheel in an environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__")


def run(*command: str | Path, cwd: Path, path: str = os.environ["PATH"]) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CXX", "CUDA_HOME")}
    environment |= {"PATH": path, "CMAKE_BUILD_TYPE": "None"}  # not optimised: it compiles sooner
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make wheel` builds it, without a toolkit."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=NOT_SOURCES)
    run(sys.executable, folder / "tree/tests/packaging/make_wheel.py", folder / "dist", cwd=folder)
    shutil.rmtree(folder / "tree")
    [path] = (folder / "dist").iterdir()
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. Large packages are this environment's; its megatron_ep is not to be seen
    there, whether it was installed in place or is in PYTHONPATH."""
    folder = tmp_path_factory.mktemp("package")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv/bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [own] = (folder / "venv/lib").glob("python*/site-packages")
    (own / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "venv"


def test_the_wheel_runs_elsewhere(wheel: Path) -> None:
    name, version, *_, platform = wheel.stem.split("-")
    assert (name, version) == ("megatron_ep", "0.2.0") and platform.startswith("manylinux_2_")
    files = zipfile.ZipFile(wheel).namelist()
    assert {"megatron_ep/py.typed", "megatron_ep/_C.pyi", "megatron_ep/_simulate.pyi"} <= set(files)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert {name for name in files if ".so" in name} == {f"megatron_ep/{name}{suffix}" for name in ("_C", "_simulate")}


def test_the_command_works_without_a_compiler(environment: Path) -> None:
    command, path = environment / "bin/megatron-ep", str(environment / "bin")
    assert shutil.which("g++", path=path) is None
    said = run(command, "env", cwd=environment, path=path)
    assert str(environment) in said
    run(command, "check", cwd=environment, path=path)


def test_what_the_package_brings(environment: Path) -> None:
    code = """
from pathlib import Path
import megatron_ep
from megatron_ep.training import recipe
folder = Path(megatron_ep.__file__).parent
assert (folder / "py.typed").is_file() and (folder / "deep_ep/shim/deep_ep/utils/event.py").is_file()
assert (folder / "tools/simulate/machines/h200_nvlink.toml").is_file()
print(folder, recipe.load("tiny_moe_cpu").topology.world_size)
"""
    said = run(environment / "bin/python", "-c", code, cwd=environment)
    assert said.startswith(str(environment)) and said.split()[1] == "4"

"""What has run together: the module, the table of the documents, and what pip does to what is installed."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from nightly import at_night

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("versions", ROOT / "tests/packaging/versions.py")
assert SPEC and SPEC.loader
versions = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(versions)


def test_the_table_is_what_has_run() -> None:
    text = versions.TRIED.read_text()
    (python, torch), [core, *_] = next(iter(versions.read(text).items()))
    assert versions.added(text, python, torch, core) == text
    page = versions.TABLE.read_text()
    assert versions.table(versions.read(text)) in page
    assert versions.with_table(page, versions.read(text)) == page


def test_a_new_one_is_added_in_order() -> None:
    text = 'TRIED = {\n    ("3.11", "2.13.0"): ["0.18.2"],\n}\n'
    for torch in ("2.9.0", "2.13.0", "2.13.0"):
        text = versions.added(text, "3.11", torch, "0.16.1")
    tried = versions.read(text)
    assert list(tried.items()) == [(("3.11", "2.9.0"), ["0.16.1"]), (("3.11", "2.13.0"), ["0.16.1", "0.18.2"])]
    assert "| 3.11 | 2.9.0 | 0.16.1 |\n| 3.11 | 2.13.0 | 0.16.1, 0.18.2 |\n" in versions.table(tried)


def test_a_tree_has_its_own_number(tmp_path: Path) -> None:
    info = tmp_path / "main/megatron/core/package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = ''\n")
    assert versions.name_of(str(tmp_path / "main")) == "0.20.1 (main)"
    assert versions.name_of("0.19.2") == "0.19.2"
    text = versions.added('TRIED = {("3.12", "2.9.1"): ["0.20.1 (main)"]}', "3.12", "2.9.1", "0.19.2")
    assert "| 3.12 | 2.9.1 | 0.19.2, 0.20.1 (main) |" in versions.table(versions.read(text))


def distribution(folder: Path, name: str, version: str, metadata: str = "") -> Path:
    """A wheel with nothing but a name, a version and what the metadata say."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        title = name.replace("_", "-")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n{metadata}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def requirements() -> str:
    """Of this project and its extra `megatron`, as a wheel's metadata has them."""
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [f"Requires-Dist: {need}\n" for need in project["dependencies"]]
    lines += [f'Requires-Dist: {need}; extra == "megatron"\n' for need in project["optional-dependencies"]["megatron"]]
    return "".join(["Provides-Extra: megatron\n", *lines])


@pytest.mark.parametrize(
    ("torch", "core"),
    [
        ("2.7.0a0+79aa17489c.nv25.4", "0.18.2"),  # as NVIDIA's images number them
        at_night("2.7.1", "0.16.1"),
        at_night("2.9.1+cu128", "0.17.1"),
        at_night("2.9.0a0+50eac811a6.nv25.9", "0.19.0rc0"),
    ],
)
def test_pip_replaces_neither_torch_nor_megatron_core(tmp_path: Path, torch: str, core: str) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    pip = (sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install", "--no-index", "-q")
    newer = tmp_path / "newer"
    newer.mkdir()
    for name, version in (("torch", "2.15.0"), ("megatron_core", "0.19.9"), ("rich", "14.0")):
        distribution(newer, name, version)
    own = distribution(newer, "megatron_ep", "0.2.0", requirements())
    installed = [distribution(tmp_path, name, v) for name, v in (("torch", torch), ("megatron_core", core))]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # where this tree may be
    subprocess.run([*pip, "--no-deps", *installed], check=True, env=alone)
    subprocess.run([*pip, "--find-links", newer, f"{own}[megatron]"], check=True, env=alone)
    [site] = (tmp_path / "venv/lib").glob("python*/site-packages")
    found = {folder.name.rpartition(".")[0] for folder in site.glob("*.dist-info")}
    assert found == {f"torch-{torch}", f"megatron_core-{core}", "rich-14.0", "megatron_ep-0.2.0"}

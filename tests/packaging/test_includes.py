"""What may include what in csrc: arrows go down only, and the protocol knows of no GPU and no network."""

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
LAYERS = (
    "core",
    "exec",
    "fabric",
    "protocol",
    "launch",
    "router",
    "bindings",
    "tools",
)  # each may include those before it
FOREIGN = re.compile(r"cuda|nvshmem|nccl|torch|ATen|c10|pybind11|Python\.h")


def sources() -> list[Path]:
    return [path for path in CSRC.rglob("*") if path.suffix in {".h", ".inl", ".cpp", ".cu"}]


def layer(path: Path) -> int:
    return LAYERS.index(path.relative_to(CSRC).parts[0])


def includes(path: Path, marks: str) -> list[str]:
    return re.findall(rf"^#include {marks[0]}(.*){marks[1]}", path.read_text(), re.MULTILINE)


def test_arrows_go_down_only() -> None:
    assert sources()
    for path in sources():
        for name in includes(path, '""'):
            assert (CSRC / name).is_file(), f"{path} includes {name}, which is not in csrc"
            assert layer(CSRC / name) <= layer(path), f"{path} includes {name}, which is above it"


def test_what_each_layer_needs_of_others() -> None:
    for path in sources():
        needed = [name for name in includes(path, "<>") if FOREIGN.search(name)]
        assert not any("torch" in name or "ATen" in name for name in needed), path
        if layer(path) < LAYERS.index("bindings"):
            assert not any("pybind11" in name or name == "Python.h" for name in needed), path
        if path.is_relative_to(CSRC / "protocol"):
            assert not needed, f"{path} includes {needed}"

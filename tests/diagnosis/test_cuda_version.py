"""Which CUDA torch and the packages have, as torch's own file says."""

import importlib.machinery
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
import torch

from megatron_ep.diagnosis import cuda_version


@pytest.fixture
def torch_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Call it with the text of torch/version.py, or None for no torch."""

    def say(text: str | None) -> None:
        spec = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
        (tmp_path / "version.py").write_text(text or "")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if text is None else spec)

    return say


def test_this_torch() -> None:
    assert cuda_version.of_torch("__version__") == torch.__version__
    assert cuda_version.of_torch("cuda") == torch.version.cuda


@pytest.mark.parametrize(
    ("line", "cuda", "major"),
    [
        ("cuda: Optional[str] = '12.8'", "12.8", "12"),
        ("cuda: str | None = '13.0'", "13.0", "13"),
        ("cuda = '12.6'", "12.6", "12"),
        ("cuda: Optional[str] = None", None, "13"),
        (None, None, "13"),
    ],
)
def test_versions(torch_says, line: str | None, cuda: str | None, major: str) -> None:
    torch_says(None if line is None else f"__version__ = '2.9.1'\n{line}\nhip = None\n")
    assert cuda_version.of_torch("cuda") == cuda
    assert cuda_version.package("nccl") == f"nvidia-nccl-cu{major}"


@pytest.mark.parametrize(
    ("built", "torchs", "fits"),
    [
        ("12.4", "12.8", True),
        ("13.0", "13.2", True),
        ("13.0", "12.8", False),
        ("12.9", "13.0", False),
        (None, "12.8", True),
        ("13.0", None, True),
    ],
)
def test_a_pair(torch_says, built: str | None, torchs: str | None, fits: bool) -> None:
    torch_says(f"__version__ = '2.9.1'\ncuda = {torchs!r}\n")
    said = cuda_version.mismatch(built)
    assert (said is None) == fits
    if said:
        assert f"built with CUDA {built}, but torch 2.9.1 with CUDA {torchs}: install the wheel +cu{torchs[:2]}" in said


def test_packages_of_another_cuda(torch_says, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
            return "2.29"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    torch_says("cuda = '13.0'\n")
    assert cuda_version.foreign_packages() == ["nvidia-nccl-cu12"]
    torch_says("cuda = None\n")
    assert cuda_version.foreign_packages() == []

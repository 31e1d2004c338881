"""What `megatron-ep env` says is to be done: nothing where nothing is missing, else the one thing that is."""

import copy
import re
import sys
from pathlib import Path

import pytest

from megatron_ep.diagnosis import advice, cuda_version, env

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
COMPLETE = {
    "system": {"network cards": ["mlx5_0 port 1: 28.39, InfiniBand"]},
    "memory": {"/dev/shm": "503.8 GiB, 503.7 GiB free"},
    "packages": {"torch": "2.13.0+cu130", "megatron-core": "0.16.1"},
    "cuda": {
        "gpus": ["0, NVIDIA H200, 143771 MiB, 580.159.04, 9.0"],
        "fabrics": {"nvshmem": "the nvshmem fabric was not built", "nccl": "built, loads with /lib/libnccl.so.2"},
    },
    "extension": {"imports": True, "build": {"cuda": "13.0", "architectures": "80-real,90"}},
}


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch):
    """Call it to let torch have been built with another CUDA."""

    def of(cuda: str | None) -> None:
        monkeypatch.setattr(cuda_version, "of_torch", {"cuda": cuda, "__version__": "2.13.0"}.get)

    of("13.0")
    monkeypatch.setattr(cuda_version, "_is_installed", lambda name: False)
    monkeypatch.setattr(advice, "TRIED", {(PYTHON, "2.13.0"): ["0.16.1"]})
    return of


def told(**changes: object) -> dict[str, str]:
    """Of the complete machine with these facts instead, named section__fact."""
    report = copy.deepcopy(COMPLETE)
    for name, value in changes.items():
        section, fact = name.split("__")
        report[section][fact.replace("_", " ")] = value
    return advice.advice(report)


def test_nothing_is_missing() -> None:
    assert told() == {}
    assert "to do:\n  nothing" in env.render({"to do": {}})


@pytest.mark.parametrize(
    ("changes", "topic", "words"),
    [
        ({"extension__imports": False}, "extension", "install a wheel for this Python"),
        (
            {"extension__build": {"cuda": None}},
            "extension",
            r"the wheel \+cu13, or build where there is nvcc 13",
        ),
        (
            {"extension__build": {"cuda": "12.4", "architectures": "90"}},
            "extension",
            "built with CUDA 12.4, but torch 2.13.0 with CUDA 13.0",
        ),
        ({"cuda__gpus": ["0, NVIDIA H100, 81559 MiB, 550.54.15, 9.0"]}, "driver", "550.54.15 is older .* 580 or later"),
        ({"cuda__gpus": ["0, Tesla T4, 15360 MiB, 580.1, 7.5"]}, "GPU", "Tesla T4: the kernels need"),
        *(
            (
                {"cuda__fabrics": {"nvshmem": "not built", "nccl": "not built", "mlx5": mlx5, "verbs": verbs}},
                "several machines",
                rf"would use {chosen}: `pip install nvidia-nvshmem-cu13`",
            )
            for mlx5, verbs, chosen in (
                ("mlx5_0 port 1: up, fe80::1", "mlx5_0 port 1: up, fe80::1", "verbs"),
                ("mlx5_0 port 1: not of mlx5", "mlx5_0 port 1: down; mlx5_1 port 1: up, fe80::1", "verbs"),
                ("libmlx5.so.1 is missing", "libibverbs finds no network card", "tcp"),
            )
        ),
        ({"memory__/dev/shm": "0.1 GiB, 0.1 GiB free"}, "/dev/shm", "--ipc host"),
        ({"packages__torch": "not installed"}, "torch", "pip install torch"),
        (
            {"packages__torch": "2.14.0a0+nv26.1"},
            "megatron-core",
            "0.16.1 has not been tested with torch 2.14.0a0",
        ),
        *(
            ({"packages__megatron-core": core}, "megatron-core", words)
            for core, words in (
                ("0.17.1", f"0.17.1 has not been tested with torch 2.13.0 on Python {PYTHON}"),
                ("not installed", "pip install"),
                ("0.16.0", "0.16.0 is not supported: 0.16.1 or later, before 0.20"),
                ("0.20.0", "not supported"),
            )
        ),
    ],
)
def test_one_thing_is_missing(changes: dict[str, object], topic: str, words: str) -> None:
    said = told(**changes)
    assert list(said) == [topic] and re.search(words, said[topic])


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("90", "9.0", True),
        ("90", "10.3", True),
        ("90-real", "10.3", False),
        ("90", "8.0", False),
        ("80-real,89-real,90", "8.6", True),
        ("80-real,90-real,100-real,120", "10.3", True),
        ("80-real,90-real,100-real,120", "11.0", False),
        ("80-virtual", "9.0", True),
        ("89-real", "8.6", False),
        ("90a", "9.0", True),
        ("90a", "10.0", False),
        ("100a-real,120", "10.3", False),
        ("100f", "10.3", True),
        ("100f", "12.0", False),
        ("native", "9.0", True),
    ],
)
def test_what_was_built_for_a_gpu(architectures: str, capability: str, runs: bool) -> None:
    gpus = [f"0, NVIDIA, 1 MiB, 580.1, {capability}"]
    said = told(cuda__gpus=gpus, extension__build={"cuda": "13.0", "architectures": architectures})
    again = f"MEGATRON_EP_ARCHITECTURES={capability.replace('.', '')}"
    assert said == ({} if runs else {"GPU": f"NVIDIA: nothing was built for it, build again with {again}"})


def test_a_torch_without_cuda_and_packages_of_another(torch, monkeypatch: pytest.MonkeyPatch) -> None:
    torch(None)
    assert "knows no CUDA" in told()["torch"]
    torch("13.0")
    monkeypatch.setattr(cuda_version, "_is_installed", lambda name: name == "nvidia-nccl-cu12")
    assert told() == {"packages": "torch has CUDA 13: `pip uninstall nvidia-nccl-cu12`"}


def test_the_range_is_that_of_the_extra() -> None:
    extra = re.search(r'"megatron-core>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert extra and tuple(tuple(map(int, bound.split("."))) for bound in extra.groups()) == advice.CORES

"""Which fabric is taken, and what is said when none fits. Needs no GPU."""

import importlib.util

import pytest

import megatron_ep as ep
from megatron_ep import _C, fabrics


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fabrics.VARIABLE, raising=False)
    assert fabrics.choose(["a", "a"]) == "p2p"
    monkeypatch.setenv(fabrics.VARIABLE, "p2p")
    with pytest.raises(ep.EPError, match="p2p connects the processes of one machine, but the ranks run on a, b"):
        fabrics.choose(["a", "b", "a"])
    monkeypatch.setenv(fabrics.VARIABLE, "carrier_pigeon")
    with pytest.raises(ValueError, match="'carrier_pigeon', must be one of p2p, nvshmem"):
        fabrics.choose(["a"])


def test_missing_nvshmem_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fabrics.VARIABLE, raising=False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "_nvshmem" in name else found(name))
    with pytest.raises(ep.EPError, match="was not built: it needs nvcc and the package nvidia-nvshmem-cu13"):
        fabrics.choose(["a", "b"])
    assert "nvidia-nvshmem-cu13" in fabrics.report()["nvshmem"]


def test_nvshmem_loads_without_a_driver() -> None:
    if importlib.util.find_spec("megatron_ep._nvshmem") is None:
        pytest.skip("this build has no nvshmem fabric")
    assert hasattr(fabrics.load_nvshmem(), "NvshmemGroup")
    assert fabrics.report()["nvshmem"].startswith("built, loads with ")


@pytest.mark.skipif(hasattr(_C, "CudaGroup"), reason="this build has the CUDA backend")
def test_a_build_without_cuda_says_so() -> None:
    with pytest.raises(ValueError, match=r"built without the CUDA backend \(it needs nvcc\)"):
        ep.LocalCluster(1, 2, ep.Config(num_experts=2), device="cuda")

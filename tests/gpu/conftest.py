"""Tests that need a GPU. Without one they are skipped, and say why. tests/gpu/run.sh runs them all."""

import sys
from pathlib import Path

import pytest
import torch

from megatron_ep import _C

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # cases.py


def why_not() -> str | None:
    if not hasattr(_C, "CudaGroup"):
        return "megatron_ep was built without the CUDA backend"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < (9, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, the CUDA backend needs 9.0"
    return None


def pytest_collection_modifyitems(items):
    here = Path(__file__).resolve().parent
    reason = why_not()
    if reason is not None:
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=reason))

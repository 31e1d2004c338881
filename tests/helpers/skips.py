"""Tests that this machine cannot run, and one line for a reason at the end."""

import importlib.util
from collections import defaultdict

import pytest
import torch

from megatron_ep import _C


def no_gpu():
    """Why no test can run on a GPU here; None: they can."""
    if not hasattr(_C, "cuda_launcher"):
        return "megatron_ep was built without the CUDA backend"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, the CUDA backend needs 8.0"
    return None


def missing(*modules):
    """Says which of these is not installed, the first; None: all are. Nothing but the packages that hold them is
    imported."""
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{name} is not installed"
    return None


def skip(items):
    """Skips tests that cannot run here: those in tests/gpu without a GPU, and those marked `needs(reason)` with a
    reason."""
    gpu = no_gpu()
    for item in items:
        reasons = [gpu if item.path.parent.name == "gpu" else None, *(m.args[0] for m in item.iter_markers("needs"))]
        for reason in filter(None, reasons):
            item.add_marker(pytest.mark.skip(reason=reason))


def summary(skipped):
    """A line for each reason, the most tests first. skipped: pytest's reports."""
    files = defaultdict(list)
    for report in skipped:
        files[report.longrepr[2].removeprefix("Skipped: ")].append(report.nodeid.partition("::")[0])
    for reason, of in sorted(files.items(), key=lambda entry: -len(entry[1])):
        names = sorted(set(of))
        yield f"not run: {len(of)} in {f'{len(names)} files' if len(names) > 3 else ', '.join(names)}: {reason}"

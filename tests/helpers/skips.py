"""Tests that this machine cannot run: one skipped item for a file's tests, and one line for a reason at the end."""

import importlib.util
from collections import Counter, defaultdict

import pytest
import torch

from megatron_ep import _C


def no_gpu():
    """Why no test can run on a GPU here; None: they can."""
    if not hasattr(_C, "cuda_group"):
        return "megatron_ep was built without the CUDA backend"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, the CUDA backend needs 8.0"
    return None


def missing(*modules):
    """The first of these that is not installed, or None. Nothing but the packages that hold them is imported."""
    for name in modules:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return name
    return None


class LeftOut(pytest.Item):
    """Stands for `count` tests of its parent's file."""

    def __init__(self, *, count, reason, **options):
        super().__init__(**options)
        self.reason = reason
        self.user_properties.append(("left_out", count))

    def runtest(self):
        pytest.skip(self.reason)

    def reportinfo(self):
        return self.path, 0, self.name


def collapse(items):
    """Puts one LeftOut in the place of a file's tests that cannot run here: those in tests/gpu without a GPU, those
    marked `needs(reason)` with a reason, and those of a `device` that is not there."""
    gpu = no_gpu()
    counts = Counter()
    kept = []
    for item in items:
        needs = item.get_closest_marker("needs")
        reason = needs.args[0] if needs else gpu if item.path.parent.name == "gpu" else None
        if reason is None:
            kept.append(item)
        else:
            counts[item.parent, reason] += 1
        if gpu and "device" in item.fixturenames:
            counts[item.parent, gpu] += 1
    items[:] = kept
    for (file, reason), count in counts.items():
        items.append(LeftOut.from_parent(file, name="left_out", count=count, reason=reason))


def summary(skipped):
    """A line for each reason, the most tests first.

    Args:
        skipped: pytest's reports of them.
    """
    tests, files = defaultdict(int), defaultdict(set)
    for report in skipped:
        path, _, reason = report.longrepr
        reason = reason.removeprefix("Skipped: ")
        tests[reason] += dict(getattr(report, "user_properties", ())).get("left_out", 1)
        files[reason].add(report.nodeid.partition("::")[0] or path)
    for reason in sorted(tests, key=tests.__getitem__, reverse=True):
        named = f"{len(files[reason])} files" if len(files[reason]) > 3 else ", ".join(sorted(files[reason]))
        yield f"not run: {tests[reason]} in {named}: {reason}"

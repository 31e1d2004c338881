"""The tests that are C++ programs, by their labels in CMakeLists.txt. `make tsan` runs those under ThreadSanitizer."""

import cpp
import pytest

LABELS = ["numbering", "send_queue", "cuda_host", "simt", "schedules"]
NIGHTLY = ["steps", "nightly"]


@pytest.mark.parametrize("label", [*LABELS, *(pytest.param(label, marks=pytest.mark.nightly) for label in NIGHTLY)])
def test_cpp(label: str) -> None:
    cpp.run_tests(label)

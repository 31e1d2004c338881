"""The tests that are C++ programs, by their labels in CMakeLists.txt. `make tsan` runs those under ThreadSanitizer."""

import cpp
import pytest


@pytest.mark.parametrize("label", ["numbering", "send_queue", "cuda_host", "simt", "schedules", "steps"])
def test_cpp(label: str) -> None:
    cpp.run_tests(label)

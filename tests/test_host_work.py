"""`tests/host_work.py` runs. Nothing here judges a time."""

import host_work
import pytest


@pytest.mark.nightly
def test_every_call_is_measured() -> None:
    measured = host_work.compare([host_work.ROOT], 1, 2, "-O0")
    for call in "low-latency dispatch", "low-latency combine, hook", "dispatch from scratch", "in one hop: combine":
        assert 0 < measured[call][0] < 1e5

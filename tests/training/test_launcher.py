"""What the parent says of ranks that failed."""

import signal
from types import SimpleNamespace

import pytest

from megatron_ep.training import launcher


@pytest.mark.parametrize("exitcode", [launcher.MISTAKE, -signal.SIGTERM], ids=["ended", "stopped at its end"])
def test_a_reported_mistake_keeps_its_status(tmp_path, exitcode):
    """The agent stops a rank that has reported and is about to end when another one's end is seen first."""
    reported = tmp_path / "error.json"
    reported.touch()
    message = {"message": "ValueError: --resume: belongs to another run"}
    first = SimpleNamespace(exitcode=exitcode, error_file=str(reported), message=message, timestamp=0)
    other = SimpleNamespace(exitcode=-signal.SIGTERM, error_file="none", message="Signal 15", timestamp=2**40)
    error = launcher._explained({0: other, 1: first}, tmp_path)
    assert error.status == launcher.MISTAKE
    assert str(error) == "--resume: belongs to another run"


def test_another_failure_names_its_rank(tmp_path):
    failed = SimpleNamespace(exitcode=-signal.SIGTERM, error_file="none", message="Signal 15", timestamp=0)
    error = launcher._explained({3: failed}, tmp_path)
    assert error.status == 1
    assert str(error) == "rank 3 failed: killed by SIGTERM"

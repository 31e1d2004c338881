"""A rank whose peers do not start says for whom it waits, and where."""

import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from ports import free_port

from megatron_ep.errors import EPError
from megatron_ep.meeting import job, stores
from megatron_ep.meeting.rendezvous import agreed_name

WAITS = """
import sys
from datetime import timedelta
from megatron_ep.meeting import stores
stores.WARN_S = 0.5
{0}
"""
BY_STORE = """
from megatron_ep.meeting import job, rendezvous
try:
    limit = timedelta(seconds=2)
    rendezvous.agreed_name(*job.store_of_ranks(limit), limit)
except Exception as error:
    print(error)
"""
JOB_RANKS = """
from megatron_ep.tools.job_ranks import JobRanks
try:
    JobRanks(2.0)
except Exception as error:
    print(error)
"""
ENV = """
from megatron_ep.cli import env
env.PATIENCE_S = 2.0
env._compare_all()
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("program", [BY_STORE, JOB_RANKS, ENV], ids=["training", "job", "env"])
def test_a_rank_whose_peers_do_not_start_says_so(program: str, rank: int) -> None:
    """Rank 0 waits for the others, and another one for the store of rank 0."""
    port = free_port()
    ranks = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "4"}
    without_agent = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    done = subprocess.run(
        [sys.executable, "-c", WAITS.format(program)],
        env=without_agent | ranks,
        capture_output=True,
        text=True,
        timeout=200,
    )
    lines = [line for line in done.stderr.splitlines() if " waits for " in line]
    expected = f"waits for 3 of 4 ranks at localhost:{port}" if rank == 0 else "waits for the store of rank 0 at "
    assert len(lines) == 1 and expected in lines[0] and f"localhost:{port}" in lines[0], done.stderr
    if program != ENV:
        ended = (
            "rank 1, 2, 3 did not come to step 1 of the job's start within 2 s" if rank == 0 else f"localhost:{port}"
        )
        assert ended in done.stdout, done


def test_a_rank_that_waits_for_rank_0_at_a_store_that_is_there(caplog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "WARN_S", 0.5)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(EPError, match="rank 0 did not come to step 1 of the job's start within 2 s"):
        agreed_name(dist.PrefixStore("a job", store), 1, 4, timedelta(seconds=2))
    assert (
        f"rank 1 waits for 1 of 4 ranks at localhost:{store.port} in step 1 of the job's start: rank 0" in caplog.text
    )


def test_when_a_wait_is_logged() -> None:
    times = [0.0]
    for _ in range(4):
        times.append(stores.next_warning(times[-1]))
    assert times[1:] == [5.0, 30.0, 60.0, 90.0]
    assert stores.next_warning(47.0) == 60.0, "one line for what was missed"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RANK", "", "RANK is '', must be a number"),
        ("MASTER_PORT", "x", "MASTER_PORT is 'x'"),
        ("MASTER_ADDR", "", "set"),
    ],
)
def test_variables_that_are_missing(name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(other, "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(says)):
        job.store_of_ranks(timedelta(seconds=1))

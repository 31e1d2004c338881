"""What a buffer takes over from the process group that it is made for."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from run_on import run_on

import megatron_ep as ep
from megatron_ep.meeting.torch_group import timeout_of
from megatron_ep.tools.local_ranks import LocalRanks

W = 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 77) as ranks:
        yield ranks


def timeout_in_force(group: dist.ProcessGroup | None = None, **settings: float) -> float:
    with ep.Buffer(group, ep.Config(num_experts=2, **settings)) as buffer:
        return buffer.config.timeout_seconds


@run_on("ranks")
def test_a_wait_ends_when_a_collective_of_the_group_would() -> None:
    own = dist.new_group([0, 1], timeout=timedelta(seconds=33))
    endless = dist.new_group([0, 1], timeout=timedelta(days=10_000))
    with mock.patch.dict(os.environ):
        os.environ.pop("MEGATRON_EP_TIMEOUT", None)
        assert timeout_in_force() == timeout_of(None, CPU) == 77
        assert timeout_in_force(own) == timeout_of(own, torch.device("cuda")) == 33
        assert timeout_in_force(endless) == 1e6
        assert timeout_in_force(own, timeout=5) == 5
        os.environ["MEGATRON_EP_TIMEOUT"] = "7"
        assert timeout_in_force(own) == 7 and timeout_in_force(own, timeout=5) == 5
    assert timeout_of(mock.Mock(_get_backend=mock.Mock(side_effect=RuntimeError)), CPU) is None

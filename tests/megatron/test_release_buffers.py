"""The buffers that layers share give their memory back, and are built again."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.buffer.host import HostBackend
from megatron_ep.megatron import shared_buffers
from megatron_ep.tools.local_ranks import LocalRanks

W, T, H, K = 2, 4, 8, 2


def use_buffers() -> list[ep.Buffer]:
    """Two buffers, one of which has calls in one hop."""
    promises = {4: T, 8: None}
    buffers = [
        shared_buffers.shared_buffer(dist.group.WORLD, E, torch.device("cpu"), {"max_tokens": most})
        for E, most in promises.items()
    ]
    x, ids = torch.ones(T, H), torch.tensor([[0, 2]] * T)
    for buffer in buffers:
        rows = ep.dispatch(x, ids, buffer=buffer)
        assert torch.equal(ep.combine(rows.x, rows.handle), K * x)
    return buffers


def run_in_turn() -> None:
    shared_buffers.configure(timeout=10)
    for _ in range(2):
        buffers = use_buffers()
        seconds = shared_buffers.comm_seconds()
        needs = "graphs" if dist.get_rank() == 1 else ""
        refused = pytest.raises(ValueError, match="rank 1 cannot release the buffer: graphs")
        with mock.patch.object(HostBackend, "needs_memory", lambda _, needs=needs: needs), refused:
            shared_buffers.release_buffers()
        assert use_buffers() == buffers
        shared_buffers.release_buffers()
        assert not any(buffer.is_open for buffer in buffers)
        assert shared_buffers.comm_seconds() >= seconds > 0
        shared_buffers.release_buffers()  # of none
    shared_buffers.configure()


def test_layers_buffers_are_released_and_built_again() -> None:
    with LocalRanks(W, 60) as ranks:
        ranks.run(run_in_turn)

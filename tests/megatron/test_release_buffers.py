"""The buffers that layers share give their memory back, and are built again."""

from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from counted_experts import make_layer
from megatron.core import parallel_state

import megatron_ep as ep
from megatron_ep.buffer.host import HostBackend
from megatron_ep.megatron import equivalence, shared_buffers
from megatron_ep.megatron.stand_ins import host_runtime
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


def run_lives() -> None:
    host_runtime.enable()
    shared_buffers.configure(timeout=10)
    buffers, kept = [], None
    with mock.patch.object(equivalence, "_layout", (1, W)):
        config = equivalence.make_config()
    x = torch.randn(T, 1, config.hidden_size, dtype=torch.float64)
    for life in range(4):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=W, create_gloo_process_groups=False)
        layer = make_layer(config)
        layer(x)[0].sum().backward()
        if kept is not None:
            kept(x)
        buffers += [buffer for buffer in shared_buffers._buffers.values() if buffer not in buffers]
        assert [buffer.is_open for buffer in buffers] == [i in (1, life) for i in range(life + 1)]
        if life == 1:
            kept = layer
        del layer
        parallel_state.destroy_model_parallel()
    shared_buffers.close_buffers()
    shared_buffers.configure()


def test_buffers_of_groups_that_megatron_has_replaced_are_closed() -> None:
    """Once no layer is left that uses them."""
    with LocalRanks(W, 60) as ranks:
        ranks.run(run_lives)

"""What a CUDA graph may still replay when its buffer is closed, on a group that this test makes up: the backend's part,
without a GPU. tests/gpu/test_gpu_launch.py replays a real one."""

import gc
import weakref
from unittest import mock

import pytest
import torch

from megatron_ep.backends import cuda
from megatron_ep.normal.rank_group import RankGroup


class Group:
    """Counts the graphs as the compiled one does."""

    def __init__(self):
        self.alive, self.done = 0, []

    def note_capture(self, stream):
        assert stream == 7
        self.alive = 1

    def graphs(self):
        return self.alive

    def retire(self):
        self.done.append("retired")


class Part:
    """Such as the heap of the low-latency mode."""


@pytest.fixture
def capturing():
    stream = mock.Mock(cuda_stream=7)
    with (
        mock.patch("torch.cuda.current_stream", return_value=stream),
        mock.patch("torch._C._cuda_getCurrentRawStream", return_value=7, create=True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
    ):
        yield


class Closed(RankGroup):
    def __init__(self, backend):
        self._backend = backend

    def _unseen_failure(self):
        return None


def make(group):
    return cuda.CudaBackend(group, None, torch.device("cuda", 0), 4)


def close(backend, how):
    buffer = Closed(backend)
    del backend
    if how == "close":
        buffer.close()
        assert not buffer.is_open
    else:
        with mock.patch.object(buffer, "report_unseen"):
            buffer.__del__()


@pytest.mark.parametrize("how", ["close", "collected"])
def test_what_a_graph_may_replay_outlives_the_buffer_and_no_longer_than_the_graph(capturing, how):
    group, part = Group(), Part()
    backend = make(group)
    assert backend.launch(lambda stream: stream, part) == 7
    kept = weakref.ref(backend), weakref.ref(part)
    close(backend, how)
    assert group.done == ["retired"]
    del backend, part
    gc.collect()
    assert all(reference() is not None for reference in kept), "freed under a graph that can be replayed"
    group.alive = 0  # the graph is destroyed
    make(Group())
    gc.collect()
    assert all(reference() is None for reference in kept)


def test_nothing_outlives_a_buffer_that_no_graph_has_captured():
    group = Group()
    backend = make(group)
    kept = weakref.ref(backend)
    close(backend, "close")
    del backend
    gc.collect()
    assert kept() is None and group.done == []


def test_parts_of_earlier_graphs_go_with_them(capturing):
    group, first, second = Group(), Part(), Part()
    backend = make(group)
    backend.launch(lambda stream: None, first)
    kept = weakref.ref(first)
    del first
    group.alive = 0
    backend.launch(lambda stream: None, second)
    gc.collect()
    assert kept() is None

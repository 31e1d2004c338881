"""What a CUDA graph may still replay when its buffer is closed, on a group that this test makes up: the backend's part,
without a GPU. tests/gpu/test_gpu_launch.py replays a real one."""

import gc
import weakref
from unittest import mock

import pytest
import torch

import megatron_ep as ep
from megatron_ep.buffer import cuda
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.diagnosis import failures
from megatron_ep.fabrics import gpu
from megatron_ep.fabrics.connection import Connection


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
    """Its return_value: whether this thread captures."""
    stream = mock.Mock(cuda_stream=7)
    with (
        mock.patch("torch.cuda.current_stream", return_value=stream),
        mock.patch("torch._C._cuda_getCurrentRawStream", return_value=7, create=True),
        mock.patch("torch.cuda.is_initialized", return_value=True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True) as capturing,
    ):
        yield capturing


class Closed(RankGroup):
    device = torch.device("cuda", 0)

    def __init__(self, backend):
        super().__init__()
        self._backend = backend
        self.itself = self  # a cycle: the garbage collector ends it

    def _unseen_failure(self):
        return None


def make(group):
    return cuda.CudaBackend(Connection(group), None, torch.device("cuda", 0), 4)


def launch(backend, part=None):
    """Returns the stream."""
    return backend.launch(
        mock.Mock(launch=lambda call, phase, stream, given: stream), None, 0, backend.current_stream(), (), part
    )


def close(backend, how):
    buffer = Closed(backend)
    if how == "close":
        buffer.close()
        assert not buffer.is_open
    del buffer
    gc.collect()


@pytest.mark.parametrize("how", ["close", "collected"])
def test_what_a_graph_may_replay_outlives_the_buffer_and_no_longer_than_the_graph(capturing, how):
    group, part = Group(), Part()
    backend = make(group)
    assert launch(backend, part) == 7
    kept = weakref.ref(backend), weakref.ref(part)
    capturing.return_value = False
    close(backend, how)
    gpu.run_deferred()
    assert group.done == ["retired"]
    del backend, part
    gc.collect()
    assert all(reference() is not None for reference in kept), "freed under a graph that can be replayed"
    group.alive = 0  # the graph is destroyed
    make(Group())
    gc.collect()
    assert all(reference() is None for reference in kept)


@pytest.mark.parametrize("how", ["close", "collected"])
def test_while_a_graph_is_captured_nothing_ends(capturing, how):
    """What CUDA would be called for waits until somebody waits for the GPU anyway."""
    group, modules = Group(), []
    backend = make(group)
    launch(backend)
    kept = weakref.ref(backend)
    with mock.patch.dict(
        "sys.modules", {name: mock.Mock(run_deferred=lambda: modules.append(1)) for name in gpu.MODULES}
    ):
        close(backend, how)
        gpu.run_deferred()
        assert group.done == modules == [] and kept() is not None
        capturing.return_value = False
        if how == "collected":
            gc.collect()
            assert group.done == modules == [], "a finalizer does not know whether another thread captures"
        gpu.run_deferred()
    assert group.done == ["retired"] and len(modules) >= len(gpu.MODULES)
    group.alive = 0
    make(Group())
    del backend
    gc.collect()
    assert kept() is None


def test_a_buffer_that_was_left_is_asked_no_more(capturing, caplog):
    """Its failure is logged once somebody catches up."""
    backend, asked = make(Group()), []
    capturing.return_value = False

    class Failed(Closed):
        def raise_if_failed(self):
            asked.append(self)

        def _unseen_failure(self):
            return ep.EPError("it went wrong")

    buffer = Failed(backend)
    failures.watch(buffer)
    del buffer, backend
    gc.collect()
    assert "it went wrong" not in caplog.text
    ep.raise_if_failed()
    gpu.run_deferred()
    assert not asked and caplog.text.count("no call has raised it: it went wrong") == 1


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_capture_whose_host_would_wait_is_refused_before_anything_is_launched(is_compiled):
    x, ids = [torch.ones(3, 4)], [torch.tensor([[0], [1], [1]])]

    def run(**settings):
        return ep.dispatch(x, ids, buffer=cluster, **settings).x

    with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:
        step = torch.compile(run, backend="aot_eager") if is_compiled else run
        expected, backend = step(), cluster._group.live_backend()
        with (
            mock.patch.object(backend, "host_knows_counts", False, create=True),
            mock.patch.object(backend, "is_capturing", return_value=True),
            mock.patch.object(backend, "launcher") as launcher,
            pytest.raises(ValueError, match="max_recv_tokens is None, must be given while a CUDA graph is captured"),
        ):
            step()
        assert not launcher.mock_calls
        assert torch.equal(step()[0], expected[0])


def test_nothing_outlives_a_buffer_that_no_graph_has_captured(capturing):
    capturing.return_value = False
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
    launch(backend, first)
    kept = weakref.ref(first)
    del first
    group.alive = 0
    launch(backend, second)
    gc.collect()
    assert kept() is None

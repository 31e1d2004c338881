"""The bindings between threads, over a group whose calls wait until set_open(True)."""

import importlib.util
import threading
import time
from collections.abc import Callable

import cpp
import pytest

from megatron_ep import _C


@pytest.fixture(scope="module")
def gated():
    library = cpp.build("binding_threads") / "binding_threads.so"
    spec = importlib.util.spec_from_file_location("binding_threads", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_two_threads_do_not_launch_at_once(gated) -> None:
    group, row = gated.Group(), _C.RowFormat(payload_bytes=16, scale_bytes=0, weight_bytes=0, topk=1, payload_type=0)
    settings = {"nvl_batch": 1, "rdma_chunk": 1, "stream": 0}
    counts = {"index_bytes": 4, "expert_alignment": 1, "expert_capacity": 0, "allows_repeats": False}
    calls = [
        lambda: group.notify([], topk=1, **counts, stream=0),
        lambda: group.dispatch([], row, **settings, again=False),
        lambda: group.fused_dispatch([], row, **settings, **counts),
        lambda: group.dispatch_ahead([], row, **settings, **counts),
        lambda: group.combine([], row, **settings, dtype=0),
        group.reset,
    ]
    for first in calls:
        gated.set_open(False)
        thread = threading.Thread(target=first)
        thread.start()
        wait_for(gated.is_reached)
        for second in calls:
            with pytest.raises(RuntimeError, match="the buffer is in use by another thread"):
                second()
        gated.set_open(True)
        thread.join()
    for call in calls:
        call()
    assert not gated.gave_up()


def test_a_wait_for_counts_calls_those_who_watch(gated) -> None:
    counts = {"index_bytes": 4, "expert_alignment": 1, "expert_capacity": 0, "allows_repeats": False}
    settings = {"topk": 1, **counts, "stream": 0}
    group = gated.Group()
    group.notify([], **settings)
    calls = []
    group.watch = lambda: calls.append(1)
    group.notify([], **settings)
    assert calls == [1]

    def give_up() -> None:
        raise TimeoutError("enough")

    group.watch = give_up
    with pytest.raises(TimeoutError, match="enough"):
        group.notify([], **settings)


def test_a_rank_has_no_tensors_of_other_names(gated) -> None:
    group, row = gated.Group(), _C.RowFormat(payload_bytes=16, scale_bytes=0, weight_bytes=0, topk=1, payload_type=0)
    for tensors, error in ({"rows": 1}, KeyError), ({"x": -1}, OverflowError), ({"x": "1"}, TypeError):
        with pytest.raises(error):
            group.combine([tensors], row, nvl_batch=1, rdma_chunk=1, dtype=0, stream=0)

"""The bindings between threads, over a launcher whose calls wait until set_open(True)."""

import functools
import importlib.util
import threading
import time
from collections.abc import Callable

import cpp
import pytest

from megatron_ep import _C
from megatron_ep.errors import BusyError


@pytest.fixture(scope="module")
def gated():
    library = cpp.build("launchless") / "launchless.so"
    spec = importlib.util.spec_from_file_location("launchless", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


HEAP = _C.Heap(nodes=1, ranks_per_node=1, num_experts=1, channels=1, nvl_ring_bytes=0, rdma_ring_bytes=0)
ROW = _C.RowFormat(payload_bytes=16, scale_bytes=0, weight_bytes=0, topk=1, payload_type=0)


def test_two_threads_do_not_launch_at_once(gated) -> None:
    launcher = gated.group(HEAP)
    dispatch, combine = launcher.prepare_dispatch(ROW, [{}]), launcher.prepare_combine(ROW, [{}])
    phases = ("notify", "dispatch", "dispatch_without_wait", "speculative_dispatch", "dispatch_retry")
    calls = [
        *(functools.partial(launcher.launch, dispatch, int(getattr(_C.Phase, phase)), 0, ()) for phase in phases),
        functools.partial(launcher.launch, combine, int(_C.Phase.combine), 0, ()),
        launcher.reset,
    ]
    for first in calls:
        gated.set_open(False)
        thread = threading.Thread(target=first)
        thread.start()
        wait_for(gated.is_reached)
        for second in calls:
            with pytest.raises(BusyError, match="the buffer is in use by another thread"):
                second()
        gated.set_open(True)
        thread.join()
    for call in calls:
        call()
    assert not gated.gave_up()


def test_a_wait_for_counts_calls_those_who_watch(gated) -> None:
    launcher = gated.group(HEAP)
    notify = functools.partial(launcher.launch, launcher.prepare_dispatch(ROW, [{}]), int(_C.Phase.notify), 0, ())
    notify()
    calls = []
    launcher.watch = lambda: calls.append(1)
    notify()
    assert calls == [1]

    def give_up() -> None:
        raise TimeoutError("enough")

    launcher.watch = give_up
    with pytest.raises(TimeoutError, match="enough"):
        notify()


def test_a_call_has_no_members_of_other_names(gated) -> None:
    launcher = gated.group(HEAP)
    for members, error in ({"rows": 1}, KeyError), ({"x": -1}, OverflowError), ({"x": "1"}, AttributeError):
        with pytest.raises(error):
            launcher.prepare_combine(ROW, [members])
    with pytest.raises(KeyError):
        launcher.prepare_combine(ROW, [{}], ["rows"])
    with pytest.raises(ValueError, match="1 ranks"):
        launcher.prepare_combine(ROW, [{}, {}])


def test_a_launch_takes_what_its_call_leaves_open(gated) -> None:
    launcher = gated.group(HEAP)
    launch = functools.partial(
        launcher.launch, launcher.prepare_combine(ROW, [{}], ["x", "y"]), int(_C.Phase.combine), 0
    )
    launch((1, 2))
    for given, error in (
        ((), ValueError),
        ((1, 2, 3), ValueError),
        ((1, -1), OverflowError),
        ((1, "x"), AttributeError),
        ([1, 2], TypeError),
    ):
        with pytest.raises(error):
            launch(given)
    with pytest.raises(RuntimeError, match="Call"):
        launcher.launch(1, 2, 3, ())

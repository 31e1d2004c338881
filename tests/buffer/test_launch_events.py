"""Launches inside which a library waits for ever end the waits of those who wait for them. Needs no GPU."""

import itertools
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import megatron_ep as ep
from megatron_ep.buffer import cuda, launch_events
from megatron_ep.buffer.launch_events import MAX_TIMEOUTS, LaunchEvents
from megatron_ep.fabrics import gpu
from megatron_ep.fabrics.connection import Connection

TIMEOUT = 0.05
DEVICE = torch.device("cuda", 0)


def launch(backend: cuda.CudaBackend, work=lambda stream: None) -> object:
    group = SimpleNamespace(launch=lambda call, phase, stream, given: work(stream))
    return backend.launch(group, None, 0, backend.current_stream(), ())


class Stream:
    """Events are reached one after the other, as far as it is told."""

    cuda_stream = 7

    def __init__(self):
        self.events: list[Event] = []
        self.reached = 0
        self.made = time.monotonic()

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None: ...


class Event:
    def __init__(self, enable_timing: bool = False):
        self.number = -1

    def record(self, stream: Stream) -> None:
        self.stream, self.number = stream, len(stream.events)
        stream.events.append(self)

    def query(self) -> bool:
        assert time.monotonic() - self.stream.made < 20, "nobody ends the wait"
        return self.number < self.stream.reached

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.number - self.number)


@pytest.fixture
def stream():
    stream = Stream()
    fakes = {
        "Event": Event,
        "current_stream": lambda device: stream,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **fakes),
        mock.patch("torch._C._cuda_getCurrentRawStream", lambda index: stream.cuda_stream, create=True),
        mock.patch.object(gpu, "_stuck", []),
    ):
        yield stream


def backend_of(timeout: float | None):
    group = SimpleNamespace(
        abort=mock.Mock(), aborted=lambda: None, graphs=lambda: 1, note_capture=lambda stream: None, listen=lambda: None
    )
    return cuda.CudaBackend(Connection(group, library_timeout=timeout), None, DEVICE, 4), group


def test_a_launch_that_does_not_end_is_told_to_those_who_wait(stream: Stream) -> None:
    backend, group = backend_of(TIMEOUT)
    launch(backend)
    stream.reached = 1  # it has begun
    started = time.monotonic()
    with pytest.raises(
        ep.EPStuckError, match=r"on the GPU for \d+\.\d s, though each of its own waits ends after 0\.05 s"
    ):
        backend.synchronize()
    assert MAX_TIMEOUTS * TIMEOUT < time.monotonic() - started < 5
    group.abort.assert_called_once_with(interrupted=False, failed=True, reason=mock.ANY)
    with pytest.raises(ep.EPError, match="an earlier launch of this process does not end"):
        gpu.check_not_stuck()
    waits = mock.Mock(side_effect=AssertionError("the next to wait is told at once"))
    with (
        mock.patch.object(
            cuda, "time", SimpleNamespace(perf_counter=time.perf_counter, monotonic=time.monotonic, sleep=waits)
        ),
        pytest.raises(ep.EPStuckError),
    ):
        backend.finish_launches()
    backend.close()  # does not retire what graphs may replay, which waits for the launch


def test_a_known_failure_ends_the_wait_for_what_follows_it(stream: Stream) -> None:
    """A reduction of gradients behind it on the stream waits for the rank that did not come."""
    backend, _ = backend_of(None)
    launch(backend)
    reports = itertools.chain([None] * 3, itertools.repeat(("timeout", 0)))
    backend.aborted = lambda: next(reports)
    backend.finish_launches()
    assert not any(event.query() for event in stream.events)


def test_what_waits_before_a_launch_is_not_its_time(stream: Stream) -> None:
    backend, group = backend_of(TIMEOUT)
    launch(backend)
    ends = itertools.chain([0] * 6, itertools.repeat(3))  # a kernel of somebody else, then all at once

    def sleep(seconds: float) -> None:
        time.sleep(TIMEOUT)
        stream.reached = next(ends)

    with mock.patch.object(cuda, "time", SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)):
        backend.synchronize()
    group.abort.assert_not_called()


def test_the_host_stays_close_to_the_gpu(stream: Stream) -> None:
    """A host that fills CUDA's queue could not be told to stop."""
    backend, group = backend_of(None)
    ended = 0
    max_ahead = 0

    def sleep(seconds: float) -> None:
        nonlocal ended
        ended += 1
        stream.reached = len([at for at in marked if at <= ended])

    marked: list[int] = []  # how many launches came before each event
    with mock.patch.object(cuda, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() * 1e3, sleep=sleep)):
        for launched in range(100):
            launch(backend)
            marked += [launched] * (len(stream.events) - len(marked))
            max_ahead = max(max_ahead, launched + 1 - ended)
    assert cuda.MAX_LAUNCHES_AHEAD // 2 < max_ahead <= cuda.MAX_LAUNCHES_AHEAD
    group.abort.assert_not_called()


def test_each_launch_has_its_own_time(stream: Stream, monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr(launch_events, "time", SimpleNamespace(monotonic=lambda: now))
    launches = LaunchEvents(TIMEOUT)
    for _ in range(4):
        with launches.record(stream):
            pass
    for reached in range(1, 9):  # of the next a start, or an end
        stream.reached = reached
        launches.check()
        now += 2 * TIMEOUT
        launches.check()
    assert launches.measured() == 0


def test_a_wait_for_counts_ends_too(stream: Stream) -> None:
    backend, group = backend_of(TIMEOUT)

    def notify(number: int) -> None:  # as the compiled group does
        stream.reached = 1
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            group.watch()
            time.sleep(1e-3)

    with pytest.raises(ep.EPStuckError):
        launch(backend, notify)
    group.abort.assert_called_once_with(interrupted=False, failed=True, reason=mock.ANY)


def test_counts_of_an_exchange_that_failed_stay_until_the_gpu_is_idle(stream: Stream) -> None:
    """A kernel that is queued behind others may begin when the host has given up, and writes to them."""
    empty = torch.empty

    def closed(*, is_taken: bool, resets: bool = False) -> int:
        """How often closing waits for the GPU, after an exchange of counts."""
        backend, group = backend_of(None)
        group.graphs, group.reset = lambda: 0, mock.Mock()
        with mock.patch.object(torch, "empty", lambda *size, pin_memory, **others: empty(*size, **others)):
            counts = backend.new_counts(4, wait=True)
            assert backend.new_counts(4, wait=True) is counts, "they stay with the buffer"
        if is_taken:
            counts.fill_(3)
            taken = backend.taken_counts(counts)
            counts.fill_(4)  # by the next exchange
            assert taken.tolist() == [[3] * 4] * 2
        if resets:
            backend.reset()
        with mock.patch.object(torch.cuda, "synchronize") as wait:
            backend.close()
        return wait.call_count

    assert closed(is_taken=True) == 0, "the host knows that they were written"
    assert closed(is_taken=False) == 1
    assert closed(is_taken=False, resets=True) == 0, "which has waited"


def test_a_replay_that_does_not_end_is_told_to_those_who_wait(stream: Stream) -> None:
    """Nothing records it, but the GPU counts the call as begun."""
    backend, group = backend_of(TIMEOUT)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        launch(backend)
    counts = dict.fromkeys(("notify", "transfer"), 4)
    statuses = [
        {"rank": rank, "entered": counts | {"transfer": 5 - rank}, "finished": counts, "incidents": [], "reason": ""}
        for rank in (0, 1)
    ]
    group.rank_statuses = mock.Mock(return_value=statuses)
    stream.record_event()  # of the replay
    started = time.monotonic()
    with pytest.raises(ep.EPStuckError, match=r"^call 5 has been on the GPU for .* and nothing can end it; this"):
        backend.finish_launches()
    assert MAX_TIMEOUTS * TIMEOUT < time.monotonic() - started < 5
    group.abort.assert_called_once_with(interrupted=False, failed=True, reason=mock.ANY)
    group.rank_statuses.reset_mock()
    with pytest.raises(ep.EPStuckError, match="call 5"):
        backend.finish_launches()
    assert group.rank_statuses.call_count == 1, "the next to wait is told at once"


def test_replays_that_go_on_are_not_stuck(stream: Stream) -> None:
    launches = LaunchEvents(TIMEOUT, lambda: next(calls))
    launches.are_captured = True
    calls = itertools.chain.from_iterable([(f"call {n}", False)] * 10 + [None] for n in range(4))
    now = itertools.count(step=TIMEOUT / 9)  # a look each
    with mock.patch.object(launch_events, "time", SimpleNamespace(monotonic=lambda: next(now))):
        for _ in range(44):
            launches.check()
        calls = itertools.repeat(("call 5", True))  # given up: its kernel may have ended, what is behind it has not
        with pytest.raises(ep.EPStuckError, match=r"or other work behind it does not end; this process has to end$"):
            for _ in range(100):
                launches.check()


def test_the_end_of_all_replays_is_waited_for_with_a_bound(stream: Stream) -> None:
    backend, group = backend_of(TIMEOUT)
    backend._launches.are_captured = True
    counts = dict.fromkeys(("notify", "transfer"), 0)
    group.rank_statuses = lambda: [
        {"rank": 0, "entered": counts | {"notify": 1}, "finished": counts, "incidents": [], "reason": ""}
    ]
    with (
        mock.patch.object(torch.cuda, "synchronize", lambda device: time.sleep(5)),
        pytest.raises(ep.EPStuckError, match=r"^notify 1 has been on the GPU"),
    ):
        backend.synchronize()


def test_without_a_library_nothing_is_watched(stream: Stream) -> None:
    backend, group = backend_of(None)
    assert not hasattr(group, "watch")
    launch(backend)
    assert stream.events == []
    assert backend.seconds == 0  # from now on launches are measured
    launch(backend)
    launch(backend)
    stream.reached = 3
    assert backend.seconds == 1
    stream.reached = 4
    assert backend.seconds == 2


def test_a_group_that_is_stuck_is_never_destroyed() -> None:
    script = (
        "from megatron_ep.fabrics import gpu\n"
        "class Group:\n"
        "    def __del__(self): print('destroyed', flush=True)\n"
        "usual, stuck = Group(), Group()\n"
        "gpu.keep_for_ever(stuck); gpu.keep_for_ever(stuck)\n"
        "del usual, stuck\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "destroyed\n"

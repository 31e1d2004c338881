"""What a call that was given up leaves behind, and who is told of it: nothing of it can be taken for data."""

import functools
import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest import mock

import pytest
import torch
from cases import drawn
from host_backends import LateBackend, with_backend

import megatron_ep as ep
from megatron_ep import float8

pytestmark = pytest.mark.usefixtures("no_other_buffers")

E, T, H, K = 4, 6, 256, 2
# With these rings every row takes a signal of its own, and so does its credit.
CONFIG = ep.Config(num_experts=E, tuning=ep.Tuning(nvl_ring_bytes=2 << 10, rdma_ring_bytes=2 << 10))


def inputs():
    return drawn([T] * 2, E, K, H)


@functools.cache
def lost_in(*steps):
    """The first network signal whose loss lets the last of these steps fail, and those before it succeed.

    A step gets the cluster and what the one before it returned."""
    for lost in range(1, 1000):
        cluster, result = ep.LocalCluster(2, 1, CONFIG, seed=0, lost_signal=lost), None
        done = 0
        try:
            for step in steps:
                result = step(cluster, result)
                done += 1
        except ep.EPError:
            if done == len(steps) - 1:
                return lost
    raise AssertionError("no signal is missed")


def made_in(failing):
    """What torch.empty makes in a call that times out: all of it, and of that what holds numbers."""
    tensors, empty = [], torch.empty

    def kept(*args, **kwargs):
        tensors.append(empty(*args, **kwargs))
        return tensors[-1]

    with mock.patch("torch.empty", kept), pytest.raises(ep.EPTimeoutError):
        failing()
    return tensors, [tensor for tensor in tensors if tensor.dtype.is_floating_point and tensor.numel()]


def dispatch(cluster, _):
    x, ids, weights = inputs()
    for part in (*x, *weights):
        part.requires_grad_()
    return ep.dispatch(x, ids, weights, buffer=cluster)


def dispatch_float8(cluster, _):
    x, ids, weights = inputs()
    values, scales = zip(*(float8.quantize(part) for part in x), strict=True)
    return ep.dispatch(list(values), ids, weights, buffer=cluster, scales=list(scales))


def combine(_, rows):
    return ep.combine(rows.x, rows.handle, rows.probs)


def backward(_, y):
    sum(part.sum() for part in y).backward()


def send(cluster, _):
    """By a new low-latency mode."""
    mode = ep.LowLatency(cluster, max_tokens=T, hidden=H, topk=K, dtype=torch.float32)
    return mode, mode.dispatch(*inputs())


def bring_back(_, sent):
    mode, received = sent
    return mode.combine([torch.nan_to_num(x) for x in received.x], received.handle)


# Of the last of these steps: the signal that is lost, None for the first that it misses; and its outputs on both ranks:
# rows, weights and scales, or sums.
GIVEN_UP = [
    ([dispatch], 3, 4),  # after the counts
    ([dispatch_float8], 3, 6),
    ([dispatch, combine], None, 2),
    ([send], None, 4),
    ([send, bring_back], None, 2),
]


@pytest.mark.parametrize(("steps", "lost", "count"), GIVEN_UP)
def test_a_call_that_was_given_up_leaves_no_data(steps, lost, count):
    cluster, result = ep.LocalCluster(2, 1, CONFIG, seed=0, lost_signal=lost or lost_in(*steps)), None
    for step in steps[:-1]:
        result = step(cluster, result)
    tensors, outputs = made_in(lambda: steps[-1](cluster, result))
    assert len(outputs) == count and all(tensor.float().isnan().all() for tensor in outputs)
    if steps[0] is send:
        numbers = 4  # of calls, behind a layout
        layouts = [tensor[:-numbers] for tensor in tensors if tensor.dtype == torch.int32]
        assert len(layouts) == (2 if steps == [send] else 0) and all((tensor == -1).all() for tensor in layouts)


def test_counts_that_never_came_are_no_counts():
    cluster = ep.LocalCluster(2, 1, CONFIG, seed=0, lost_signal=1)
    tensors, _ = made_in(lambda: dispatch(cluster, None))
    counts = [tensor for tensor in tensors if tensor.dtype == torch.int64]
    assert len(counts) == 2 and any((tensor == -1).all() for tensor in counts)


@pytest.fixture
def stalled():
    """A cluster as late as a GPU that loses a signal in the backward pass; the leaves of the graph, and its end."""
    lost = lost_in(dispatch, combine, backward)
    with with_backend(LateBackend):
        cluster = ep.LocalCluster(2, 1, CONFIG, seed=0, lost_signal=lost)
    x, ids, weights = inputs()
    leaves = [part.requires_grad_() for part in (*x, *weights)]
    rows = ep.dispatch(x, ids, weights, buffer=cluster)
    loss = sum(part.sum() for part in combine(cluster, rows))
    assert loss.isfinite()
    return cluster, leaves, loss


def test_a_failure_in_the_backward_pass_reaches_no_step(stalled):
    cluster, leaves, loss = stalled
    before = [leaf.detach().clone() for leaf in leaves]
    optimizer = torch.optim.AdamW(leaves)
    loss.backward()  # returns
    with pytest.raises(
        ep.EPTimeoutError, match=r"timed out first(.|\n)*in the backward pass of combine, call 2: does the"
    ):
        ep.raise_if_failed()
        optimizer.step()
    assert all(map(torch.equal, leaves, before))
    with pytest.raises(ep.EPTimeoutError):
        ep.raise_if_failed()  # until somebody resets
    cluster.reset()
    ep.raise_if_failed()
    for leaf in leaves:
        assert leaf.grad.isnan().all(), "a caller that does not ask gets no number either"
    cluster.close()


def test_closing_tells_of_a_failure_that_nobody_has_seen(stalled):
    cluster, _, loss = stalled
    loss.backward()
    with pytest.raises(ep.EPTimeoutError, match="timed out first"):
        cluster.close()
    assert not cluster.is_open
    cluster.close()
    ep.raise_if_failed()


def test_closing_is_silent_once_somebody_was_told(stalled):
    cluster, _, loss = stalled
    loss.backward()
    with pytest.raises(ep.EPTimeoutError):
        cluster.synchronize()
    cluster.close()


def test_another_error_is_not_hidden_by_the_failure(stalled, caplog):
    cluster, _, loss = stalled
    with pytest.raises(ZeroDivisionError), cluster:
        loss.backward()
        _ = 1 / 0
    assert "timed out first" in caplog.text and caplog.records[0].levelno == logging.ERROR
    assert not cluster.is_open


EXIT = """
    import gc, sys
    sys.path[:0] = {paths!r}
    import test_failures as t
    from host_backends import LateBackend, with_backend
    def failed():
        with with_backend(LateBackend):
            cluster = t.ep.LocalCluster(2, 1, t.CONFIG, seed=0, lost_signal={lost})
        t.backward(cluster, t.combine(cluster, t.dispatch(cluster, None)))
        return cluster
    failed()
    gc.collect()
    print("COLLECTED", file=sys.stderr)
    cluster = failed()
"""


def test_a_collected_buffer_and_the_end_of_the_process_tell():
    here = Path(__file__).parent
    paths, lost = [str(here), str(here.parent / "helpers")], lost_in(dispatch, combine, backward)
    script = textwrap.dedent(EXIT).format(paths=paths, lost=lost)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for text in done.stderr.split("COLLECTED"):
        assert text.count("timed out first") == 1 and "no call has raised it" in text, done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_only_heard_of_it_is_told_too():
    """Nothing of this rank failed: another one gave up in a call that this one had no part in."""
    with ep.LocalCluster(1, 2, ep.Config(num_experts=E)) as cluster:
        dispatch(cluster, None)
        cluster._group._backend.abort(interrupted=False, failed=True)
        with pytest.raises(ep.EPAbortError, match="rank 0 failed for a reason of its own"):
            ep.raise_if_failed()
        cluster.reset()
        dispatch(cluster, None)
        ep.raise_if_failed()


def test_the_handle_of_a_low_latency_dispatch_that_was_given_up_stays_useless():
    lost = lost_in(send)
    with with_backend(LateBackend):
        cluster = ep.LocalCluster(2, 1, CONFIG, seed=0, lost_signal=lost)
    mode, received = send(cluster, None)  # returns, as on a GPU
    with pytest.raises(ep.EPTimeoutError):
        ep.raise_if_failed()
    cluster.reset()
    good = mode.dispatch(*inputs())
    cluster.reset()
    rows = [torch.nan_to_num(x) for x in good.x]
    with pytest.raises(ValueError, match="handle is of a dispatch that was given up"):
        mode.combine(rows, received.handle)
    assert all(y.isfinite().all() for y in mode.combine(rows, good.handle))

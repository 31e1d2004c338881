"""Buffers between processes: shared memory, and what happens when a rank misbehaves."""

import re
import threading
import time
from unittest import mock

import pytest
import shared_memory
import torch
import torch.distributed as dist
from modes import HOST, Normal, W
from run_on import run_on
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from waits import within

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.buffer.host import HostBackend
from megatron_ep.errors import BusyError
from megatron_ep.meeting.nodes import VARIABLE


def calls_of(lines, nodes=2, **settings):
    """By lines all ranks are in one node."""
    calls = Normal(HOST, 1, max_tokens=64, **settings) if lines else Normal(HOST, nodes, **settings)
    assert (calls.buffer._group.one_hop is not None) == lines
    return calls


@run_on("ranks")
def test_the_others_hear_that_a_rank_was_interrupted(lines):
    """Ctrl-C on rank 2 in the middle of a call, where nothing waits."""
    calls = calls_of(lines)
    buffer, (x, ids, weights) = calls.buffer, calls.own()
    if buffer.rank == 2:
        with pytest.raises(KeyboardInterrupt), buffer._group.abort_peers_on_error():
            raise KeyboardInterrupt
    else:
        with pytest.raises(ep.EPAbortError, match="rank 2 was interrupted"):
            ep.dispatch(x, ids, weights, buffer=buffer)
    calls.is_usable_again()


@run_on("ranks")
def test_who_waits_for_a_rank_that_closes_its_buffer_is_told(lines):
    calls = calls_of(lines)
    buffer, (x, ids, weights) = calls.buffer, calls.own()

    def others_wait():
        statuses = buffer._group.live_backend().rank_statuses()
        return all(status.inside for status in statuses if status.rank != buffer.rank)

    if buffer.rank == 2:
        assert within(20, others_wait)
        buffer.close()
    else:
        lacks = r"rank 2 has not entered (call|notify) 1 \(it finished 0\); the process of rank 2 has closed its buffer"
        with pytest.raises(ep.EPAbortError, match=rf"^rank \d stopped waiting: {lacks}"):
            ep.dispatch(x, ids, weights, buffer=buffer)


@run_on("ranks")
def test_checkpointed(lines):
    """What the backward pass computes again is not told to anyone as a failure."""
    calls = calls_of(lines)
    buffer, (x, ids, weights) = calls.buffer, calls.own()
    gradient = x + 1

    def moe(x, weights):
        rows = ep.dispatch(x, ids, weights, buffer=buffer)
        return ep.combine(torch.relu(rows.x), rows.handle, weights=rows.probs)

    results = []
    for reentrant in (None, False, True):
        leaves = [t.clone().requires_grad_() for t in (x, weights)]
        y = moe(*leaves) if reentrant is None else checkpoint(moe, *leaves, use_reentrant=reentrant)
        y.backward(gradient)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    buffer.close()


@run_on("ranks")
def test_a_backward_pass_that_fails_on_one_rank_reaches_the_others():
    """Where rank 2 unpacks what combine has saved, as a checkpoint does that computes it again."""
    calls = Normal(HOST, timeout=60)
    buffer, (x, ids, weights) = calls.buffer, calls.own()

    def unpack(tensor):
        if buffer.rank == 2:
            raise RuntimeError("out of luck")
        return tensor

    rows = ep.dispatch(x.requires_grad_(), ids, weights, buffer=buffer)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = ep.combine(rows.x, rows.handle, rows.probs)
    dist.barrier()  # or the failure finds a slow rank in that call
    kind, started = RuntimeError if buffer.rank == 2 else ep.EPAbortError, time.monotonic()
    with pytest.raises(kind, match="out of luck"):
        y.sum().backward()
    assert time.monotonic() - started < 30, "the others waited for rank 2"
    calls.is_usable_again()


@pytest.mark.parametrize("kind", ["number", "handle", "memory"])
@run_on("ranks")
def test_any_failure_of_one_rank_reaches_all(kind):
    """Rank 2's mistake is not a wrong tensor; the others must hear of it all the same."""
    calls = Normal(HOST, timeout=60)
    buffer, (x, ids, weights) = calls.buffer, calls.own()
    wrong = buffer.rank == 2
    options = {"expert_capacity": 2**40} if kind == "number" else {}
    handle = "handle" if kind == "handle" else None
    if kind == "memory" and wrong:
        buffer._group.heap = None  # any error inside the library
    started = time.monotonic()
    with pytest.raises((ValueError, AttributeError) if wrong else ep.EPAbortError):
        if wrong and handle:
            ep.dispatch(x, handle=handle, buffer=buffer)
        ep.dispatch(x, ids, weights, buffer=buffer, **(options if wrong else {}))
    assert time.monotonic() - started < 30


def run_bad_construction():
    rank = torch.distributed.get_rank()
    with pytest.raises(ValueError, match="must be equal"):
        ep.Buffer(None, ep.Config(num_experts=8 if rank else 16, timeout=30))
    with pytest.raises(ValueError, match="must have the 4 ranks of the group"):
        ep.Buffer(None, ep.Config(num_experts=8, timeout=30), ep.Topology(3, 2))
    with pytest.raises(ValueError, match="must be a multiple of the 4 ranks"):
        ep.Buffer(None, ep.Config(num_experts=6, timeout=30))
    with pytest.raises(ep.EPError, match="could not set up the buffer: reserving"):
        ep.Buffer(
            None, ep.Config(num_experts=8, timeout=30, tuning=ep.Tuning(channels=1 << 12, nvl_ring_bytes=1 << 32))
        )
    with pytest.raises((ValueError, ep.EPError), match=r"topology is .*, must be a megatron_ep.Topology"):
        ep.Buffer(None, ep.Config(num_experts=8), (2, 2) if rank == 1 else None)
    outside = dist.GroupMember.NON_GROUP_MEMBER  # what torch returns to ranks that are not in a new group
    for group, name in ((outside, "-100"), (init_device_mesh("cpu", (W,)), "DeviceMesh.*")):
        with pytest.raises(ValueError, match=rf"^group is {name}, must be a process group that this rank belongs to$"):
            ep.Buffer(group, ep.Config(num_experts=8))


def test_bad_construction_is_the_same_error_everywhere(ranks):
    before = shared_memory.names()
    ranks.run(run_bad_construction)
    assert within(10, lambda: shared_memory.names() <= before), shared_memory.names() - before


@run_on("ranks")
def test_topology_of_the_environment():
    rank = dist.get_rank()
    with ep.Buffer(None, ep.Config(num_experts=8)) as buffer:
        assert buffer.topology == ep.Topology(1, W), "one machine is one node"
    with mock.patch.dict("os.environ", {VARIABLE: "2"}):
        with ep.Buffer(None, ep.Config(num_experts=8)) as buffer:
            assert buffer.topology == ep.Topology(2, 2)
        with Normal(HOST, nodes=4).buffer as buffer:
            assert buffer.topology == ep.Topology(4, 1), "what the caller gives stands"
    for values, says in (
        (["3"] * W, "is '3', must be a divisor of the 4 ranks"),
        (["2", "2", "4", "2"], "is '2' on rank 0 and '4' on rank 2, must be equal"),
    ):
        refused = pytest.raises(ValueError, match=f"environment variable {VARIABLE} {says}")
        with mock.patch.dict("os.environ", {VARIABLE: values[rank]}), refused:
            ep.Buffer(None, ep.Config(num_experts=8))


@run_on("ranks")
def test_different_settings():
    """What differs is told on all ranks alike, before anything is set up."""
    with pytest.raises(ValueError, match=r"^Tuning.channels is 1 on rank 0 and 2 on rank 3, must be equal$"):
        ep.Buffer(None, ep.Config(num_experts=8, tuning=ep.Tuning(channels=1 + dist.get_rank() // 3)))


@run_on("ranks")
def test_a_set_up_is_logged_once_and_takes_no_collective():
    """What rank 0 logs, how often the ranks talked, and whether the group had a collective."""
    before = dist.group.WORLD._get_sequence_number_for_group()
    with (
        mock.patch("megatron_ep.buffer.rank_group.set_up_log.info") as info,
        Normal(HOST, tuning=ep.Tuning(channels=3)).buffer as buffer,
    ):
        buffer.reset()
        exchanges = buffer._group._rendezvous.exchanges
    assert dist.group.WORLD._get_sequence_number_for_group() == before
    assert exchanges == 3 + 2  # a reset takes two
    said = r"4 ranks, 2 nodes x 2; fabric: shared memory \(host backend\); 3 channels, \d+\.\d MiB of heap a rank; "
    said = [rf"{said}a wait ends after {HOST.timeout:g} s"] if dist.get_rank() == 0 else []
    logged = [call.args[0] % call.args[1:] for call in info.mock_calls]
    assert len(logged) == len(said) and all(map(re.fullmatch, said, logged)), logged


REFUSED_BY_A_CALL = {
    "reset": (ep.EPError, r"^rank 1 could not .*: the buffer is in use by another thread$"),
    "release": (ValueError, "^rank 1 cannot release the buffer: a call is under way in another thread$"),
}


@pytest.mark.parametrize("what", REFUSED_BY_A_CALL)
@run_on("ranks")
def test_a_call_in_another_thread_refuses_for_all(what):
    """Rank 1 has a thread in a dispatch, which must find what the others send although all have asked for a reset, or
    to give the memory back."""
    kind, says = REFUSED_BY_A_CALL[what]
    calls = Normal(HOST, timeout=60)
    buffer, rank, received, own = calls.buffer, calls.rank, [], calls.own()
    call = threading.Thread(target=lambda: received.append(calls.dispatch(*own)))
    if rank == 1:
        call.start()
        assert within(20, lambda: buffer._group.live_backend().rank_statuses()[1].inside)
        with pytest.raises(BusyError, match=r"^the buffer is in use by another thread$"):
            calls.dispatch(*own)  # it ends no call of another thread
    dist.barrier()
    started = time.monotonic()
    with pytest.raises(kind, match=says):
        getattr(buffer, what)()
    assert time.monotonic() - started < 30, "the others waited for rank 1"
    if rank != 1:
        call.start()
    call.join()
    assert torch.equal(received[0].x, reference.dispatch(*calls.inputs(2), 8)[0][rank])
    calls.is_usable_again()


@run_on("ranks")
def test_ranks_in_different_collective_calls():
    """Odd ranks reset the buffer where the others create a low-latency mode."""
    calls = Normal(HOST)
    buffer, sizes, is_odd = calls.buffer, {"max_tokens": 64, "hidden": 8, "topk": 2}, calls.rank % 2
    reset, set_up = r"step \d+ of the buffer's reset", r"step \d+ of the low-latency mode's set-up"
    other, own = (set_up, reset) if is_odd else (reset, set_up)
    with pytest.raises(ep.EPError, match=rf"^rank \d came to {other}, rank {calls.rank} to {own}: all ranks must make"):
        buffer.reset() if is_odd else ep.LowLatency(buffer, **sizes)
    buffer.reset()
    named = r"topk is 0, must be" if calls.rank == 1 else "rank 1 could not set up the low-latency mode: .*topk is 0"
    with pytest.raises((ValueError, ep.EPError), match=named):
        ep.LowLatency(buffer, **sizes | {"topk": 0 if calls.rank == 1 else 2})
    calls.is_usable_again()


@run_on("ranks")
def test_a_reset_that_fails_on_one_rank_fails_on_all():
    """Rank 2's memory cannot be cleared."""
    calls = Normal(HOST)
    buffer, (x, ids, weights) = calls.buffer, calls.own()
    rows = ep.dispatch(x, ids, weights, buffer=buffer)  # the same calls again are made without checks
    ep.combine(rows.x, rows.handle)
    mode = ep.LowLatency(buffer, max_tokens=64, hidden=x.shape[1], topk=ids.shape[1], dtype=x.dtype)
    sent = mode.dispatch(x, ids)
    mode.combine(sent.x, sent.handle)
    fails = mock.Mock(side_effect=RuntimeError("out of luck"))
    started = time.monotonic()
    with (
        mock.patch.object(HostBackend, "reset", fails if buffer.rank == 2 else HostBackend.reset),
        pytest.raises(ep.EPError, match=r"^rank 2 could not .*out of luck$"),
    ):
        buffer.reset()
    assert time.monotonic() - started < 30, "the others waited for rank 2"
    says = r"^the last reset failed: rank 2 could not .*out of luck; every rank must call buffer.reset\(\)"
    again = [
        lambda: ep.dispatch(x, ids, weights, buffer=buffer),
        lambda: ep.combine(rows.x, rows.handle),
        lambda: mode.dispatch(x, ids),
    ]
    for call in again:
        with pytest.raises(ep.EPAbortError, match=says):
            call()
    calls.is_usable_again()

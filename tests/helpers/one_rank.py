"""What all ranks run when one of them stays away or makes a mistake, in either mode and wherever they are."""

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from modes import EXPERTS, HOST, MODES, Calls, LowLatency, Place
from waits import within

import megatron_ep as ep
from megatron_ep.errors import describe


def run_topology(mode: str, place: Place, nodes: int) -> None:
    for settings in ({}, small_rings(mode, place)):
        calls = MODES[mode](place, nodes, 10.0, **settings)
        with calls.buffer:
            calls.round_trips()


def small_rings(mode: str, place: Place) -> dict[str, ep.Tuning]:
    return {"tuning": place.small_rings()} if mode == "normal" else {}


def compiled(calls: Calls) -> Callable[..., torch.Tensor]:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        made = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        dist.barrier()  # or those who have compiled wait in the call for those who have not
        return made

    def there_and_back(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = ep.dispatch(x, ids, weights, buffer=calls.buffer)
        return ep.combine(rows.x, rows.handle)

    return torch.compile(there_and_back, backend=backend)


def run_one_absent(mode: str, place: Place, phase: str, nodes: int) -> str:
    """The last rank does not call. What the others hear."""
    calls = MODES[mode](place, nodes, **small_rings(mode, place))
    is_last = calls.rank == calls.world - 1
    x, ids, weights = calls.own()
    received = y = None
    if "backward" in phase:
        there_and_back = compiled(calls) if "compiled" in phase else lambda *own: calls.combine(calls.dispatch(*own))
        y = there_and_back(x.requires_grad_(), ids, weights)
    elif phase == "combine":
        received = calls.dispatch(x, ids, weights)
    calls.buffer.synchronize()
    dist.barrier()
    message, started = "", time.monotonic()
    if not is_last:
        with pytest.raises(ep.EPTimeoutError) as caught:
            for _ in range(3):  # one may need nothing of that rank before it needs its memory
                if y is not None:
                    y.sum().backward()
                elif received is not None:
                    calls.combine(received)
                else:
                    calls.dispatch(x, ids, weights)
                calls.buffer.synchronize()
        if place == HOST:
            assert place.timeout / 2 < time.monotonic() - started < 4 * place.timeout
        assert caught.value.incidents, "a rank that waited says for what"
        message = "\n".join([str(caught.value), *map(describe, caught.value.incidents)])
    dist.barrier()  # until then the last rank stays away
    calls.is_usable_again()
    return message


def run_one_mistake(mode: str, place: Place, kind: str, nodes: int) -> None:
    """Rank 2 gives a wrong argument. Who is still in the call before may be stopped there."""
    calls = MODES[mode](place, nodes, 30.0)
    x, ids, weights = calls.own()
    wrong = calls.rank == 2
    if wrong and kind == "dtype":
        x = x.int()
    if wrong and kind == "ids":
        ids = ids + 8
    started = time.monotonic()
    refused = None if wrong else "rank 2 refused its arguments"
    with pytest.raises(ValueError if wrong else ep.EPAbortError, match=refused):
        received = calls.dispatch(x, ids, weights)
        if kind == "combine":
            received.x = received.x[:-1] if wrong else received.x
            calls.combine(received)
        calls.dispatch(x, ids, weights)  # ranks that needed nothing of rank 2 so far hear of it now
        calls.buffer.synchronize()
    assert time.monotonic() - started < 20, "the others waited until they timed out"
    if place == HOST:
        with pytest.raises(ep.EPAbortError, match="reset"):
            calls.dispatch(*calls.own())
    calls.is_usable_again()


def run_no_memory_in_backward(mode: str, place: Place, kind: str) -> None:
    """Rank 2 cannot have what the backward pass of a dispatch or a combine, perhaps with weights, returns."""
    calls = MODES[mode](place, timeout=60.0)
    x, ids, weights = calls.own()
    received = calls.dispatch(x.requires_grad_(), ids, weights)
    result = received.x
    if kind != "dispatch":
        received.x = received.x.detach().requires_grad_()
        factors = weights if mode == "low latency" else received.probs
        result = calls.combine(received, factors.detach().requires_grad_() if kind == "weighted" else None)
    dist.barrier()  # or a rank may still be in the call before
    started = time.monotonic()
    if calls.rank == 2:
        lack = mock.patch("megatron_ep.buffer.host.HostBackend.new_output", side_effect=torch.OutOfMemoryError)
        with pytest.raises(torch.OutOfMemoryError), lack:
            result.sum().backward()
    else:
        with pytest.raises(ep.EPAbortError, match="rank 2 failed for a reason of its own"):
            result.sum().backward()
            calls.dispatch(x, ids, weights)  # ranks that needed nothing of rank 2 hear of it now
    assert time.monotonic() - started < 30, "the others waited until they timed out"
    calls.is_usable_again()


def masking(place: Place, nodes: int, mask_s: float) -> LowLatency:
    """Dead ranks are masked. A GPU has loaded its kernels, which takes longer than a rank is waited for."""
    calls = LowLatency(place, nodes, 30.0, on_dead_rank="mask", mask_timeout=mask_s)
    for _ in range(2):
        dist.barrier()
        calls.round_trips()
    dist.barrier()
    return calls


def run_one_masked(place: Place, nodes: int, mask_s: float) -> float:
    """The last rank is late: the others go on without it, and it ends; a reset brings it back. Seconds that calls
    took."""
    calls = masking(place, nodes, mask_s)
    last = calls.world - 1
    without = torch.ones(calls.world, calls.world, dtype=torch.int32)
    without[last, :last] = without[:last, last] = 0
    if calls.rank == last:
        dist.barrier()
    started = time.monotonic()
    if calls.rank == last:
        for _ in range(2):
            with pytest.raises(ep.EPMaskedError, match=f"rank {last} came too late"):
                calls.combine(calls.dispatch(*calls.own()))
                calls.buffer.synchronize()
        assert calls.mode.masked_ranks() == []
    else:
        calls.round_trips(without)
        assert calls.mode.active_ranks.tolist() == without[calls.rank].tolist()
        assert calls.mode.masked_ranks() == [last]
    took = time.monotonic() - started
    if calls.rank != last:
        dist.barrier()
    calls.is_usable_again()
    return took


def run_one_masked_in_backward(place: Place, nodes: int, mask_s: float) -> str:
    """Rank 1 stays away from the backward pass, which is an error on whatever rank. What the others hear."""
    calls = masking(place, nodes, mask_s)
    x, *others = calls.own()
    y = calls.combine(calls.dispatch(x.requires_grad_(), *others))
    calls.buffer.synchronize()
    message = ""
    if calls.rank != 1:
        with pytest.raises(ep.EPError) as caught:
            y.sum().backward()
            calls.buffer.synchronize()
        message = str(caught.value)
    calls.is_usable_again()
    return message


def run_mistake_and_reset(mode: str, place: Place, nodes: int) -> None:
    """Rank 2 gives a wrong argument and resets at once, before the others come to that call."""
    calls = MODES[mode](place, nodes, 20.0)
    x, ids, weights = calls.own()
    dist.barrier()
    started = time.monotonic()
    if calls.rank == 2:
        with pytest.raises(ValueError, match="must"):
            calls.dispatch(x.int(), ids, weights)
    else:
        time.sleep(0.5)
        with pytest.raises(ep.EPAbortError, match="rank 2 refused its arguments"):
            for _ in range(2):  # ranks that needed nothing of rank 2 so far hear of it in the second
                calls.dispatch(x, ids, weights)
    calls.is_usable_again()
    assert time.monotonic() - started < 10, "the others waited until they timed out"


def run_mistake_after_a_late_call(mode: str, place: Place, nodes: int) -> None:
    """Rank 0 is late in a combine, for which everything is there, when the others have refused the next call and wait
    in a reset, as rank 0 does after its own error: no rank is a call apart from the others then."""
    calls = MODES[mode](place, nodes, 20.0)
    x, ids, weights = calls.own(topk=1)
    ids = ids % (EXPERTS // calls.world) + calls.rank * (EXPERTS // calls.world)  # each rank keeps its tokens
    received = calls.dispatch(x, ids, weights)
    dist.barrier()
    if calls.rank == 0:
        time.sleep(1.0)
    calls.combine(received)
    with pytest.raises(ValueError, match="must"):
        calls.dispatch(x, ids[:, 0], weights)
    calls.is_usable_again()


def run_mistake_of_all(mode: str, place: Place, nodes: int) -> None:
    """All ranks refuse the same call, one after the other and for different reasons, so that none waits for it."""
    calls = MODES[mode](place, nodes, 20.0)
    x, ids, weights = calls.own()
    with calls.buffer:
        for last in range(3):
            time.sleep(0.4 * (calls.rank == last))
            with pytest.raises(ValueError, match="must"):
                if calls.rank % 2:
                    calls.dispatch(x.int(), ids, weights)
                else:
                    calls.dispatch(x, ids + 8, weights)
            if last:  # otherwise the ranks close, or refuse another call, before all have refused this one
                calls.round_trips()


def run_mistake_and_close(mode: str, place: Place, nodes: int) -> None:
    """Rank 2 refuses a call and closes its buffer before the others come to that call."""
    calls = MODES[mode](place, nodes, 20.0)
    x, ids, weights = calls.own()
    if calls.rank == 2:
        with pytest.raises(ValueError, match="x is torch"), calls.buffer:
            calls.dispatch(x.int(), ids, weights)
    else:
        time.sleep(0.5)
        with pytest.raises(ep.EPAbortError, match="rank 2 refused its arguments: x is torch"):
            calls.dispatch(x, ids, weights)
        calls.buffer.close()


def run_mistake_of_another_thread(mode: str, place: Place, nodes: int) -> None:
    """While rank 0 waits in a call, another thread of it gives a wrong argument."""
    calls = MODES[mode](place, nodes, 20.0)
    calls.round_trips()
    x, ids, weights = calls.own()
    backend, errors = calls.buffer._group.live_backend(), list[Exception]()

    def err() -> None:
        assert within(10, lambda: backend.rank_statuses()[0].inside)
        try:
            calls.dispatch(x.int(), ids, weights)
        except Exception as error:
            errors.append(error)
        dist.barrier()

    thread = threading.Thread(target=err)
    if calls.rank == 0:
        thread.start()
    else:
        dist.barrier()
    calls.dispatch(x, ids, weights)
    if calls.rank == 0:
        thread.join()
        assert [type(error) for error in errors] == [ValueError], errors
    calls.round_trips()
    calls.buffer.close()

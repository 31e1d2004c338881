"""What ranks know of each other in a buffer with several low-latency heaps, each of which numbers its calls for itself:
that of one hop and those of two modes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from modes import EXPERTS, W
from run_on import run_on

import megatron_ep as ep
from megatron_ep.diagnosis.blame import ENDED

HEAPS = ("one hop", "first mode", "second mode")
BEFORE = 3  # calls in one heap before those in another
SOON_S = 20.0  # of the timeout of 60 s, on a busy machine
X, IDS = torch.ones(4, 16), torch.arange(8).view(4, 2)


class Heaps:
    """A buffer of all ranks with these heaps, and a dispatch in each."""

    def __init__(self) -> None:
        self.buffer = ep.Buffer(None, ep.Config(num_experts=EXPERTS, timeout=60, max_tokens=len(X)))
        sizes = {"max_tokens": len(X), "hidden": X.shape[1], "topk": IDS.shape[1], "dtype": X.dtype}
        self.modes = {name: ep.LowLatency(self.buffer, **sizes) for name in HEAPS[1:]}
        self.rank = self.buffer.rank

    def dispatch(self, heap: str, x: torch.Tensor = X) -> None:
        if heap in self.modes:
            self.modes[heap].dispatch(x, IDS)
        else:
            ep.dispatch(x, IDS, buffer=self.buffer)

    def others_hear(self, heap: str, says: str, event: Callable[[], object] = lambda: None) -> None:
        """Rank 2 has this happen to it instead of a call, in which the others hear of it."""
        dist.barrier()
        started = time.monotonic()
        if self.rank == 2:
            event()
        else:
            with pytest.raises(ep.EPAbortError, match=says):
                self.dispatch(heap)
            assert time.monotonic() - started < SOON_S, "the others waited"
        dist.barrier()


def refuse(heaps: Heaps, heap: str) -> None:
    with pytest.raises(ValueError, match=r"^x has shape \(4, 0\)"):
        heaps.dispatch(heap, X[:, :0])


@pytest.mark.parametrize("pair", list(itertools.permutations(HEAPS, 2)), ids=" before ".join)
@run_on("ranks")
def test_what_happens_to_a_rank_is_heard_at_once(pair):
    heaps, (before, heap) = Heaps(), pair
    for done in (0, 1):
        number = done + 1 + (BEFORE if heap in heaps.modes and before in heaps.modes else 0)
        lacks = f"sent low-latency dispatch {number}" if heap in heaps.modes else f"entered call {number}"
        lacks = rf"rank 2 has not {lacks} \(it finished {number - 1}\); the process of rank 2"

        def calls_before():
            for name in [before] * BEFORE + [heap] * done:  # noqa: B023
                heaps.dispatch(name)

        calls_before()
        heaps.others_hear(heap, "^rank 2 refused its arguments: x has shape", lambda: refuse(heaps, heap))
        heaps.buffer.reset()
        calls_before()
        with mock.patch.dict(heaps.buffer._group._neighbours, {2: mock.Mock(fate=lambda: ENDED)}):
            heaps.others_hear(heap, rf"^rank \d stopped waiting: {lacks} has ended")
        heaps.buffer.reset()
    calls_before()
    if heaps.rank == 2:
        heaps.buffer.close()
    heaps.others_hear(heap, rf"^rank \d stopped waiting: {lacks} has closed its buffer")  # before they come
    heaps.buffer.close()


@pytest.mark.parametrize("pair", list(itertools.permutations(HEAPS[1:])), ids=" before ".join)
@run_on("ranks")
def test_a_rank_that_has_sent_all_may_close(pair):
    """Rank 2 closes while others wait for rank 1, in a call of the mode with larger numbers that rank 2 sent before one
    of the other mode."""
    heaps = Heaps()
    for name in [HEAPS[0], pair[0]] * BEFORE:
        heaps.dispatch(name)
    dist.barrier()
    if heaps.rank == 1:
        time.sleep(1.0)
    sent = [heaps.modes[name].dispatch(X, IDS, return_recv_hook=True) for name in pair]
    if heaps.rank != 2:
        for received, hook in sent:
            hook()
            assert received.recv_counts.tolist() == [W] * (EXPERTS // W)
    heaps.buffer.close()

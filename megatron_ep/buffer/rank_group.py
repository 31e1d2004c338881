"""The ranks of a buffer in this process: their state, and the failures of launches on them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from megatron_ep import _C
from megatron_ep.buffer.call_cache import CallCache
from megatron_ep.buffer.call_log import CallLog
from megatron_ep.buffer.interface import Backend, RowCounts
from megatron_ep.buffer.low_latency import LowLatencyRanks
from megatron_ep.buffer.monitor import Monitor
from megatron_ep.config import Config, Topology
from megatron_ep.diagnosis import cause, failures
from megatron_ep.errors import (
    HOW_TO_GO_ON,
    BusyError,
    EPAbortError,
    EPError,
    EPMaskedError,
    by_cause,
    describe,
    error_of,
)
from megatron_ep.meeting.failure_broadcast import Failure
from megatron_ep.meeting.processes import OfOneProcess

if TYPE_CHECKING:
    from megatron_ep.fabrics import tcp

# Seconds for which a rank that refused a call and closes its buffer waits for others to refuse that call, too.
REFUSAL_S = 1.0

log = logging.getLogger(__name__)
set_up_log = logging.getLogger("megatron_ep.buffer")

_of_parents: list[Any] = []  # keeps objects alive in a forked child: their destructors would affect the parent


class AbortPeersOnError:
    """See `RankGroup.abort_peers_on_error`."""

    __slots__ = ("_backward_of", "_group")

    def __init__(self, group: RankGroup, backward_of: str):
        self._group, self._backward_of = group, backward_of

    def __enter__(self) -> None:
        if self._backward_of:
            self._group.calls.backward_of = self._backward_of

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._backward_of:
            self._group.calls.backward_of = ""
        if error is not None:
            self._group.abort_peers(error)


class RankGroup(OfOneProcess):
    """The ranks of a buffer in this process, on which plans of calls launch."""

    topology: Topology
    config: Config
    ranks: list[int]
    device: torch.device
    number: int  # identifies this buffer in this process to operators, which take no objects
    heap: _C.Heap
    resets: int = 0  # since it was made
    last_counts: RowCounts | None = None  # of the last dispatch for whose counts the host has waited
    takes_lists = False  # calls take and return lists with one tensor per rank, not tensors
    one_hop: LowLatencyRanks | None = None  # of calls with few tokens, see `Config.max_tokens`
    _backend: Backend | None = None
    _network: tcp.Network | None = None  # network between nodes, if a thread of the host serves it
    _monitor: Monitor | None = None
    _is_left = False  # whether it was garbage-collected, and its closing deferred
    _is_seen = False  # whether the failure since the last reset was raised or logged

    def __init__(self) -> None:
        self.number = failures.watch(self)
        self.calls = CallLog()
        self._process = os.getpid()

    @functools.cached_property
    def call_cache(self) -> CallCache:
        """Cache of checked arguments of dispatches and combines with this buffer."""
        return CallCache()

    @property
    def is_open(self) -> bool:
        """Whether the buffer has not been closed."""
        return self._backend is not None and not self._is_left

    def for_caller(self, of_ranks: list[Any]) -> Any:
        """Returns what a call gives its caller for the ranks of this process: the list, or its only item."""
        return of_ranks if self.takes_lists else of_ranks[0]

    @property
    def spans_machines(self) -> bool:
        """Whether a thread of the host serves a network to some ranks."""
        return self._network is not None

    @property
    def ring_bytes(self) -> dict[str, int]:
        """Sizes of the rings that a row passes through, by the name of their setting in `Tuning`."""
        rings = {"nvl_ring_bytes": self.heap.nvl_ring_bytes}
        if self.topology.nodes > 1:
            rings["rdma_ring_bytes"] = self.heap.rdma_ring_bytes
        return rings

    @property
    def num_local_experts(self) -> int:
        """L, experts per rank."""
        return self.config.num_experts // self.topology.world_size

    @property
    def seconds(self) -> float:
        """Seconds spent in launches of this buffer so far, including waits for other ranks."""
        return self.live_backend().seconds

    def statistics(self) -> dict[str, torch.Tensor]:
        """See `AnyBuffer`."""
        last, total = zip(*self.live_backend().launcher.waited(), strict=True)
        return {"wait_ns": torch.tensor(total, device="cpu"), "last_wait_ns": torch.tensor(last, device="cpu")}

    def close(self) -> None:
        """See `AnyBuffer`."""
        if self._backend is None:
            return
        try:
            failure = self._unseen_failure()
        finally:
            self._let_go()
            _C.release_pooled_memory()
        if failure is not None:
            raise failure

    def _let_go(self) -> None:
        backend, self._backend = self._backend, None
        self._stop_monitor()
        if backend is not None:
            backend.close()
            self.one_hop = None
            give_back = backend.give_back
            del backend  # this may be the last reference, without which its memory can be freed
            give_back()

    def _stop_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.stop()

    def close_after_error(self) -> None:
        """Closes the buffer, and logs a failure that no call has raised, because another error is being raised."""
        self.report_unseen()
        self._is_seen = True
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.is_open and not is_finalizing():  # at exit modules may be gone, and `failures` has reported already
            self._is_left = True
            self.live_backend().defer(self._end)

    def _end(self) -> None:
        if self._process != os.getpid():
            self.leave_to_parent()
        self.report_unseen()
        self._let_go()

    def leave_to_parent(self) -> None:
        """Closes the buffer in a forked child without touching its memory, which the parent uses."""
        _of_parents.append((self._backend, self._monitor, self.one_hop))
        self._backend = self._monitor = None

    def live_backend(self) -> Backend:
        """Returns the backend. Raises ValueError if the buffer is closed."""
        if self._backend is None:
            if self._process != (process := os.getpid()):
                raise ValueError(f"buffer is of process {self._process}, must not be used in {process}, forked from it")
            raise ValueError("buffer is closed")
        return self._backend

    def _start_anew(self) -> None:
        """Restores the state of a new group of ranks, without calls in progress."""
        self.live_backend().reset()
        self.calls.clear()
        self.resets += 1
        self._is_seen = False

    def reset(self) -> None:
        """See `megatron_ep.Buffer`."""
        raise NotImplementedError

    def agree_on(self, check: Callable[[], None], settings: dict[str, Any]) -> None:
        """Runs a check, whose error on one rank is raised on all, and raises ValueError unless settings are equal on
        all ranks. Collective."""
        check()

    def keeps_lines(self) -> bool:
        """Returns whether all GPUs are mapped over links that keep 128-byte packets whole. Collective, so it is not
        called if ranks may rejoin alone: the steps of the other ranks then do not include it."""
        return True

    # ---- launches

    def open_on_network(self, tolerates_loss: bool) -> None:
        """Waits until all ranks have opened a part of this buffer on the network, if a thread of the host serves one,
        so that no rank sends to it before. Collective.

        tolerates_loss: a lost connection ends only waits of the normal mode, because the part masks lost ranks.
        """

    def check_usable(self) -> None:
        """Raises ValueError if closed, EPAbortError if a launch failed on any rank since the last reset, EPMaskedError
        if others have masked this one."""
        backend = self.live_backend()
        aborted = backend.aborted()
        if aborted is not None and self.device.type == "cuda":
            raise self._failure(*aborted)  # the launch failed after it was enqueued
        if aborted is not None:
            backend.tell_others()
            self._is_seen = True
            kind = EPMaskedError if aborted[0] == "cut_off" else EPAbortError
            raise kind(f"{self._cause_for_caller(*aborted)}; {HOW_TO_GO_ON}")

    def synchronize(self) -> None:
        """See `AnyBuffer`."""
        backend = self.live_backend()
        backend.finish_launches()  # other work after a failed launch on its stream may never end
        self.raise_if_aborted()
        backend.synchronize()
        self.raise_if_aborted()

    def raise_if_failed(self) -> None:
        """Raises as `megatron_ep.raise_if_failed`, for this buffer only."""
        self.live_backend().finish_launches()
        self.raise_if_known_to_have_failed()

    def raise_if_known_to_have_failed(self) -> None:
        """Raises as `raise_if_failed` if this process already knows of a failure. Waits for no launch."""
        aborted = self.live_backend().aborted()
        if aborted is not None:
            raise self._failure(*aborted)

    @property
    def has_unseen_failure(self) -> bool:
        """Whether a failure is known in this process that no call has raised yet."""
        return not self._is_seen and self._backend is not None and self._known_failure(self._backend) is not None

    def _known_failure(self, backend: Backend) -> tuple[str, int] | None:
        """Returns `backend.aborted()`, unless that is a call on the host that this rank's caller saw refused."""
        aborted = backend.aborted()
        is_refused = self.device.type == "cpu" and aborted == ("bad_input", self.ranks[0])
        return None if is_refused else aborted

    def abort(self, reason: str) -> None:
        """See `AnyBuffer`. Does nothing after the buffer is closed."""
        backend = self._backend
        if backend is None:
            return
        backend.abort(interrupted=False, failed=True, reason=f"{cause.ABORTED_BY_CALLER}{reason}")
        self._is_seen |= backend.aborted() == ("failed", self.ranks[0])

    def report_unseen(self) -> None:
        """Logs, as an error, a failure that no call has raised. Raises nothing."""
        try:
            failure = self._unseen_failure()
        except Exception as error:
            log.error("a buffer of megatron_ep cannot tell whether its last calls failed: %s", error)
        else:
            if failure is not None:
                log.error("a call of megatron_ep failed and no call has raised it: %s", failure)

    def _unseen_failure(self) -> EPError | None:
        if self._backend is None:
            return None
        self._backend.settle_refusal(wait=REFUSAL_S)  # because this process may end
        if self._is_seen:
            return None
        if not self._backend.is_capturing():
            self._backend.finish_launches()
        aborted = self._known_failure(self._backend)
        if aborted is None or self._backend.finished():
            return None
        return self._failure(*aborted)

    def abort_peers_on_error(self, backward_of: str = "") -> AbortPeersOnError:
        """Returns a context that ends the waits of the other ranks on an error inside that only this rank knows of.

        backward_of: "dispatch" or "combine" if its backward pass is inside, for the error of a timeout.
        """
        return AbortPeersOnError(self, backward_of)

    def abort_peers(self, error: BaseException) -> None:
        """Ends the waits of other ranks after an error here, except an EPError, which they know, and a BusyError."""
        if isinstance(error, (EPError, BusyError)):
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        self._is_seen |= interrupted  # that ended the waits of this process too
        with contextlib.suppress(RuntimeError):  # of a GPU that no longer answers: the error itself says more
            failed = not interrupted and not isinstance(error, ValueError)
            reason = "" if interrupted else f"{type(error).__name__}: {error}" if failed else str(error)
            if self.refuse(interrupted=interrupted, failed=failed, reason=reason) and isinstance(error, ValueError):
                error.args = (f"{error}; {HOW_TO_GO_ON}",)

    def refuse(
        self, *, interrupted: bool = False, failed: bool = False, reason: str = "", is_raised: bool = False
    ) -> bool:
        """Ends the waits of the other ranks, because this one has refused its arguments, was interrupted, or failed.
        Returns whether the buffer must then be reset; a host backend finds out whether all ranks refused.

        is_raised: whether the caller raises an EPError for this step, even if another rank failed first.
        """
        self._is_seen |= is_raised
        if self._backend is None or len(self.ranks) == self.topology.world_size:
            return False
        if interrupted or failed or not self._backend.refuse(reason):
            self._backend.abort(interrupted=interrupted, failed=failed, reason=reason)
            outcome = "interrupted" if interrupted else "failed" if failed else "bad_input"
            # A call may have failed before, with this error as a consequence.
            aborted = self._backend.aborted()
            self._is_seen |= aborted == (outcome, self.ranks[0])
            if aborted is not None and self._monitor is not None:
                self._monitor.first(self.describe(*aborted))  # publishes it now, because this process may end
            return True
        return False

    # ---- failures

    def describe(self, outcome: str, rank: int) -> Failure:
        """Returns the failure as this rank sees it."""
        incidents = self.live_backend().launcher.incidents()
        first = next((i for i in incidents if i["outcome"] != "aborted"), next(iter(incidents), None))
        return Failure(rank, outcome, self._own_cause(outcome, rank), describe(first) if first else "")

    def _cause(self, outcome: str, rank: int) -> str:
        """Returns the cause, equal on all ranks, including unreachable ones."""
        if (heard := self._heard) is not None:
            return heard.cause
        if self._monitor is None:
            return self._own_cause(outcome, rank)
        return self._monitor.first(self.describe(outcome, rank)).cause

    def _cause_for_caller(self, outcome: str, rank: int) -> str:
        """Returns the cause, and whether this rank, which it may name, came later."""
        said = self._cause(outcome, rank)
        if outcome != "timeout" or rank in self.ranks or self.live_backend().launcher.incidents():
            return said
        return f"{said}; this is rank {self.ranks[0]}, which was in no call"

    @property
    def _heard(self) -> Failure | None:
        """The failure that all ranks raise, if it came from another rank already."""
        return None if self._monitor is None else self._monitor.heard

    def _own_cause(self, outcome: str, rank: int) -> str:
        """Returns the cause as this rank finds it."""
        world_size = self.topology.world_size
        ranks = cause.Ranks(
            world_size=world_size,
            statuses=lambda: self.live_backend().rank_statuses(),
            fate=self._fate_of,
            unheard=self._unheard,
            is_heard=lambda: self._heard is not None,
            when_waits_expire=self._when_waits_expire(),
            have_others=len(self.ranks) < world_size,
            spans_machines=self.spans_machines,
        )
        return cause.find(outcome, rank, ranks)

    def _fate_of(self, rank: int) -> str | None:
        """Returns what became of a rank's process, if that is known here: see `blame.root`."""
        return None

    def _unheard(self, rank: int) -> tuple[str, float] | None:
        """See `tcp.Network.unheard`."""
        return None

    def _when_waits_expire(self) -> str:
        return f"after {self.config.timeout_seconds:g} s"

    def raise_if_aborted(self) -> None:
        """Raises a known failure. Does not wait."""
        backend = self.live_backend()
        aborted = backend.aborted()
        # If the last launch is known to have finished, later failures of other ranks do not affect its results.
        if aborted is None or backend.finished():
            return
        raise self._failure(*aborted)

    def _failure(self, outcome: str, rank: int) -> EPError:
        """Returns the error that the caller raises because a rank gave up."""
        self.live_backend().tell_others()  # the error may end this process
        self._is_seen = True
        said, heard = self._cause_for_caller(outcome, rank), self._heard
        incidents = by_cause(self.live_backend().launcher.incidents(), first_rank=rank)
        backward = self.calls.backward_pass(incidents) if outcome == "timeout" else ""
        told = "" if heard is None else heard.incident
        return error_of(outcome, said, incidents, heard=told, backward_pass=backward)


def log_set_up(group: RankGroup, fabric: str, sms: int | None = None) -> None:
    topology, heap = group.topology, group.heap
    set_up_log.info(
        "%d ranks, %d nodes x %d; fabric: %s; %d channels%s, %.1f MiB of heap a rank; a wait ends after %g s",
        topology.world_size,
        topology.nodes,
        topology.ranks_per_node,
        fabric,
        heap.channels,
        "" if sms is None else f", {sms} SMs a rank",
        heap.bytes / 2**20,
        group.config.timeout_seconds,
    )

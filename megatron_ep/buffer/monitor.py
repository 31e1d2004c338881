"""A thread that watches the other ranks of a buffer, and ends this rank's waits long before their timeout if a peer's
process has ended, or if a rank of another machine has given up or left. A waiting role itself reads only flags."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping

from megatron_ep.buffer.interface import Backend
from megatron_ep.diagnosis import blame, failures
from megatron_ep.meeting.failure_broadcast import Failure, FailureBroadcast
from megatron_ep.meeting.processes import Owner

INTERVAL_S = 0.2
END_S = 2.0  # time to wait for the thread when it is stopped: it may wait for a GPU that does not answer
# Outcomes that are sent to all ranks: all but cut_off and masked, which concern one rank.
EVERYBODYS = {"timeout", "failed", "interrupted", "bad_input", "mismatch", "no_layout", "overflow", "lost"}

log = logging.getLogger(__name__)


class Monitor:
    """Watches the other ranks for one rank, from construction until `stop`, in a daemon thread.

    backend: backend of this rank.
    owners: processes of the ranks on this machine, by rank; may change.
    broadcast: carries the first failure between ranks that do not share memory; None: all do.
    describe: returns the failure of an (outcome, rank) for the broadcast. A method, whose object is not kept alive.
    """

    def __init__(
        self,
        backend: Backend,
        rank: int,
        owners: Mapping[int, Owner],
        broadcast: FailureBroadcast | None,
        describe: Callable[[str, int], Failure],
    ):
        self._backend = backend
        self._rank = rank
        self._owners = owners
        self._broadcast = broadcast
        self._describe = weakref.WeakMethod(describe)
        self._lock = threading.RLock()  # a finalizer may run while it is held
        self._is_over = threading.Event()
        self._has_published = False  # whether a failure was published since the last reset
        self._thread = threading.Thread(target=self._run, name=f"megatron_ep monitor of rank {rank}", daemon=True)
        self._thread.start()
        _monitors.add(self)

    def stop(self) -> None:
        """Stops the thread. May be called from any thread, also from this one."""
        self._is_over.set()
        if self._broadcast is not None:
            self._broadcast.stop()
        if self._thread is not threading.current_thread():
            self._thread.join(END_S)

    @contextlib.contextmanager
    def resetting(self) -> Iterator[None]:
        """Pauses the monitor during a reset, after which earlier failures no longer count on any rank."""
        with self._lock:
            yield
            self._has_published = False
            if self._broadcast is not None:
                self._broadcast.next_epoch()

    def first(self, failure: Failure) -> Failure:
        """Returns the failure that all ranks raise: this one, unless another one was first."""
        if self._broadcast is None or not self._is_everybodys(failure.outcome):
            return failure
        return self._broadcast.agree(failure)

    @property
    def heard(self) -> Failure | None:
        """The failure that all ranks raise, if it is known already."""
        return self._broadcast.first if self._broadcast is not None else None

    def _is_everybodys(self, outcome: str) -> bool:
        return outcome in EVERYBODYS and not self._backend.masks

    def _run(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            try:
                # Also during a reset, for which this rank waits while others come to a call that it has refused.
                self._backend.settle_refusal()
                if self._lock.acquire(blocking=False):
                    try:
                        self._check()
                    finally:
                        self._lock.release()
            except Exception as error:  # for example of a GPU that no longer works: the next call raises it
                log.debug("rank %d is no longer watched: %s", self._rank, error)
                return

    def _check(self) -> None:
        if self._backend.masks:
            return
        if (aborted := self._backend.aborted()) is not None:
            self._publish(*aborted)
        elif (heard := self.heard) is not None:
            self._backend.abort(interrupted=False, failed=True, reason=heard.cause)
        else:
            fates = self._fates()
            self._backend.settle_refusal(fates)
            self._check_processes(fates)

    def _publish(self, outcome: str, rank: int) -> None:
        describe = self._describe()
        if describe is None or self._has_published or not self._is_everybodys(outcome):
            return
        if self._broadcast is None and not failures.watchers:
            return  # `describe` queries a GPU, so it runs only if its result is used
        self._has_published = True
        failure = describe(outcome, rank)
        if self._broadcast is not None:
            self._broadcast.publish(failure)
        for watcher in failures.watchers:
            watcher(failure.cause)

    def _check_processes(self, fates: Mapping[int, str]) -> None:
        """fates: read before the statuses, because a rank may do its part and then end."""
        if not fates:
            return  # statuses query a GPU, so they are read only if a rank has ended
        statuses = self._backend.rank_statuses()
        own = next(status for status in statuses if status.rank == self._rank)
        ended = blame.ended(own, statuses, fates.get)
        if ended is not None and not self._is_over.is_set():
            self._backend.abort(interrupted=False, failed=True, reason=f"{blame.STOPPED_WAITING}{ended}")

    def _fates(self) -> dict[int, str]:
        """Returns the fate of the ranks that have left or ended."""
        fates = dict.fromkeys(self._backend.ranks_that_left(), blame.LEFT)
        near = {rank: fate for rank, owner in list(self._owners.items()) if (fate := owner.fate()) is not None}
        return fates | {rank: fate for rank, fate in near.items() if fate in (blame.ENDED, blame.CLOSED)}


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
os.register_at_fork(after_in_child=_monitors.clear)  # a forked child does not have their threads


@atexit.register
def stop_all() -> None:
    """Stops all monitors at exit, before what the threads use is destroyed."""
    for monitor in list(_monitors):
        with contextlib.suppress(Exception):
            monitor.stop()

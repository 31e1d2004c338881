"""Broadcasts the first failure to ranks that share no memory, through the store of their rendezvous. The first reason
is written there once, and all ranks poll for it.

A separate thread uses the store: a store that does not answer delays no call, and is no failure. Only the end of the
thread waits for it, if the store does not have the failure of this rank yet. The content is decoded as a number and
three texts, which are only displayed.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch.distributed as dist

from megatron_ep.meeting import codec, stores

INTERVAL_S = 0.25
MAX_READERS = 4000  # reads of a store per second: with more ranks each polls less often
ANSWER_S = 3.0  # time that a failed rank waits to learn whether another rank failed first
END_S = 1.0  # time to wait for the thread when it is stopped and has nothing to publish

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """The first failure: why a rank gave up.

    rank, outcome: see `Backend.aborted`.
    cause: first line of an error.
    incident: what one of its roles waited for, see `errors.describe`; "" if that is unknown.
    """

    rank: int
    outcome: str
    cause: str
    incident: str


class FailureBroadcast:
    """The failure messages of a buffer's ranks between two resets. Only `agree` waits for the store."""

    def __init__(self, store: dist.Store, world_size: int):
        self._store = store
        self._interval = max(INTERVAL_S, world_size / MAX_READERS)
        self._lock = threading.Lock()  # guards the attributes below
        self._epoch = 0
        self._own: Failure | None = None
        self._first: Failure | None = None
        self._is_known = threading.Event()
        self._is_awaited = True  # False once the store has not answered in time, or the thread has ended
        self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron_ep failures", daemon=True)
        self._thread.start()

    @property
    def first(self) -> Failure | None:
        """The first failure since the last reset, if this rank has received one."""
        return self._first

    @property
    def has_own(self) -> bool:
        """Whether this rank has published a failure, or need not because another is known."""
        return self._own is not None or self._first is not None

    def publish(self, failure: Failure) -> None:
        """Publishes a failure of this rank, unless one is known already."""
        with self._lock:
            if self.has_own:
                return
            self._own = failure
        self._wake.set()

    def agree(self, failure: Failure) -> Failure:
        """Publishes a failure and returns the first one, or this one if the store does not answer within ANSWER_S."""
        self.publish(failure)
        if self._is_awaited and not self._is_known.wait(ANSWER_S):
            self._is_awaited = False
        return self._first or failure

    def next_epoch(self) -> None:
        """Starts a new epoch at a reset, on all ranks: earlier failures no longer count."""
        with self._lock:
            self._epoch += 1
            self._own = self._first = None
            self._is_known.clear()

    def stop(self) -> None:
        """Stops the thread, once the store has the failure of this rank: this process may end. May be called from any
        thread."""
        self._is_over = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(stores.STORE_S if self._is_publishing else END_S)

    @property
    def _is_publishing(self) -> bool:
        return self._own is not None and self._first is None

    def _run(self) -> None:
        try:
            while not self._is_over or self._is_publishing:
                self._wake.wait(self._interval)
                self._wake.clear()
                if not self._is_over or self._is_publishing:
                    self._exchange()
        except ValueError as error:
            log.warning(
                "the store of torch.distributed holds a report of a failure that no rank has written: %s", error
            )
        except Exception as error:
            log.debug("failures of other ranks are no longer received: %s", error)
        finally:
            self._is_awaited = False
            self._is_known.set()

    def _exchange(self) -> None:
        with self._lock:
            epoch, own, first = self._epoch, self._own, self._first
        key = f"first failure/{epoch}"
        if first is not None:
            return
        data: bytes | None
        if own is not None:
            data = self._store.compare_set(key, "", codec.encode(own).decode())
        else:
            data = stores.read(self._store, key)
        if data is None:
            return
        told = codec.decode(data, Failure)
        shown = Failure(told.rank, *(codec.readable(text) for text in (told.outcome, told.cause, told.incident)))
        with self._lock:
            if epoch == self._epoch:
                self._first = shown
                self._is_known.set()

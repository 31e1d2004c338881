"""Calls of a store of torch.distributed, with bounds.

The store looks up the name of each machine that connects, in the one thread that answers all ranks. With a resolver
that does not answer, this takes seconds a connection. A process therefore keeps one connection to a store, which its
threads share; none of them may wait in the store for a key, because the others would wait with it. Failures of calls
have a second one: a network that is cut in the middle of a question about them leaves the first one alone.

Two limits are apart: how long other ranks may be busy, which the user sets, and how long the store may be silent.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

import torch.distributed as dist

from megatron_ep.errors import EPError

Result = TypeVar("Result")

STORE_S = 60.0  # seconds for which a store may be silent
WARN_S = 5.0  # seconds after which a wait is logged first
SLOW_S = 0.25  # seconds after which a store that has not answered is silent
NO_ANSWER = "the store of torch.distributed did not answer"
ABSENT = "megatron_ep: absent"  # value that no rank writes


CALLS, FAILURES = "calls", "failures"  # purposes of a connection


class _Kept:
    """A connection of this process to a store. lock: held while it is made."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: dist.Store | None = None


_kept: weakref.WeakKeyDictionary[dist.Store, dict[str, _Kept]] = weakref.WeakKeyDictionary()  # by purpose


def _forget_all() -> None:
    global _kept
    _kept = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_forget_all)  # two processes cannot share a connection


def _of(store: dist.Store, purpose: str) -> _Kept:
    return _kept.setdefault(store, {}).setdefault(purpose, _Kept())


def connected(store: dist.Store, purpose: str = CALLS) -> dist.Store:
    """Returns this process's connection to a store, beside that of `store`, in which torch may wait for a key. Returns
    the store itself with torch before 2.8, which cannot make another connection.

    store: the same object for the same store, because a new object gets a new connection.
    """
    if not hasattr(store, "clone"):
        return store
    kept = _of(store, purpose)
    with kept.lock:
        if kept.connection is None:
            kept.connection = store.clone()
        return kept.connection


def keep(store: dist.Store) -> None:
    """Makes `connected` return the store itself for calls: it is used through `connected` only."""
    _of(store, CALLS).connection = store


def forget(store: dist.Store, purpose: str = CALLS) -> None:
    """Makes the next call of `connected` connect anew, because the kept connection is lost or silent."""
    _kept.get(store, {}).pop(purpose, None)


def answering(store: dist.Store, purpose: str = CALLS) -> dist.Store:
    """Returns this process's connection to a store, anew if the kept one has been lost: a network that was cut between
    two calls is no failure of the second one. Raises RuntimeError if the store cannot be reached."""
    try:
        read(connected(store, purpose), ABSENT)
    except RuntimeError:
        forget(store, purpose)
    return connected(store, purpose)


def ask(store: dist.Store, call: Callable[[dist.Store], Result]) -> Result:
    """Returns the result of `call` with this process's connection. Raises EPError if the store does not answer within
    STORE_S, and RuntimeError if the connection is lost."""
    try:
        return bounded(STORE_S, lambda: call(answering(store)))
    except RuntimeError:
        forget(store)
        raise


def read(connection: dist.Store, key: str) -> bytes | None:
    """Returns the value of a key; None if there is none. `get` would wait for a key that another rank deletes."""
    value = connection.compare_set(key, ABSENT, ABSENT)
    return None if value == ABSENT.encode() else value


def write(connection: dist.Store, key: str, value: str) -> None:
    """Writes a value, and returns when the store has it. `set` returns when the value is sent."""
    connection.set(key, value)
    read(connection, key)


def address(store: dist.Store) -> str:
    """Returns the host and port of a store, for messages."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else "the store of torch.distributed"


def next_warning(waited: float) -> float:
    """Returns after how many seconds of a wait it is logged next: after 5, 30, 60, 90, ..."""
    return WARN_S if waited < WARN_S else 30.0 * (waited // 30.0 + 1)


class Wait:
    """A wait of some seconds for other ranks, in which the silence of the store does not count.

    silence: seconds of it that do not count.
    """

    def __init__(self, seconds: float, silence: float = STORE_S):
        self._end = time.monotonic() + seconds
        self._silence = silence

    def answer(self, call: Callable[[], Result]) -> Result:
        """Returns the result of a call of the store."""
        asked = time.monotonic()
        result = call()
        silent = min(max(0.0, time.monotonic() - asked - SLOW_S), self._silence)
        self._silence -= silent
        self._end += silent
        return result

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads of `in_thread`


def has_abandoned_calls() -> bool:
    """Returns whether a call of `in_thread` or `bounded` has not returned. If it returned while the interpreter ends,
    Python would end its thread in C++ code, which aborts the process. Such a process must end by `os._exit`."""
    return any(thread.is_alive() for thread in _threads)


def bounded(seconds: float, call: Callable[[], Result], otherwise: str = "") -> Result:
    """Runs `call` in a thread and returns its result, because it may wait forever: torch's stores do if a machine no
    longer answers.

    Raises EPError after `seconds`, and abandons the thread. otherwise: the message; "": that the store does not answer.
    """
    done = in_thread(call)
    if not futures.wait([done], seconds).done:
        raise EPError(f"{otherwise or NO_ANSWER} within {seconds:g} s")
    return done.result()


def in_thread(call: Callable[[], Result]) -> futures.Future[Result]:
    """Runs `call` in a thread that does not keep the process from ending."""
    done: futures.Future[Result] = futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="megatron_ep rendezvous", daemon=True)
    _threads.add(thread)
    thread.start()
    return done

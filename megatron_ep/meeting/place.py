"""Where the ranks of a group meet: keys of a store that are theirs alone. A store may outlive processes that met in it
and crashed; those that are started in their place must find each other, and nothing that the former ones have left.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_ep.errors import EPError
from megatron_ep.meeting import codec, processes
from megatron_ep.meeting.addresses import VARIABLE, address_in

Result = TypeVar("Result")

TELL_S = 5.0  # that a store may take for what need not be told
STORE_S = 60.0  # that the ranks of a group without a store may take to find the one that rank 0 opens


@dataclass(frozen=True)
class Presence:
    """What a rank tells of itself before the others have met it.

    question: to which a living rank 0 answers where to meet; "" while it does not ask. With a failure: what names it,
        words of which a rank that has heard of one does not heed it again.
    machine, pid: of its process. since: when it wrote this, by `time.time()`.
    failure: why nobody need come to the next rendezvous; "" if there is no reason.
    """

    question: str
    machine: str
    pid: int
    since: float
    failure: str

    @property
    def is_of_this_job(self) -> bool:
        """Whether it was written since this process was started: by then all processes of the job had been."""
        return self.since >= processes.started()

    @property
    def fate(self) -> str | None:
        """What is seen to have become of its process; None while it runs, or is one of another machine."""
        is_here = self.machine == processes.machine() and self.is_of_this_job
        return processes.process_fate(self.pid) if is_here else None


class Place:
    """Of one rank, for all rendezvous of a group.

    store: where nothing has these keys but the ranks of the group.
    name: of the place, as errors show it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, name: str):
        self.store = store
        self.rank, self.world_size, self.name = rank, world_size, name
        self.begun = 0  # rendezvous
        self.came = 0.0  # when this rank began the last one, by `time.time()`
        self.has_failed = False  # since it has met the others
        self._process = os.getpid()
        self.meeting = threading.Lock()  # one rendezvous at a time begins
        self.left: list[Callable[[dist.Store], None]] = []  # takes what a rendezvous that is over has left in the store
        self.heard: set[str] = set()  # what names failures

    def write(self, store: dist.Store, question: str = "", failure: str = "") -> None:
        """What this rank tells from now on."""
        self.heard.update(question.split())
        presence = Presence(question, processes.machine(), os.getpid(), time.time(), codec.readable(failure))
        store.set(f"rank/{self.rank}", codec.encode(presence).decode())

    def read(self, store: dist.Store, rank: int) -> Presence | None:
        """What another rank tells, if it tells anything."""
        key = f"rank/{rank}"
        if not store.check([key]):
            return None
        try:
            return codec.decode(store.get(key), Presence)
        except ValueError:  # somebody else's
            return None

    def failure_of(self, presence: Presence) -> str:
        """A failure that has not been heard of; "" without one. A rank that has failed itself and comes again does not
        heed what others told before: they may have made the same mistake, and come again, too."""
        names = presence.question.split()
        if self.has_failed and presence.since < self.came:
            return ""
        if not presence.failure or not presence.is_of_this_job or not self.heard.isdisjoint(names):
            return ""
        self.heard.update(names)
        return codec.readable(presence.failure)

    def tell(self, failure: str = "") -> None:
        """Tells those who come to the next rendezvous that this process takes part, or why it does not. Does nothing in
        a forked child. Raises RuntimeError where the store does not answer."""
        name = new_name() if failure else ""
        self.has_failed |= bool(failure)
        if self._process == os.getpid():
            bounded(TELL_S, lambda: self.write(connected(self.store), name, failure))


_places: weakref.WeakKeyDictionary[dist.ProcessGroup, Place] = weakref.WeakKeyDictionary()
# Opened by this process: its buffers, and those of other ranks, may outlive who asked for them.
_opened: list[dist.Store] = []


def place_of(group: dist.ProcessGroup | None, timeout: timedelta = timedelta(seconds=STORE_S)) -> Place:
    """That of a group; None: the default group. Collective where torch has no record of the group. Raises EPError if a
    rank of such a group does not come within `timeout`."""
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("group is None, must be a process group unless torch.distributed is initialized")
    if group not in _places:
        if (known := is_known(group)) is not None:
            name = f"megatron_ep/{known}"
            store = dist.PrefixStore(name, distributed_c10d._get_default_store())
            _places[group] = Place(store, dist.get_rank(group), dist.get_world_size(group), name)
        else:
            _places[group] = _place_by(group, timeout)
    return _places[group]


def is_known(group: dist.ProcessGroup) -> str | None:
    """The name under which torch knows a group. None for one that somebody has made around another one, or without
    torch.distributed."""
    return distributed_c10d._world.pg_names.get(group)


def _place_by(group: dist.ProcessGroup, timeout: timedelta) -> Place:
    def from_rank_0(opened: Any) -> Any:
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, opened, group=group)
        return everyone[0]

    def open_store() -> Place:
        return opened_place(group.rank(), group.size(), from_rank_0)

    what = f"the {group.size()} ranks of a process group that torch.distributed has no record of"
    return bounded(timeout.total_seconds(), open_store, f"{what} did not come together")


def opened_place(rank: int, world_size: int, from_rank_0: Callable[[Any], Any]) -> Place:
    """A place in a store that rank 0 opens. Collective. from_rank_0: gives all ranks what it was given by rank 0."""
    opened, timeout = None, timedelta(seconds=STORE_S)
    if rank == 0:
        wanted = os.environ.get(VARIABLE)
        host = address_in(wanted) if wanted else socket.gethostname()
        opened = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = from_rank_0(None if opened is None else (opened.host, opened.port))
    store = opened or dist.TCPStore(host, port, is_master=False, timeout=timeout)
    _opened.append(store)
    return Place(dist.PrefixStore("megatron_ep", store), rank, world_size, f"megatron_ep of {host} port {port}")


def connected(store: dist.Store) -> dist.Store:
    """A connection to the store for one thread at a time: in a store's own one calls wait for each other. The store
    itself where torch, before 2.8, makes no other."""
    return store.clone() if hasattr(store, "clone") else store


def new_name() -> str:
    return secrets.token_hex(16)


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of `in_thread`


def has_abandoned_calls() -> bool:
    """Whether a call of `in_thread` or `bounded` has not returned. If it does while the interpreter ends, Python ends
    its thread inside C++, which aborts the process: such a process has to end by `os._exit`."""
    return any(thread.is_alive() for thread in _threads)


def bounded(seconds: float, call: Callable[[], Result], otherwise: str = "") -> Result:
    """What `call` returns, in a thread, as it may wait without a bound: a store of torch does for the answer of a
    machine that has fallen silent.

    Raises EPError after `seconds`, and abandons the thread. otherwise: what it then says, if not that the store
    does not answer.
    """
    done = in_thread(call)
    if not futures.wait([done], seconds).done:
        raise EPError(f"{otherwise or 'the store of torch.distributed did not answer'} within {seconds:g} s")
    return done.result()


def in_thread(call: Callable[[], Result]) -> futures.Future[Result]:
    """Runs it in a thread that does not keep the process from ending."""
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

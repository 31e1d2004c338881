"""The keys of a store with which the ranks of a group meet. A store may outlive processes that crashed. Processes that
replace them must find each other, and ignore keys of the former ones.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_ep.meeting import codec, processes, stores
from megatron_ep.meeting.addresses import VARIABLE, address_in
from megatron_ep.meeting.stores import STORE_S

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Presence:
    """The state of a rank that other ranks can read before a rendezvous.

    question: a name; a living rank 0 answers it with the name of the rendezvous. "" if there is none. With a failure:
        names of the failure, which a rank that knows one of them ignores.
    machine, pid: machine and id of its process. since: when it was written, by `time.time()`. begun: `Place.begun`.
    failure: why the next rendezvous will not take place; "" if there is no reason.
    """

    question: str
    machine: str
    pid: int
    since: float
    begun: int
    failure: str

    @property
    def is_of_this_job(self) -> bool:
        """Whether it was written after this process was started, and thus by a process of the same job."""
        return self.since >= processes.started()

    @property
    def fate(self) -> str | None:
        """The fate of its process; None while it runs, or if it is on another machine."""
        is_here = self.machine == processes.machine() and self.is_of_this_job
        return processes.process_fate(self.pid) if is_here else None


class Place:
    """The keys of one rank, for all rendezvous of a group.

    store: a store, see `stores.connected`. prefix: of the keys, which only ranks of the group use.
    name: name of the place in errors.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, name: str, prefix: str = "megatron_ep"):
        self.store, self._prefix = store, prefix
        self.rank, self.world_size, self.name = rank, world_size, name
        self.begun = 0  # number of rendezvous
        self.came = 0.0  # when this rank began the last one, by `time.time()`
        self.has_failed = False  # whether this rank has failed since it met the others
        self._process = os.getpid()
        self.meeting = threading.Lock()  # held while a rendezvous begins
        self.left: list[Callable[[dist.Store], None]] = []  # functions that delete the keys of finished rendezvous
        self.heard: set[str] = set()  # names of known failures

    def connection(self, purpose: str = stores.CALLS) -> dist.Store:
        """Returns this process's connection to the store, with the keys of the group. Raises RuntimeError if the store
        cannot be reached."""
        return self._keys(stores.answering(self.store, purpose))

    def _keys(self, store: dist.Store) -> dist.Store:
        return dist.PrefixStore(self._prefix, store)

    def write(self, store: dist.Store, question: str = "", failure: str = "") -> None:
        """Writes this rank's presence."""
        self.heard.update(question.split())
        own = processes.machine(), os.getpid(), time.time(), self.begun
        presence = Presence(question, *own, codec.readable(failure))
        stores.write(store, f"rank/{self.rank}", codec.encode(presence).decode())

    def read(self, store: dist.Store, rank: int) -> Presence | None:
        """Returns another rank's presence; None if it has written none."""
        data = stores.read(store, f"rank/{rank}")
        if data is None:
            return None
        try:
            return codec.decode(data, Presence)
        except ValueError:  # no rank of this library wrote it
            return None

    def failure_of(self, presence: Presence) -> str:
        """Returns a new failure; "" if there is none. A rank that has failed and comes again ignores earlier failures
        of others, because they may have made the same mistake, and come again as well."""
        names = presence.question.split()
        if self.has_failed and presence.since < self.came and presence.begun < self.begun:
            return ""
        if not presence.failure or not presence.is_of_this_job or not self.heard.isdisjoint(names):
            return ""
        self.heard.update(names)
        return codec.readable(presence.failure)

    def publish(self, failure: str = "") -> None:
        """Publishes that this process takes part in the next rendezvous, or why it does not. Does nothing in a forked
        child. Raises nothing if the store does not answer: the next rendezvous does."""
        name = new_name() if failure else ""
        self.has_failed |= bool(failure)
        if self._process == os.getpid():
            try:
                stores.ask(self.store, lambda store: self.write(self._keys(store), name, failure))
            except RuntimeError as error:
                log.debug("rank %d of %s: %s", self.rank, self.name, error)


_places: weakref.WeakKeyDictionary[dist.ProcessGroup, Place] = weakref.WeakKeyDictionary()
# Stores are kept until the process ends, because buffers of this and other ranks may outlive their callers.
_opened: list[dist.Store] = []


def place_of(group: dist.ProcessGroup | None, timeout: timedelta = timedelta(seconds=STORE_S)) -> Place:
    """Returns the place of a group; None: the default group. Collective if torch has no record of the group. Raises
    EPError if a rank of such a group does not come within `timeout`."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group is None, must be a process group unless torch.distributed is initialized")
    if group not in _places:
        if (known := is_known(group)) is not None:
            name = f"megatron_ep/{known}"
            store = distributed_c10d._get_default_store()
            _places[group] = Place(store, dist.get_rank(group), dist.get_world_size(group), name, name)
        else:
            _places[group] = _place_by(group, timeout)
    return _places[group]


def is_known(group: Any) -> str | None:
    """Returns torch's name of a group; None for a group object that wraps another one, or without torch.distributed.
    Raises ValueError if it is no group, such as the number that torch gives to ranks outside of a new group."""
    if not hasattr(group, "rank"):
        raise ValueError(f"group is {group!r}, must be a process group that this rank belongs to")
    return distributed_c10d._world.pg_names.get(group)


def _place_by(group: dist.ProcessGroup, timeout: timedelta) -> Place:
    def from_rank_0(opened: Any) -> Any:
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, opened, group=group)
        return everyone[0]

    silence = max(timeout, timedelta(seconds=STORE_S))

    def open_store() -> Place:
        return opened_place(group.rank(), group.size(), from_rank_0, silence)

    what = f"the {group.size()} ranks of a process group that torch.distributed has no record of"
    return stores.bounded((timeout + silence).total_seconds(), open_store, f"{what} did not come together")


def opened_place(
    rank: int, world_size: int, from_rank_0: Callable[[Any], Any], timeout: timedelta = timedelta(seconds=STORE_S)
) -> Place:
    """Returns a place in a store that rank 0 opens. Collective.

    from_rank_0: returns rank 0's argument on all ranks. timeout: time that the store may need to answer a rank.
    """
    opened = None
    if rank == 0:
        wanted = os.environ.get(VARIABLE)
        host = address_in(wanted) if wanted else socket.gethostname()
        opened = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = from_rank_0(None if opened is None else (opened.host, opened.port))
    store = opened or dist.TCPStore(host, port, is_master=False, timeout=timeout)
    _opened.append(store)
    stores.keep(store)
    return Place(store, rank, world_size, f"megatron_ep of {host} port {port}")


def new_name() -> str:
    return secrets.token_hex(16)

"""Which attempt of a job this is. A store may outlive processes that met in it and crashed, each after another number
of rendezvous; those that are started in their place must find each other, and nothing that the former ones have left.
"""

from __future__ import annotations

import re
import secrets
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_ep.errors import EPError

NAME = re.compile("[0-9a-f]{32}")
ANSWER_EVERY_S = 0.01


class Attempt:
    """What the ranks of a process group put before their keys, as long as they have this group.

    Rank 0 chooses the name. Other ranks ask with a fresh random number, so only a living rank 0 can answer.
    """

    def __init__(self, store: dist.Store, rank: int):
        self.rendezvous = 0  # so far
        self._store = store
        self._rank = rank
        self._name = "" if rank else secrets.token_hex(16)
        self._question = secrets.token_hex(16)

    def name(self, timeout: timedelta) -> str | None:
        """None if rank 0 does not tell it in time. Raises RuntimeError where the store does not answer."""
        if not self._name:
            answer = f"answer/{self._question}"
            self._store.set(f"question/{self._rank}", self._question)
            try:
                self._store.wait([answer], timeout)
            except RuntimeError:
                if not self._store.check([answer]):
                    return None
            name = self._store.get(answer).decode(errors="replace")
            if not NAME.fullmatch(name):
                raise RuntimeError("somebody else has answered which attempt of the job this is")
            self._store.delete_key(answer)
            self._name = name
        return self._name

    def all_came(self, store: dist.Store, keys: Sequence[str], timeout: timedelta) -> bool:
        """Runs on rank 0: returns whether all keys, one of each rank, arrive in time. Missing ranks may not know the
        name yet, so it answers their questions; questions of earlier attempts are harmless. Raises RuntimeError as
        `name`."""
        deadline = time.monotonic() + timeout.total_seconds()
        while missing := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            if time.monotonic() > deadline:
                return False
            for rank in missing:
                if self._store.check([f"question/{rank}"]) and NAME.fullmatch(
                    question := self._store.get(f"question/{rank}").decode(errors="replace")
                ):
                    self._store.set(f"answer/{question}", self._name)
            time.sleep(ANSWER_EVERY_S)
        return True


def agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Collective: a name for the attempt of these ranks. Raises EPError if one does not come."""
    attempt = Attempt(store, rank)
    name = attempt.name(timeout)
    keys = [f"{name}/{other}" for other in range(world_size)]
    if name is not None:
        store.set(keys[rank], "")
    if name is None or (rank == 0 and not attempt.all_came(store, keys, timeout)):
        missing = "rank 0" if name is None else "a rank"
        raise EPError(f"{missing} did not come to the start of the job within {timeout.total_seconds():g} s")
    return name


_attempts: weakref.WeakKeyDictionary[dist.ProcessGroup, Attempt] = weakref.WeakKeyDictionary()


def attempt_of(group: dist.ProcessGroup, store: dist.Store) -> Attempt:
    """That of a group of this process. store: for this group alone."""
    if group not in _attempts:
        _attempts[group] = Attempt(store, dist.get_rank(group))
    return _attempts[group]

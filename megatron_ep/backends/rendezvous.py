"""How the processes of a group agree while they set something up, with a bound on every wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron_ep.backends import codec
from megatron_ep.backends.attempt import Attempt, attempt_of
from megatron_ep.errors import EPError

Kept = TypeVar("Kept")
Told = TypeVar("Told")

AGREED = "agreed"
FAILED = b"failed: "  # begins no JSON
DECISION_S = 10.0  # the first rank's word takes no longer than this once its own wait has ended
POLL_S = 5e-3
PIECE_BYTES = 4 << 20  # torch's TCPStore takes no value of more than 8 MiB


class StoreRendezvous:
    """The ranks of a process group, who talk through the store that torch.distributed was started with: no collective
    of the group's own backend runs, for which NCCL would make a communicator. Every method is collective, and so is
    construction: rendezvous of a group are numbered as its ranks come to them.

    In each exchange the first rank collects what all ranks have to tell and gives it to all of them. If somebody does
    not come within `timeout`, all that came raise the same EPError, and so does a rank that comes later; in a group's
    first rendezvous it may have to wait for the first rank as long again.

    group: the process group; None: the default group.
    timeout: how long the ranks wait for one that has not come.

    Raises EPError if the first rank does not come to the group's first rendezvous.
    """

    # How errors go on behind the number of a step, and behind a rank whose step failed.
    of_what = "of the buffer's set-up, reset or release"
    failure = "could not set up the buffer"

    _attempt: Attempt | None = None  # of the group, where one of the ranks may not know its name yet
    _store: dist.Store
    _pieces = 0  # in which the last exchange was told to all, by the first rank

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta):
        rank = dist.get_rank(group)
        group = group or dist.group.WORLD
        assert group is not None, "it has a rank"
        place = f"megatron_ep/{group.group_name}"
        store: dist.Store = dist.PrefixStore(place, _get_default_store())
        attempt = attempt_of(group, store)
        attempt.rendezvous += 1
        self._begin(store, place, rank, dist.get_world_size(group), timeout)
        self._attempt = attempt
        try:
            name = attempt.name(timeout)
        except RuntimeError as error:
            raise self._lost(error) from error
        if name is None:
            self.exchanges += 1
            raise EPError(self._absence([0], timeout))
        prefix = f"{name}/{attempt.rendezvous}"
        self._store = dist.PrefixStore(prefix, store)
        self._place = f"{place}/{prefix}"

    @classmethod
    def over(cls, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> StoreRendezvous:
        """Creates a rendezvous of ranks without a process group. store: must be, and have been, empty."""
        rendezvous = cls.__new__(cls)
        rendezvous._begin(dist.PrefixStore("megatron_ep", store), "megatron_ep", rank, world_size, timeout)
        return rendezvous

    def _begin(self, store: dist.Store, place: str, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.exchanges = 0  # so far
        self._store = store
        self._place = place  # in it, as errors name it

    def exchange(
        self, step: Callable[[], tuple[Kept, Told]], seconds: float = 0.0, *, kind: Any = None
    ) -> tuple[Kept, list[Told]]:
        """Runs a step that may fail on some ranks only, and fails on all of them then.

        Args:
            step: returns what it keeps for this rank, and what it tells the others: anything that `codec.encode` takes.
            seconds: what the step may take by itself, which the others wait in addition.
            kind: of what is told, see `codec.decode`. None: its type.

        Returns:
            What the step kept here, and what all ranks were told, by rank.

        Raises:
            ValueError, EPError: the step's own.
            EPError: with rank and reason, when the step failed otherwise or elsewhere, or a rank did not come; with the
                key, when the store holds what no rank has told.
        """
        kept: Any = None
        told: Any = None
        own: Exception | None = None
        try:
            kept, told = step()
            answer = codec.encode(told)
        except Exception as error:
            answer = FAILED + codec.encode(codec.readable(f"{type(error).__name__}: {error}"))
            own = error
            if not isinstance(error, (ValueError, EPError)):
                own = EPError(self._blame(self.rank, str(error)))
                own.__cause__ = error
        try:
            answers = self._all(answer, seconds)
        except EPError as lost:
            raise own or lost from None
        if own is not None:
            raise own
        for rank, answer in enumerate(answers):
            if answer.startswith(FAILED):
                reason = self._read(rank, answer.removeprefix(FAILED), str)
                raise EPError(self._blame(rank, codec.readable(reason)))
        kind = type(told) if kind is None else kind
        return kept, [self._read(rank, answer, kind) for rank, answer in enumerate(answers)]

    def gather(self, mine: Told, *, kind: Any = None) -> list[Told]:
        """What every rank gave, by rank. kind: as for `exchange`."""
        return self.exchange(lambda: (None, mine), kind=kind)[1]

    def agree(self, step: Callable[[], Kept], seconds: float = 0.0) -> Kept:
        """Runs a step that may fail on some ranks only, and fails on all of them then. Returns this rank's result."""
        return self.exchange(lambda: (step(), None), seconds)[0]

    def barrier(self) -> None:
        self.gather(None)

    def leave(self, word: str, is_gone: Callable[[int], bool], seconds: float) -> dict[int, str]:
        """The last step of a rendezvous: tells the others a word, once, and waits until all others have told theirs, or
        are gone for good. Unlike an exchange it may follow one that failed, and a missing rank is no error.

        Returns the words of the ranks that told theirs in time, this one's among them.
        Raises EPError when the store does not answer.
        """
        try:
            self._store.set(f"leaving/{self.rank}", word)
            left = self._told("leaving", is_gone, seconds)
            words = self._store.multi_get([f"leaving/{rank}" for rank in left])
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:  # the store may end with this process
                self._told("left", lambda rank: rank not in left or is_gone(rank), DECISION_S)
        except RuntimeError as error:
            raise self._lost(error) from error
        return {rank: self._text(text) for rank, text in zip(left, words, strict=True)}

    def _told(self, step: str, is_gone: Callable[[int], bool], seconds: float) -> list[int]:
        """The ranks that have reported, once all living ranks have or the time is over."""
        deadline = time.monotonic() + seconds
        absent = list(range(self.world_size))
        while True:
            gone = [rank for rank in absent if is_gone(rank)]
            absent = [rank for rank in absent if not self._store.check([f"{step}/{rank}"])]
            if set(absent) <= set(gone) or time.monotonic() > deadline:
                return [rank for rank in range(self.world_size) if rank not in absent]
            time.sleep(POLL_S)

    def connection(self) -> dist.Store | None:
        """A second connection to the store, for another thread: a store allows one wait at a time. None where torch
        makes none."""
        clone = getattr(self._store, "clone", None)  # torch before 2.8 has none
        try:
            return None if clone is None else clone()
        except RuntimeError:  # the store has none, or does not answer
            return None

    def _blame(self, rank: int, reason: str) -> str:
        return f"rank {rank} {self.failure}: {reason}"

    # ---- one exchange

    def _all(self, mine: bytes, seconds: float) -> list[bytes]:
        """What all ranks gave. Raises EPError when one did not come, or the store does not answer."""
        self.exchanges += 1
        wait = self.timeout + timedelta(seconds=seconds)
        try:
            self._store.set(self._key(self.rank), mine)
            decision = self._collect(wait) if self.rank == 0 else self._hear(wait)
            if decision != AGREED:
                raise EPError(decision)
            most = 2 * self.world_size * codec.most_bytes(self.world_size)  # each as text
            answers: list[bytes] = self._read("all", self._get_pieces(most), list[bytes], most)
            if len(answers) != self.world_size:
                raise self._foreign("all", f"answers of {len(answers)} ranks, must be of {self.world_size}")
            return answers
        except EPError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error

    def _collect(self, wait: timedelta) -> str:
        """Runs on the first rank: publishes the answers of all ranks, or which ones are missing."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        if not self._all_came(keys, wait):
            return self._decide(self._absence(self._missing(keys), wait))
        before, self._pieces = self._pieces, self._set_pieces(codec.encode(self._store.multi_get(keys)))
        decision = self._decide(AGREED)
        # all have come here, so nobody needs them any more
        for name in (*range(self.world_size), *map(_piece, range(before)), "decision"):
            self._store.delete_key(f"{self.exchanges - 1}/{name}")
        return decision

    def _set_pieces(self, data: bytes) -> int:
        """Returns how many: the last one is shorter than the others, which tells the reader that it is. What is read
        first is written last."""
        count = len(data) // PIECE_BYTES + 1
        for i in reversed(range(count)):
            self._store.set(self._key(_piece(i)), data[i * PIECE_BYTES : (i + 1) * PIECE_BYTES])
        return count

    def _get_pieces(self, most: int) -> bytes:
        pieces = [self._store.get(self._key("all"))]
        while len(pieces[-1]) == PIECE_BYTES and len(pieces) * PIECE_BYTES <= most:
            key = self._key(_piece(len(pieces)))
            if not self._is_there(key):
                break  # nor is it JSON then
            pieces.append(self._store.get(key))
        return b"".join(pieces)

    def _hear(self, wait: timedelta) -> str:
        """Runs on the others: returns what the first rank decided, or that it did not come."""
        decision = self._key("decision")
        if not self._is_there(decision) and not self._came([self._key(0)], wait):
            return self._decide(self._absence([0], wait))
        if not self._came([decision], wait + timedelta(seconds=DECISION_S)):
            return self._decide(f"rank 0 came to {self._name()}, and did not say whether all had")
        return self._text(self._store.get(decision))

    def _decide(self, decision: str) -> str:
        """The first rank to decide decides for all, also for those that come later."""
        return self._text(self._store.compare_set(self._key("decision"), "", decision))

    def _text(self, data: bytes) -> str:
        return codec.readable(data.decode(errors="replace"))

    def _read(self, name: object, data: bytes, kind: Any, most: int | None = None) -> Any:
        try:
            return codec.decode(data, kind, codec.most_bytes(self.world_size) if most is None else most)
        except ValueError as error:
            raise self._foreign(name, str(error)) from None

    def _lost(self, error: RuntimeError) -> EPError:
        return EPError(f"rank {self.rank} lost the store of torch.distributed: {error}")

    def _foreign(self, name: object, why: str) -> EPError:
        return EPError(
            f"the store of torch.distributed holds at key {self._place}/{self._key(name)} what no rank has told: {why}"
        )

    def _all_came(self, keys: list[str], wait: timedelta) -> bool:
        """To the first rank."""
        if self._attempt is None:
            return self._came(keys, wait)
        came = self._attempt.all_came(self._store, keys, wait)
        if came:
            self._attempt = None  # all know its name
        return came

    def _missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._is_there(key)]

    def _came(self, keys: list[str], wait: timedelta) -> bool:
        """Whether all keys are there in time. Raises RuntimeError when the store does not answer."""
        try:
            self._store.wait(keys, wait)
            return True
        except RuntimeError:  # a wait that expired has no type of its own in some stores; one that is lost raises again
            return self._store.check(keys)

    def _is_there(self, key: str) -> bool:
        return self._store.check([key])

    def _absence(self, missing: list[int], wait: timedelta) -> str:
        ranks = ", ".join(map(str, missing))
        return f"rank {ranks} did not come to {self._name()} within {wait.total_seconds():g} s"

    def _name(self) -> str:
        return f"step {self.exchanges} {self.of_what}"

    def _key(self, name: object) -> str:
        return f"{self.exchanges}/{name}"


def _piece(number: int) -> str:
    return f"all/{number}" if number else "all"

"""The rendezvous in which the processes of a group agree during a set-up. Every wait is bounded."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_ep.errors import EPError
from megatron_ep.meeting import codec, processes, stores
from megatron_ep.meeting.place import Place, Presence, new_name, place_of
from megatron_ep.meeting.stores import Wait

Kept = TypeVar("Kept")
Message = TypeVar("Message")

AGREED = "agreed"
NOT_COMING = "does not come to"
NAME = re.compile("[0-9a-f]{32}")
DECISION_S = 10.0  # seconds within which the first rank's decision arrives after its own wait has ended
HEARD_S = 5.0  # seconds that the first rank, whose process may keep the store, waits until others know of a failure
CHECK_S = 1.0  # seconds between two checks of a waiting rank for ranks that will not come; longer with many ranks
MIN_POLL_S, MAX_POLL_S = 1e-3, 20e-3
MAX_READERS = 20_000  # reads of a store per second, by all ranks together
MAX_NAMED = 8  # ranks in a message
NEAR = 8  # number of ranks on either side whose processes a rank checks: most are on its machine
PIECE_BYTES = 4 << 20  # torch's TCPStore allows values of at most 8 MiB

log = logging.getLogger(__name__)


class RankEndedError(EPError):
    """An exchange was given up because processes have ended. ranks: those that the first rank to see it knows of."""

    def __init__(self, message: str, ranks: Set[int] = frozenset()):  # pickle passes no ranks
        super().__init__(message)
        self.ranks = ranks


class StoreRendezvous:
    """The ranks of a process group, which communicate through a store of torch.distributed. No collective of the
    group's backend runs, for which NCCL would create a communicator. Every exchange is collective; the first one
    identifies the rendezvous.

    In each exchange the first rank collects the messages of all ranks and sends them to all. If a rank fails, if its
    process ends, or after `timeout`, all ranks that came raise the same EPError, and so does a rank that comes later.
    A rank that comes too late for a whole rendezvous takes part in the next one.

    group: the process group; None: the default group.
    timeout: time that ranks wait for one that has not come.

    Raises EPError if torch has no record of the group and a rank does not come.
    """

    # Parts of error messages, after the number of a step and after a rank whose step failed.
    of_what = "of the buffer's set-up"
    failure = "could not set up the buffer"

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta):
        self._begin(place_of(group, timeout), timeout)

    @classmethod
    def at(cls, place: Place, timeout: timedelta) -> StoreRendezvous:
        """Returns a rendezvous of ranks with a known place."""
        rendezvous = cls.__new__(cls)
        rendezvous._begin(place, timeout)
        return rendezvous

    @classmethod
    def over(cls, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> StoreRendezvous:
        """Returns a rendezvous of ranks without a process group. store: a store that nothing else uses."""
        return cls.at(Place(store, rank, world_size, "megatron_ep"), timeout)

    def _begin(self, place: Place, timeout: timedelta) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self.timeout = timeout
        self.exchanges = 0  # number of exchanges begun
        self.watch: Callable[[], Mapping[int, str | None]] = dict  # returns the fates of ranks that will not come
        self._place = place
        place.came = time.time()
        self._name = "" if self.rank else new_name()
        self._answered: set[str] = set()
        self._met: dict[int, Presence] = {}  # last known presences
        self._gone = threading.Event()  # set when the caller has returned, so that threads stop waiting
        self._heard_at = 0.0  # when the store last answered, by `time.monotonic()`
        self._left = _Left(place.world_size)
        self._store = self._connection = self._ask(place.connection)
        if self._name:
            self._meet_at(self._name)

    def _meet_at(self, name: str) -> None:
        self._name = self._left.name = name
        self._store = dist.PrefixStore(name, self._connection)
        if self.rank == 0:
            weakref.finalize(self, self._place.left.append, self._left.take).atexit = False

    @property
    def name(self) -> str:
        """The unique name of this rendezvous, equal on all ranks from the first exchange on."""
        return self._name

    def exchange(
        self, step: Callable[[], tuple[Kept, Message]], seconds: float = 0.0, *, kind: Any = None
    ) -> tuple[Kept, list[Message]]:
        """Runs a step, and fails on all ranks if it fails on one.

        step: returns a result for this rank, and a message to all ranks, of a type that `codec.encode` takes.
        seconds: duration of the step, which other ranks wait in addition to the timeout.
        kind: type of the messages, see `codec.decode`. None: the type of this rank's.

        Returns this rank's result, and the messages of all ranks, by rank.

        Raises a ValueError or EPError of the step on this rank; EPError with rank and reason if the step failed
        otherwise or on another rank, if a rank did not come, or if one is in another collective call; EPError with the
        key if the store has a value that no rank wrote.
        """
        assert self._name or not self.exchanges, "after a first exchange that failed there must be another rendezvous"
        self.exchanges += 1
        self._place.begun += self.exchanges == 1
        try:
            kept, message = step()
            answer = f"{self.of_what}\n".encode() + codec.encode(message)
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception) and not isinstance(error, (ValueError, EPError)):
                raise EPError(self._blame(self.rank, str(error))) from error
            raise
        wait = self.timeout.total_seconds() + seconds
        try:
            answers = self._ask(lambda: self._meet(answer, wait))
        except EPError:
            raise
        except BaseException as error:  # including KeyboardInterrupt
            self._fail(f"{type(error).__name__}: {error}")
            raise
        kind = type(message) if kind is None else kind
        return kept, [self._read(rank, self._message(rank, answer), kind) for rank, answer in enumerate(answers)]

    def gather(self, mine: Message, *, kind: Any = None) -> list[Message]:
        """Returns the values of all ranks, by rank. kind: see `exchange`."""
        return self.exchange(lambda: (None, mine), kind=kind)[1]

    def agree(self, step: Callable[[], Kept], seconds: float = 0.0) -> Kept:
        """Runs a step, and fails on all ranks if it fails on one. Returns this rank's result."""
        return self.exchange(lambda: (step(), None), seconds)[0]

    def barrier(self) -> None:
        self.gather(None)

    def check(self) -> None:
        """Raises EPError if a rank has failed in this step, or its process has ended. For steps that wait for other
        ranks, except in the first exchange."""

        def decided() -> str:
            self._check_ranks()
            return self._decision()

        if why := self._ask(decided):
            raise _error_of(why)

    def leave(self, word: str, is_gone: Callable[[int], bool], seconds: float) -> dict[int, str]:
        """Sends a word to the other ranks, and waits until all others have sent theirs or are gone. The last step of a
        rendezvous. Unlike an exchange it may follow a failed one, and a missing rank is no error.

        Returns the words of the ranks that sent theirs in time, including this rank.
        Raises EPError if the store does not answer.
        """

        def publish() -> dict[int, str]:
            self._store.set(f"leaving/{self.rank}", word)
            left = self._told("leaving", is_gone, seconds)
            words = self._store.multi_get([f"leaving/{rank}" for rank in left])
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:  # the store may end with this process
                self._told("left", lambda rank: rank not in left or is_gone(rank), DECISION_S)
            return {rank: self._text(text) for rank, text in zip(left, words, strict=True)}

        return self._ask(publish)

    def _told(self, step: str, is_gone: Callable[[int], bool], seconds: float) -> list[int]:
        """Returns the ranks that have reported, when all living ranks have or the time is over."""
        absent = list(range(self.world_size))

        def have() -> bool:
            nonlocal absent
            gone = {rank for rank in absent if is_gone(rank)}
            absent = [rank for rank in absent if not self._store.check([f"{step}/{rank}"])]
            return set(absent) <= gone

        self._poll(have, Wait(seconds, self._silence))
        return [rank for rank in range(self.world_size) if rank not in absent]

    def connection(self) -> dist.Store | None:
        """Returns the store with the keys of this rendezvous, for a thread that hears of failures; None if a wait of
        torch's may hold its connection."""
        if not hasattr(self._store, "clone"):
            return None
        return dist.PrefixStore(self._name, self._ask(lambda: self._place.connection(stores.FAILURES)))

    def _blame(self, rank: int, reason: str) -> str:
        return f"rank {rank} {self.failure}: {codec.readable(reason)}"

    # ---- an exchange, in a thread that may be abandoned

    def _ask(self, call: Callable[[], Kept]) -> Kept:
        """Returns the result of calls of the store. Raises EPError if the store does not answer one in time."""
        gone = self._gone = threading.Event()
        self._heard_at = time.monotonic()
        done = stores.in_thread(call)
        try:
            while not futures.wait([done], self._heard_at + self._silence - time.monotonic()).done:
                if time.monotonic() > self._heard_at + self._silence:
                    raise EPError(f"{stores.NO_ANSWER} within {self._silence:g} s")
            return done.result()
        except EPError:
            if not done.done():
                stores.forget(self._place.store)
            raise
        except RuntimeError as error:
            stores.forget(self._place.store)
            raise self._lost(error) from error
        finally:
            gone.set()

    @property
    def _silence(self) -> float:
        """Seconds for which the store may be silent."""
        return max(stores.STORE_S, self.timeout.total_seconds())

    def _meet(self, mine: bytes, wait: float) -> list[bytes]:
        """Returns the messages of all ranks. Raises EPError if one did not come."""
        waiting = Wait(wait, self._silence)
        if self.exchanges > 1:
            waiting.answer(self._reconnect)
            return self._answers(mine, waiting, wait)
        if not self._place.meeting.acquire(timeout=wait):
            raise EPError(f"another thread began to meet the same ranks, and has not met them within {wait:g} s")
        try:
            if self.rank == 0:
                waiting.answer(lambda: self._place.write(self._connection))
            elif not self._name:
                self._learn_name(waiting, wait)
            answers = self._answers(mine, waiting, wait)
        finally:
            self._place.meeting.release()
        self._place.has_failed = False
        if self.rank == 0:
            while self._place.left:  # no rank needs the keys of earlier rendezvous
                self._place.left.pop()(self._connection)
        return answers

    def _reconnect(self) -> None:
        """Connects anew if the connection was lost after the last exchange, for example in a call of another thread."""
        self._connection = self._place.connection()
        self._store = dist.PrefixStore(self._name, self._connection)

    def _learn_name(self, waiting: Wait, wait: float) -> None:
        """Asks rank 0 for the name of the rendezvous. Its answer to a new question shows that it lives."""
        question, place, store = new_name(), self._place, self._connection
        answer, why = f"answer/{question}", ""
        warn = self._warning(lambda: self._waits_for([0]), wait)

        def check() -> None:
            nonlocal why
            warn()
            why = self._why_not()

        waiting.answer(lambda: place.write(store, question))
        if not self._poll(lambda: bool(why) or store.check([answer]), waiting, check) or why:
            place.write(store)
            raise _error_of(why or self._absence([0], wait))
        name = (stores.read(store, answer) or b"").decode(errors="replace")
        if not NAME.fullmatch(name):
            raise EPError("somebody else than rank 0 has answered where the ranks of the buffer meet")
        store.delete_key(answer)
        place.write(store)  # withdraws the question, which rank 0 would answer again in the next rendezvous
        place.heard.add(name)
        self._meet_at(name)

    def _why_not(self) -> str:
        """Returns why a rendezvous that has not begun will not take place; "" if it may."""
        for rank, presence in self._presences(self._near()).items():
            if presence.fate == processes.ENDED:
                return self._ended({rank: processes.ENDED})
            if why := self._place.failure_of(presence):
                return why
        return ""

    def _answer_questions(self, ranks: list[int]) -> None:
        """Answers ranks that ask for the name, on the first rank. Questions of earlier jobs are harmless."""
        for presence in self._presences(ranks).values():
            if why := self._place.failure_of(presence):
                self._end_early(why, presence.question)
            elif NAME.fullmatch(presence.question) and presence.question not in self._answered:
                self._answered.add(presence.question)
                self._connection.set(f"answer/{presence.question}", self._name)

    def _end_early(self, why: str, name: str = "") -> None:
        """Ends the first exchange on the first rank, so that ranks that come later also fail."""
        self._place.write(self._connection, f"{self._name} {name}", why)
        self._decide(why)

    def _answers(self, mine: bytes, waiting: Wait, wait: float) -> list[bytes]:
        self._store.set(self._key(self.rank), mine)
        decision = self._collect(waiting, wait) if self.rank == 0 else self._hear(waiting)
        if decision != AGREED:
            raise _error_of(decision)
        most = 2 * self.world_size * codec.most_bytes(self.world_size)  # messages are encoded as text
        answers: list[bytes] = self._read("all", self._get_pieces(most), list[bytes], most)
        if len(answers) != self.world_size:
            raise self._foreign("all", f"answers of {len(answers)} ranks, must be of {self.world_size}")
        return answers

    def _collect(self, waiting: Wait, wait: float) -> str:
        """Collects the messages for all ranks, on the first rank. Returns the decision."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        absent = list(range(self.world_size))
        warn = self._warning(lambda: self._waits_for(self._missing()), wait)

        def is_over() -> bool:
            nonlocal absent
            if self._store.check(keys):
                return True
            if self.exchanges == 1:
                absent = [rank for rank in absent if not self._is_there(rank)]
                self._answer_questions(absent)
            return bool(self._decision())

        def check() -> None:
            warn()
            self._check_ranks()

        if not self._poll(is_over, waiting, check):
            self._decide(self._absence(self._missing(), wait))
        if decision := self._decision():
            self._left.exchanges.append((self.exchanges, 0))
            self._wait_until_heard()
            return decision
        pieces = self._set_pieces(codec.encode(self._store.multi_get(keys)))
        decision = self._decide(AGREED)
        self._left.take_exchanges(self._store)  # all ranks have come to this one
        self._left.exchanges.append((self.exchanges, pieces))
        return decision

    def _hear(self, waiting: Wait) -> str:
        """Returns the first rank's decision, or that it did not come, on the other ranks."""
        decision = ""

        def is_over() -> bool:
            nonlocal decision
            decision = self._decision()
            return bool(decision)

        if not self._poll(is_over, waiting, self._check_ranks):
            if not self._is_there(0):
                decision = self._decide(self._absence([0], self.timeout.total_seconds()))
            elif not self._poll(is_over, Wait(DECISION_S / 2, self._silence), self._check_ranks):
                decision = self._decide(f"rank 0 came to {self._step()}, and did not say whether all had")
        if decision != AGREED:
            self._store.set(self._key(f"heard/{self.rank}"), "")
        return decision

    def _wait_until_heard(self) -> None:
        """Waits on the first rank until others know of a failure, because the store may end with its process."""
        waiting = [rank for rank in range(1, self.world_size) if self._is_there(rank)]
        self._poll(lambda: all(self._is_there(f"heard/{rank}") for rank in waiting), Wait(HEARD_S, self._silence))

    def _fail(self, reason: str) -> None:
        """Publishes that this rank has failed in this exchange, if the store answers in time."""
        text = self._blame(self.rank, reason)
        self._place.has_failed = True

        def publish() -> None:
            if not self._name:
                self._place.write(self._connection, new_name(), text)
            elif self.rank == 0 and self.exchanges == 1:
                self._end_early(text)
            else:
                self._decide(text)
            if self.rank == 0:
                self._wait_until_heard()

        with contextlib.suppress(RuntimeError):
            self._ask(publish)

    def _poll(self, is_over: Callable[[], bool], waiting: Wait, check: Callable[[], None] = lambda: None) -> bool:
        """Waits until `is_over`, and returns whether it was in time. Calls `check` soon, then about once a second."""
        gone, pause = self._gone, MIN_POLL_S
        check_at = time.monotonic() + MAX_POLL_S
        while not waiting.answer(is_over):
            now = self._heard_at = time.monotonic()
            if gone.is_set():
                raise EPError("nobody waits for it any more")
            if waiting.is_over:
                return False
            if now > check_at:
                waiting.answer(check)
                self._heard_at = time.monotonic()
                check_at = now + max(CHECK_S, 2 * NEAR * self.world_size / MAX_READERS)
            time.sleep(pause)
            pause = min(1.5 * pause, max(MAX_POLL_S, self.world_size / MAX_READERS))
        self._heard_at = time.monotonic()
        return True

    def _check_ranks(self) -> None:
        """Ends the exchange for all ranks if a rank will not come."""
        fates = {rank: one.fate for rank, one in self._presences(self._near()).items()} | dict(self.watch())
        ended = {rank: fate for rank, fate in sorted(fates.items()) if fate and fate.startswith(processes.ENDED)}
        # Messages are read after fates, because a rank may do its part and then end.
        if ended := {rank: fate for rank, fate in ended.items() if not self._is_there(rank)}:
            (self._end_early if self.rank == 0 and self.exchanges == 1 else self._decide)(self._ended(ended))

    def _presences(self, ranks: Iterable[int]) -> dict[int, Presence]:
        found = {rank: one for rank in ranks if rank != self.rank and (one := self._place.read(self._connection, rank))}
        self._met.update(found)
        return found

    def _lost(self, error: RuntimeError) -> EPError:
        fates = {rank: presence.fate for rank, presence in self._met.items()} | dict(self.watch())
        ended = [f"the process of rank {rank} {fate}" for rank, fate in fates.items() if fate]
        why = "; ".join([str(error).splitlines()[0], *ended])
        return EPError(f"rank {self.rank} does not reach the store of torch.distributed in {self._step()}: {why}")

    def _near(self) -> set[int]:
        return {0, *range(max(0, self.rank - NEAR), min(self.world_size, self.rank + NEAR + 1))}

    def _decision(self) -> str:
        """Returns the decision for all ranks; "" if there is none yet."""
        return self._text(stores.read(self._store, self._key("decision")) or b"")

    def _decide(self, decision: str) -> str:
        """Returns the decision for all ranks, including later ones: that of the first rank to decide."""
        return self._text(self._store.compare_set(self._key("decision"), "", decision))

    def _set_pieces(self, data: bytes) -> int:
        """Writes data in pieces, of which the last is shorter, and returns their number. The first is written last,
        because readers begin with it."""
        count = len(data) // PIECE_BYTES + 1
        for i in reversed(range(count)):
            self._store.set(self._key(_piece(i)), data[i * PIECE_BYTES : (i + 1) * PIECE_BYTES])
        return count

    def _get_pieces(self, most: int) -> bytes:
        pieces: list[bytes] = []
        while not pieces or (len(pieces[-1]) == PIECE_BYTES and len(pieces) * PIECE_BYTES <= most):
            piece = stores.read(self._store, self._key(_piece(len(pieces))))
            if piece is None:
                break  # the decoder then raises, because incomplete data is not JSON
            pieces.append(piece)
        return b"".join(pieces)

    def _text(self, data: bytes) -> str:
        return codec.readable(data.decode(errors="replace"))

    def _read(self, name: object, data: bytes, kind: Any, most: int | None = None) -> Any:
        try:
            return codec.decode(data, kind, codec.most_bytes(self.world_size) if most is None else most)
        except ValueError as error:
            raise self._foreign(name, str(error)) from None

    def _message(self, rank: int, answer: bytes) -> bytes:
        """Returns a rank's message in an answer. Raises EPError if the rank is in another collective call."""
        of_what, end, message = answer.partition(b"\n")
        if not end or of_what == self.of_what.encode():
            return message or answer
        where = f"rank {rank} came to step {self.exchanges} {self._text(of_what)}, rank {self.rank} to {self._step()}"
        raise EPError(f"{where}: all ranks must make the same collective calls in the same order")

    def _foreign(self, name: object, why: str) -> EPError:
        key = f"{self._place.name}/{self._name}/{self._key(name)}"
        return EPError(f"the store of torch.distributed holds at key {key} a value that no rank has written: {why}")

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if not self._is_there(rank)]

    def _is_there(self, name: object) -> bool:
        return self._store.check([self._key(name)])

    def _absence(self, missing: list[int], seconds: float) -> str:
        text = f"rank {', '.join(map(str, missing))} did not come to {self._step()} within {seconds:g} s"
        fates = {rank: one.fate for rank, one in self._presences(missing[:NEAR]).items()}
        return text + "".join(f"; the process of rank {rank} {fate}" for rank, fate in fates.items() if fate)

    def _waits_for(self, missing: list[int]) -> str:
        ranks = ", ".join(map(str, missing[:MAX_NAMED])) + (", ..." if len(missing) > MAX_NAMED else "")
        many = f"{len(missing)} of {self.world_size} ranks at {stores.address(self._place.store)}"
        return f"rank {self.rank} waits for {many} in {self._step()}: rank {ranks}"

    def _warning(self, text: Callable[[], str], wait: float) -> Callable[[], None]:
        """Returns a function that logs the text now and then while this rank waits."""
        began = time.monotonic()
        warn_at = stores.next_warning(0.0)

        def warn() -> None:
            nonlocal warn_at
            waited = time.monotonic() - began
            if waited > warn_at:
                warn_at = stores.next_warning(waited)
                log.warning("%s; it has waited for %.0f s of at most %g s", text(), waited, wait)

        return warn

    def _ended(self, fates: Mapping[int, str]) -> str:
        why = "; ".join(dict.fromkeys(fates.values()))
        return f"rank {', '.join(map(str, fates))} {NOT_COMING} {self._step()}: the process {why}"

    def _step(self) -> str:
        return f"step {self.exchanges} {self.of_what}"

    def _key(self, name: object) -> str:
        return f"{self.exchanges}/{name}"


@dataclass
class _Left:
    """The keys of a rendezvous that are still in the store, on the first rank. exchanges: their numbers, each with the
    number of pieces of its messages; 0 if it failed."""

    world_size: int
    name: str = ""
    exchanges: list[tuple[int, int]] = field(default_factory=list)

    def take(self, connection: dist.Store) -> None:
        """Deletes all keys after the rendezvous."""
        store = dist.PrefixStore(self.name, connection)
        self.take_exchanges(store)
        for rank in range(self.world_size):
            store.delete_key(f"leaving/{rank}")
            store.delete_key(f"left/{rank}")

    def take_exchanges(self, store: dist.Store) -> None:
        """Deletes the keys of exchanges after all ranks have come to a later one."""
        while self.exchanges:
            exchange, pieces = self.exchanges.pop()
            names: list[object] = [*range(self.world_size), *map(_piece, range(pieces)), "decision"]
            names += [f"heard/{rank}" for rank in range(self.world_size) if not pieces]
            for name in names:
                store.delete_key(f"{exchange}/{name}")


def _error_of(decision: str) -> EPError:
    ended = re.match(rf"rank ([0-9, ]{{1,99}}) {NOT_COMING} ", decision)
    return RankEndedError(decision, set(map(int, re.findall("[0-9]+", ended[1])))) if ended else EPError(decision)


def _piece(number: int) -> str:
    return f"all/{number}" if number else "all"


def agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a name for this start of a job. Collective. Raises EPError if a rank does not come."""
    rendezvous = StoreRendezvous.over(store, rank, world_size, timeout)
    rendezvous.of_what, rendezvous.failure = "of the job's start", "could not start"
    rendezvous.barrier()
    return rendezvous.name

"""How the processes of a group agree while they set something up, with a bound on every wait."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_ep.errors import EPError
from megatron_ep.meeting import codec, processes
from megatron_ep.meeting.place import Place, Presence, bounded, connected, new_name, place_of

Kept = TypeVar("Kept")
Told = TypeVar("Told")

AGREED = "agreed"
NOT_COMING = "does not come to"
NAME = re.compile("[0-9a-f]{32}")
DECISION_S = 10.0  # the first rank's word takes no longer than this once its own wait has ended
HEARD_S = 2.0  # that the first rank, whose process may keep the store, waits until others have heard of a failure
LOOK_S = 1.0  # how often a rank that waits looks for ranks that will not come: of many ranks each looks less often
WARN_S = 10.0  # after so long a wait is said to take long
MIN_POLL_S, MAX_POLL_S = 1e-3, 20e-3
MAX_READERS = 20_000  # looks a second of all ranks together at one store
NEAR = 8  # ranks before and behind one, of which it looks whether their processes live: mostly those of its machine
PIECE_BYTES = 4 << 20  # torch's TCPStore takes no value of more than 8 MiB

log = logging.getLogger(__name__)


class RankEndedError(EPError):
    """An exchange was given up because processes have ended. ranks: theirs, as far as the first to see it knows."""

    def __init__(self, message: str, ranks: Set[int] = frozenset()):  # for pickle, without them
        super().__init__(message)
        self.ranks = ranks


class StoreRendezvous:
    """The ranks of a process group, who talk through a store of torch.distributed: no collective of the group's own
    backend runs, for which NCCL would make a communicator. Every exchange is collective; the first one shows which
    rendezvous of the ranks this is.

    In each exchange the first rank collects what all ranks have to tell and gives it to all of them. As soon as a rank
    fails, its process is seen to have ended, or `timeout` is over, all that came raise the same EPError, and so does a
    rank that comes later. A rank that comes late to a whole rendezvous takes part in the next one.

    group: the process group; None: the default group.
    timeout: how long the ranks wait for one that has not come.

    Raises EPError if torch has no record of the group and a rank does not come.
    """

    # How errors go on behind the number of a step, and behind a rank whose step failed.
    of_what = "of the buffer's set-up"
    failure = "could not set up the buffer"

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta):
        self._begin(place_of(group, timeout), timeout)

    @classmethod
    def at(cls, place: Place, timeout: timedelta) -> StoreRendezvous:
        """Of ranks whose place is known."""
        rendezvous = cls.__new__(cls)
        rendezvous._begin(place, timeout)
        return rendezvous

    @classmethod
    def over(cls, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> StoreRendezvous:
        """Of ranks without a process group. store: nothing else is in it."""
        return cls.at(Place(dist.PrefixStore("megatron_ep", store), rank, world_size, "megatron_ep"), timeout)

    def _begin(self, place: Place, timeout: timedelta) -> None:
        self.rank, self.world_size = place.rank, place.world_size
        self.timeout = timeout
        self.exchanges = 0  # so far
        self.watch: Callable[[], Mapping[int, str | None]] = (
            dict  # what has become of ranks that will not come any more
        )
        self._place = place
        place.came = time.time()
        self._store = self._connection = bounded(DECISION_S, lambda: connected(place.store))
        self._name = "" if self.rank else new_name()
        self._answered: set[str] = set()
        self._met: dict[int, Presence] = {}  # as they were seen last
        self._gone = threading.Event()  # whether the caller has left, and with it the reason to wait
        self._left = _Left(place.world_size)
        if self._name:
            self._meet_at(self._name)

    def _meet_at(self, name: str) -> None:
        self._name = self._left.name = name
        self._store = dist.PrefixStore(name, self._connection)
        if self.rank == 0:
            weakref.finalize(self, self._place.left.append, self._left.take).atexit = False

    @property
    def name(self) -> str:
        """Of this rendezvous alone, the same on all ranks, from the first exchange on."""
        return self._name

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
                key, if the store holds a value that no rank has written.
        """
        assert self._name or not self.exchanges, "after a first exchange that failed there must be another rendezvous"
        self.exchanges += 1
        self._place.begun += self.exchanges == 1
        try:
            kept, told = step()
            answer = codec.encode(told)
        except BaseException as error:
            self._fail(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception) and not isinstance(error, (ValueError, EPError)):
                raise EPError(self._blame(self.rank, str(error))) from error
            raise
        wait = self.timeout.total_seconds() + seconds
        try:
            answers = self._ask(wait + DECISION_S, lambda: self._meet(answer, wait))
        except EPError:
            raise
        except BaseException as error:  # Ctrl-C
            self._fail(f"{type(error).__name__}: {error}")
            raise
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

    def look(self) -> None:
        """For a step that waits for other ranks, not of the first exchange. Raises EPError if one of them has failed in
        this step already, or its process has ended."""

        def decided() -> str:
            self._look()
            return self._text(self._store.get(self._key("decision"))) if self._is_there("decision") else ""

        if why := self._ask(DECISION_S, decided):
            raise _error_of(why)

    def leave(self, word: str, is_gone: Callable[[int], bool], seconds: float) -> dict[int, str]:
        """The last step of a rendezvous: tells the others a word, once, and waits until all others have told theirs, or
        are gone for good. Unlike an exchange it may follow one that failed, and a missing rank is no error.

        Returns the words of the ranks that told theirs in time, this one's among them.
        Raises EPError when the store does not answer.
        """

        def tell() -> dict[int, str]:
            self._store.set(f"leaving/{self.rank}", word)
            left = self._told("leaving", is_gone, seconds)
            words = self._store.multi_get([f"leaving/{rank}" for rank in left])
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:  # the store may end with this process
                self._told("left", lambda rank: rank not in left or is_gone(rank), DECISION_S)
            return {rank: self._text(text) for rank, text in zip(left, words, strict=True)}

        return self._ask(seconds + 2 * DECISION_S, tell)

    def _told(self, step: str, is_gone: Callable[[int], bool], seconds: float) -> list[int]:
        """The ranks that have reported, once all living ranks have or the time is over."""
        absent = list(range(self.world_size))

        def have() -> bool:
            nonlocal absent
            gone = {rank for rank in absent if is_gone(rank)}
            absent = [rank for rank in absent if not self._store.check([f"{step}/{rank}"])]
            return set(absent) <= gone

        self._poll(have, seconds, lambda: None)
        return [rank for rank in range(self.world_size) if rank not in absent]

    def connection(self) -> dist.Store | None:
        """Another connection to the store, for another thread. None where torch makes none."""
        try:
            return bounded(DECISION_S, self._store.clone) if hasattr(self._store, "clone") else None
        except (RuntimeError, EPError):  # the store has none, or does not answer
            return None

    def _blame(self, rank: int, reason: str) -> str:
        return f"rank {rank} {self.failure}: {codec.readable(reason)}"

    # ---- one exchange, in a thread that may be left to itself

    def _ask(self, seconds: float, call: Callable[[], Kept]) -> Kept:
        """Raises EPError when the store does not answer in time, or not at all."""
        gone = self._gone = threading.Event()
        try:
            return bounded(seconds, call)
        except EPError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error
        finally:
            gone.set()

    def _meet(self, mine: bytes, wait: float) -> list[bytes]:
        """What all ranks gave. Raises EPError when one did not come."""
        end = time.monotonic() + wait
        if self.exchanges > 1:
            return self._answers(mine, end, wait)
        if not self._place.meeting.acquire(timeout=wait):
            raise EPError(f"another thread began to meet the same ranks, and has not met them within {wait:g} s")
        try:
            if self.rank == 0:
                self._place.write(self._connection)
            elif not self._name:
                self._learn_name(end, wait)
            answers = self._answers(mine, end, wait)
        finally:
            self._place.meeting.release()
        self._place.has_failed = False
        if self.rank == 0:
            while self._place.left:  # all have come here
                self._place.left.pop()(self._connection)
        return answers

    def _learn_name(self, end: float, wait: float) -> None:
        """Rank 0 answers a question that nobody has asked before: it lives, and comes to this rendezvous."""
        question, place, store = new_name(), self._place, self._connection
        answer, why = f"answer/{question}", ""

        def look() -> None:
            nonlocal why
            why = self._why_not()

        place.write(store, question)
        if not self._poll(lambda: bool(why) or store.check([answer]), end - time.monotonic(), look) or why:
            place.write(store)
            raise _error_of(why or self._absence([0], wait))
        name = store.get(answer).decode(errors="replace")
        if not NAME.fullmatch(name):
            raise EPError("somebody else than rank 0 has answered where the ranks of the buffer meet")
        store.delete_key(answer)
        place.write(store)  # or rank 0 would answer once more in the next rendezvous, and nobody take that
        place.heard.add(name)
        self._meet_at(name)

    def _why_not(self) -> str:
        """Why a rendezvous that has not begun will not take place; "" if it may."""
        for rank, presence in self._presences(self._near()).items():
            if presence.fate == processes.ENDED:
                return self._ended({rank: processes.ENDED})
            if why := self._place.failure_of(presence):
                return why
        return ""

    def _answer_questions(self, ranks: list[int]) -> None:
        """By the first rank: to those that do not know yet where to meet. Questions of earlier jobs are harmless."""
        for presence in self._presences(ranks).values():
            if why := self._place.failure_of(presence):
                self._end_early(why, presence.question)
            elif NAME.fullmatch(presence.question) and presence.question not in self._answered:
                self._answered.add(presence.question)
                self._connection.set(f"answer/{presence.question}", self._name)

    def _end_early(self, why: str, name: str = "") -> None:
        """By the first rank, in the first exchange: those that come later hear of it, too."""
        self._place.write(self._connection, f"{self._name} {name}", why)
        self._decide(why)

    def _answers(self, mine: bytes, end: float, wait: float) -> list[bytes]:
        self._store.set(self._key(self.rank), mine)
        decision = self._collect(end, wait) if self.rank == 0 else self._hear(end)
        if decision != AGREED:
            raise _error_of(decision)
        most = 2 * self.world_size * codec.most_bytes(self.world_size)  # each as text
        answers: list[bytes] = self._read("all", self._get_pieces(most), list[bytes], most)
        if len(answers) != self.world_size:
            raise self._foreign("all", f"answers of {len(answers)} ranks, must be of {self.world_size}")
        return answers

    def _collect(self, end: float, wait: float) -> str:
        """By the first rank: everyone's answers for all, or why there are none."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        warn_at = time.monotonic() + WARN_S

        def is_over() -> bool:
            if self._store.check(keys):
                return True
            if self.exchanges == 1:
                self._answer_questions(self._missing())
            return self._is_there("decision")

        def look() -> None:
            nonlocal warn_at
            if time.monotonic() > warn_at:
                warn_at = end
                log.warning("%s; they may take %g s", self._absence(self._missing(), WARN_S), wait)
            self._look()

        if not self._poll(is_over, end - time.monotonic(), look):
            self._decide(self._absence(self._missing(), wait))
        if self._is_there("decision"):
            self._left.exchanges.append((self.exchanges, 0))
            self._wait_until_heard()
            return self._text(self._store.get(self._key("decision")))
        pieces = self._set_pieces(codec.encode(self._store.multi_get(keys)))
        decision = self._decide(AGREED)
        self._left.take_exchanges(self._store)  # all have come here, so nobody needs them any more
        self._left.exchanges.append((self.exchanges, pieces))
        return decision

    def _hear(self, end: float) -> str:
        """By the others: what the first rank decided, or that it did not come."""

        def is_over() -> bool:
            return self._is_there("decision") or (time.monotonic() > end and not self._is_there(0))

        wait = end - time.monotonic()
        if not self._poll(is_over, wait + DECISION_S / 2, self._look):
            self._decide(f"rank 0 came to {self._step()}, and did not say whether all had")
        if not self._is_there("decision"):
            self._decide(self._absence([0], self.timeout.total_seconds()))
        decision = self._text(self._store.get(self._key("decision")))
        if decision != AGREED:
            self._store.set(self._key(f"heard/{self.rank}"), "")
        return decision

    def _wait_until_heard(self) -> None:
        """By the first rank, whose process may end now, and the store with it."""
        waiting = [rank for rank in range(1, self.world_size) if self._is_there(rank)]

        def have_heard() -> bool:
            return all(self._is_there(f"heard/{rank}") for rank in waiting)

        self._poll(have_heard, HEARD_S, lambda: None)

    def _fail(self, reason: str) -> None:
        """Tells the others that this rank has failed in this exchange, if the store answers in time."""
        text = self._blame(self.rank, reason)
        self._place.has_failed = True

        def tell() -> None:
            if not self._name:
                self._place.write(self._connection, new_name(), text)
            elif self.rank == 0 and self.exchanges == 1:
                self._end_early(text)
            else:
                self._decide(text)
            if self.rank == 0:
                self._wait_until_heard()

        with contextlib.suppress(RuntimeError):
            self._ask(DECISION_S, tell)

    def _poll(self, is_over: Callable[[], bool], seconds: float, look: Callable[[], None]) -> bool:
        """Whether it was over in time. Has a look soon, and then about once a second."""
        gone, pause = self._gone, MIN_POLL_S
        now = time.monotonic()
        end, look_at = now + seconds, now + MAX_POLL_S
        while not is_over():
            now = time.monotonic()
            if gone.is_set():
                raise EPError("nobody waits for it any more")
            if now > end:
                return False
            if now > look_at:
                look()
                look_at = now + max(LOOK_S, 2 * NEAR * self.world_size / MAX_READERS)
            time.sleep(pause)
            pause = min(1.5 * pause, max(MAX_POLL_S, self.world_size / MAX_READERS))
        return True

    def _look(self) -> None:
        """Decides for all if a rank will not come."""
        fates = {rank: one.fate for rank, one in self._presences(self._near()).items()} | dict(self.watch())
        ended = {rank: fate for rank, fate in sorted(fates.items()) if fate and fate.startswith(processes.ENDED)}
        # in this order: a rank may do its part, and then end
        if ended := {rank: fate for rank, fate in ended.items() if not self._is_there(rank)}:
            (self._end_early if self.rank == 0 and self.exchanges == 1 else self._decide)(self._ended(ended))

    def _presences(self, ranks: Iterable[int]) -> dict[int, Presence]:
        read = {rank: self._place.read(self._connection, rank) for rank in ranks if rank != self.rank}
        found = {rank: presence for rank, presence in read.items() if presence is not None}
        self._met.update(found)
        return found

    def _lost(self, error: RuntimeError) -> EPError:
        fates = {rank: presence.fate for rank, presence in self._met.items()} | dict(self.watch())
        ended = [f"the process of rank {rank} {fate}" for rank, fate in fates.items() if fate]
        why = "; ".join([str(error).splitlines()[0], *ended])
        return EPError(f"rank {self.rank} does not reach the store of torch.distributed in {self._step()}: {why}")

    def _near(self) -> set[int]:
        return {0, *range(max(0, self.rank - NEAR), min(self.world_size, self.rank + NEAR + 1))}

    def _decide(self, decision: str) -> str:
        """The first rank to decide decides for all, also for those that come later."""
        return self._text(self._store.compare_set(self._key("decision"), "", decision))

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
            if not self._is_there(_piece(len(pieces))):
                break  # nor is it JSON then
            pieces.append(self._store.get(self._key(_piece(len(pieces)))))
        return b"".join(pieces)

    def _text(self, data: bytes) -> str:
        return codec.readable(data.decode(errors="replace"))

    def _read(self, name: object, data: bytes, kind: Any, most: int | None = None) -> Any:
        try:
            return codec.decode(data, kind, codec.most_bytes(self.world_size) if most is None else most)
        except ValueError as error:
            raise self._foreign(name, str(error)) from None

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

    def _ended(self, fates: Mapping[int, str]) -> str:
        why = "; ".join(dict.fromkeys(fates.values()))
        return f"rank {', '.join(map(str, fates))} {NOT_COMING} {self._step()}: the process {why}"

    def _step(self) -> str:
        return f"step {self.exchanges} {self.of_what}"

    def _key(self, name: object) -> str:
        return f"{self.exchanges}/{name}"


@dataclass
class _Left:
    """What a rendezvous leaves in the store, as the first rank knows: exchanges, and in how many pieces they were told
    to all; 0: one that failed."""

    world_size: int
    name: str = ""
    exchanges: list[tuple[int, int]] = field(default_factory=list)

    def take(self, connection: dist.Store) -> None:
        """When the rendezvous is over."""
        store = dist.PrefixStore(self.name, connection)
        self.take_exchanges(store)
        for rank in range(self.world_size):
            store.delete_key(f"leaving/{rank}")
            store.delete_key(f"left/{rank}")

    def take_exchanges(self, store: dist.Store) -> None:
        """Once all ranks have come to a later one."""
        while self.exchanges:
            exchange, pieces = self.exchanges.pop()
            names: list[object] = [*range(self.world_size), *map(_piece, range(pieces)), "decision"]
            names += [f"heard/{rank}" for rank in range(self.world_size) if not pieces]
            for name in names:
                store.delete_key(f"{exchange}/{name}")


def _error_of(decision: str) -> EPError:
    ended = re.match(rf"rank ([0-9, ]{{1,99}}) {NOT_COMING} ", decision)
    return (
        RankEndedError(decision, {int(rank) for rank in re.findall("[0-9]+", ended[1])}) if ended else EPError(decision)
    )


def _piece(number: int) -> str:
    return f"all/{number}" if number else "all"


def agreed_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Collective: a name for this start of a job. Raises EPError if a rank does not come."""
    rendezvous = StoreRendezvous.over(store, rank, world_size, timeout)
    rendezvous.of_what, rendezvous.failure = "of the job's start", "could not start"
    rendezvous.barrier()
    return rendezvous.name

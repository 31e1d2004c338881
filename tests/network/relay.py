"""Networks that take their time, cut what they carry in pieces or break, between the ranks of a running job: each
connection leads through a thread of the lower one of its two ranks."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from megatron_ep.fabrics import tcp

MAX_HELD = 1 << 20  # bytes under way, in one direction
LOOK_S = 0.05  # that a thread looks away for at most
END_S = 5.0  # that what is under way may take to arrive at the end


@dataclass(frozen=True)
class Conditions:
    """Of a connection.

    delay, jitter: seconds; jitter: at most, beside the delay. Bytes stay in order.
    chunk: bytes that are carried at once at most; how many is left to chance.
    reset_after: bytes of both directions together, after which it breaks; None: never.
    stalls_after: bytes of a direction, after which no more arrive there, or only `rate` a second; None: never.
    stalls: in which directions: "up", from the lower of the two ranks to the higher, "down", or "both".
    half_open: once a direction stalls, the lower end breaks, and the higher one does not hear of it.
    """

    delay: float = 0.0
    jitter: float = 0.0
    chunk: int = 1 << 16
    reset_after: int | None = None
    stalls_after: int | None = None
    rate: int = 0
    stalls: str = "both"
    half_open: bool = False


class _Way:
    """One direction."""

    def __init__(self, source: socket.socket, sink: socket.socket, conditions: Conditions, name: str, seed: int):
        self.source, self.sink, self.conditions = source, sink, conditions
        stalls = conditions.stalls_after is not None and conditions.stalls in (name, "both")
        self.until_stall = conditions.stalls_after if stalls else None  # bytes; None: it does not
        self.chance = random.Random(seed)
        self.under_way: deque[tuple[float, bytes]] = deque()  # when they arrive
        self.held = 0
        self.last_due = 0.0
        self.has_ended = self.is_told = False

    def has_room(self) -> bool:
        return not self.has_ended and self.held < (1 if self.is_stalled() else MAX_HELD)

    def due(self) -> float:
        return self.under_way[0][0] if self.under_way else float("inf")

    def is_stalled(self) -> bool:
        return self.until_stall == 0

    def take(self) -> None:
        most = 1 + self.chance.randrange(self.conditions.chunk)
        part = self.source.recv(min(most, self.until_stall or most))
        self.has_ended = not part
        if self.is_stalled():
            for byte in part if self.conditions.rate else b"":  # without a rate they are lost
                self._carry(bytes([byte]), max(self.last_due, time.monotonic()) + 1 / self.conditions.rate)
        elif part:
            if self.until_stall is not None:
                self.until_stall -= len(part)
            late = self.conditions.delay + self.chance.random() * self.conditions.jitter
            self._carry(part, max(self.last_due, time.monotonic() + late))

    def _carry(self, part: bytes, due: float) -> None:
        self.last_due = due
        self.under_way.append((due, part))
        self.held += len(part)

    def give(self, most: int | None) -> int:
        """What is due, as far as there is room, and so many bytes at most. Returns how many."""
        given = 0
        with contextlib.suppress(BlockingIOError):
            while most != given and self.due() <= time.monotonic():
                due, part = self.under_way.popleft()
                self.under_way.appendleft((due, part))
                sent = self.sink.send(part if most is None else part[: most - given])
                self.under_way[0] = (due, part[sent:])
                if sent == len(part):
                    self.under_way.popleft()
                self.held -= sent
                given += sent
        if self.has_ended and not self.under_way and not self.is_told:
            self.sink.shutdown(socket.SHUT_WR)
            self.is_told = True
        return given


class Relay:
    """Carries what two sockets send each other, and takes them, until both have ended or `close`."""

    def __init__(self, lower: socket.socket, higher: socket.socket, conditions: Conditions, seed: int):
        self._ends, self._left = (lower, higher), conditions.reset_after
        for end in self._ends:
            end.setblocking(False)
        self._ways = (
            _Way(lower, higher, conditions, "up", 2 * seed),
            _Way(higher, lower, conditions, "down", 2 * seed + 1),
        )
        self._half_open = conditions.half_open
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Once both have ended, within a bound."""
        self._thread.join(END_S)
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # when one end is gone, so is the other
            while not self._stopping.is_set() and not all(way.is_told for way in self._ways):
                self._move()
                if self._half_open and any(way.is_stalled() for way in self._ways):
                    self._lose_lower()
                    break
        for end in self._ends:
            end.close()

    def _lose_lower(self) -> None:
        lower, higher = self._ends
        lower.close()
        while not self._stopping.is_set():
            ready, _, _ = select.select([higher], [], [], LOOK_S)
            if ready and not higher.recv(1 << 16):
                return

    def _move(self) -> None:
        for way in self._ways:
            given = way.give(self._left)
            if self._left is not None:
                self._left -= given
                if not self._left:
                    self._reset()
        now = time.monotonic()
        readable = [way.source for way in self._ways if way.has_room()]
        writable = [way.sink for way in self._ways if way.due() <= now]
        waits = [way.due() - now for way in self._ways if way.due() > now]
        ready, _, _ = select.select(readable, writable, [], min([LOOK_S, *waits]))
        for way in self._ways:
            if way.source in ready:
                way.take()

    def _reset(self) -> None:
        for end in self._ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise ConnectionResetError


@contextlib.contextmanager
def relayed(*conditions: Conditions, between: tuple[int, int] | None = None, seed: int = 0) -> Iterator[None]:
    """In a rank: the first time that its buffer connects the network is under the first of these conditions, and so on,
    and from then on under the last.

    between: a lower and a higher rank, whose connections these are alone; None: all.
    """
    connect_all, relays, to_come = tcp._connect_all, [], list(conditions)

    def connect(rank, *arguments):
        made = connect_all(rank, *arguments)
        now = to_come.pop(0) if len(to_come) > 1 else to_come[0]
        for number, other_rank in enumerate(made):
            if rank < other_rank and between in (None, (rank, other_rank)):
                own, other = socket.socketpair()
                own.setblocking(False)
                relays.append(Relay(other, made[other_rank], now, 1000 * seed + 10 * rank + number))
                made[other_rank] = own
        return made

    try:
        with mock.patch.object(tcp, "_connect_all", connect):
            yield
    finally:
        for relay in relays:
            relay.close()

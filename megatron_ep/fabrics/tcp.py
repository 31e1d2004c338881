"""The network of the host: ranks on different machines, with a TCP connection per pair. If a network card carries the
data (`verbs.py`), each connection also has a queue pair or, if ranks post to queues of cards directly, all queue pairs
of the pair.

Each rank listens on one address, on a port that the system picks, while the others connect. From an unknown peer it
reads 32 bytes, for at most five seconds, and only from a limited number at a time. With MEGATRON_EP_SECRET ranks also
prove that they know the secret, and that their messages through the store are unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import logging
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ep import _C
from megatron_ep.config import require_equal
from megatron_ep.errors import EPError
from megatron_ep.meeting import codec
from megatron_ep.meeting.addresses import VARIABLE, own_address
from megatron_ep.meeting.rendezvous import CHECK_S, StoreRendezvous
from megatron_ep.meeting.stores import WARN_S

TOKEN_BYTES = 16
HELLO = struct.Struct(f"!8sII{TOKEN_BYTES}s")  # magic, version, rank, token
MAGIC, VERSION = b"MEGATREP", 4
HELLO_S = 5.0  # seconds that an unknown peer may take for its hello
MAX_STRANGERS = 64  # limit of connections without a hello
SECRET = "MEGATRON_EP_SECRET"
MIN_SECRET = 16  # characters
RETRY_S = 0.2
TCP_INFO_BYTES, TOTAL_RETRANS, SEGS_OUT = 192, 100, 136  # struct tcp_info of <linux/tcp.h>, and offsets in it
SILENCE_S = 10.0  # seconds after which a machine that does not answer is lost
QUIET_S = 2.0  # seconds after which errors mention that a machine or process is silent
LEAVE_S = 2.0  # seconds that sent data may take to leave when a buffer is closed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listening:
    """The address on which a rank listens, and by rank: the token that it must send there, the token of the answer, and
    the address of a card's queue pair to it, if there is one."""

    host: str
    port: int
    tokens: list[bytes]
    answers: list[bytes]
    pairs: list[bytes]
    cards: list[str]  # names of the cards' ports
    settings: dict[str, int]  # environment variables that must be equal on all ranks
    proof: bytes = b""  # proof that a rank with the secret wrote this

    @classmethod
    def by(
        cls,
        listener: socket.socket,
        world_size: int,
        pairs: Mapping[int, bytes] | None = None,
        cards: Sequence[str] = (),
    ) -> Listening:
        """Describes a listening socket, with new tokens for all ranks."""
        host, port = listener.getsockname()[:2]
        tokens, answers = ([secrets.token_bytes(TOKEN_BYTES) for _ in range(world_size)] for _ in range(2))
        addresses = [pairs.get(rank, b"") for rank in range(world_size)] if pairs else []
        settings = {}
        if cards:
            from megatron_ep.fabrics import verbs

            settings = verbs.settings()
        return cls(host, port, tokens, answers, addresses, list(cards), settings)

    def proved(self, rank: int) -> Listening:
        """Returns this with the proof that this rank wrote it. Raises ValueError, see `proof`."""
        bare = replace(self, proof=b"")
        if not os.environ.get(SECRET):
            return bare
        return replace(bare, proof=proof(b"listening", b"%d" % rank, codec.encode(bare)))


class Network:
    """The connections of one rank.

    rank: this rank.
    machines: machine of each rank; ranks of different machines are connected.
    nic: the software NIC, which carries the data.
    cards: the cards of the NIC. With cards, TCP connections carry only status, and queue pairs everything else.
    places: machine of each rank if `machines` are parts of machines; None: equal to `machines`.
    address: address on which this rank listens; None: `own_address`.
    """

    def __init__(
        self,
        rank: int,
        machines: Sequence[str],
        nic: _C.SoftwareNic,
        address: str | None = None,
        cards: Sequence[_C.Card] = (),
        places: Sequence[str] | None = None,
    ):
        self._cards = list(cards)
        self._places = list(places or machines)
        self._rank = rank
        self._address = address
        self._machines = list(machines)
        self._others = [other for other, machine in enumerate(machines) if machine != machines[rank]]
        self.nic = nic
        self._leave = weakref.finalize(self, self.nic.stop, LEAVE_S)  # also runs at exit
        self._descriptors: dict[int, int] = {}  # descriptors of open connections
        _networks.add(self)

    def connect(self, rendezvous: StoreRendezvous) -> None:
        """Connects all ranks. Collective. Raises EPError on all ranks if two of them cannot be connected."""
        others = self._others
        with contextlib.ExitStack() as stack:

            def step() -> tuple[tuple[socket.socket, dict[int, _C.QueuePair]], Listening]:
                listener = stack.enter_context(listen(self._address))
                names = [card.port_name for card in self._cards]
                if self._is_direct:
                    pairs, addresses = {}, {rank: self.nic.invite(rank) for rank in others}
                else:
                    pairs = {rank: card.queue_pair() for card in self._cards for rank in others}
                    addresses = {rank: pair.address() for rank, pair in pairs.items()}
                own = Listening.by(listener, len(self._machines), addresses, names)
                return (listener, pairs), own.proved(self._rank)

            (listener, pairs), listening = rendezvous.exchange(step)
            check_proofs(
                [one.proof for one in listening], [one.proved(rank).proof for rank, one in enumerate(listening)]
            )
            if self._rank == 0 and self._cards:
                from megatron_ep.fabrics import verbs

                if warning := verbs.rails_that_differ(self._places, [one.cards for one in listening]):
                    log.warning("ranks that send to each other take different network cards: %s", warning)
            require_equal([one.settings for one in listening], "environment variable ")
            limit = rendezvous.timeout.total_seconds()

            def join() -> dict[int, socket.socket]:
                made = _connect_all(self._rank, others, listening, listener, self._machines, limit, rendezvous.check)
                connections = {rank: stack.enter_context(connection) for rank, connection in made.items()}
                for rank, pair in pairs.items():
                    pair.connect(listening[rank].pairs[self._rank])
                for rank in others if self._is_direct else ():
                    self.nic.join(rank, listening[rank].pairs[self._rank])
                return connections

            connections = rendezvous.agree(join, seconds=limit)  # connects all queue pairs before any rank sends

            def start() -> None:
                self._descriptors = {rank: connection.fileno() for rank, connection in connections.items()}
                sockets = [connections[rank].detach() if rank in connections else -1 for rank in range(len(listening))]
                self.nic.start(sockets, [pairs.get(rank) for rank in range(len(listening))], SILENCE_S)

            rendezvous.agree(start)  # no connection ends before all ranks have started

    def connect_part(self, rendezvous: StoreRendezvous) -> None:
        """Waits until all ranks have opened a new part of a buffer, before any rank sends to it. Collective."""
        if not self._is_direct:
            rendezvous.barrier()
            return

        world = range(len(self._machines))

        def invite() -> tuple[None, list[bytes]]:
            invitations = [self.nic.invite(rank) if rank in self._others else b"" for rank in world]
            return None, [*invitations, proof(b"part", b"%d" % self._rank, *invitations)]

        _, tokens = rendezvous.exchange(invite, kind=list[bytes])
        expected = [proof(b"part", b"%d" % rank, *one[:-1]) for rank, one in enumerate(tokens)]
        check_proofs([one[-1] if len(one) > len(world) else b"" for one in tokens], expected)

        def join() -> None:
            for rank in self._others:
                self.nic.join(rank, tokens[rank][self._rank])

        rendezvous.agree(join)

    @property
    def _is_direct(self) -> bool:
        return any(card.is_direct for card in self._cards)

    def cards(self) -> list[str]:
        """Returns a line about the cards, if there are any."""
        names = " and ".join(card.port_name for card in self._cards)
        return [f"rank {self._rank} has {names}"] if names else []

    def segments_sent(self) -> dict[int, tuple[int, int]]:
        """Returns the numbers of packets sent to each rank, and of those that were retransmitted."""
        return {rank: _segments_sent(descriptor) for rank, descriptor in self._descriptors.items()}

    def unheard(self, rank: int) -> tuple[str, float] | None:
        """Returns the machine of a rank and the seconds since its last answer; None if it answers."""
        _, machine = self.nic.silence(rank)
        return (self._machines[rank], machine) if machine > QUIET_S else None

    def fate_of(self, rank: int) -> str | None:
        """Returns the fate of the process of a rank of another machine; None if it is unknown."""
        process, machine = self.nic.silence(rank)
        if process < QUIET_S or machine > QUIET_S:
            return None
        return f"has said nothing for {process:.0f} s, though its machine answers"

    def disconnect(self) -> None:
        """Closes the connections immediately. Sent data may be lost."""
        self._descriptors.clear()
        self.nic.stop(0.0)

    def close(self) -> None:
        """Closes the connections after sent data has left, or after LEAVE_S."""
        self._descriptors.clear()
        self._leave()

    def leave_to_parent(self) -> None:
        """Closes the descriptors of a forked child, which would keep connections open after its parent has ended."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


_networks: weakref.WeakSet[Network] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for network in list(_networks):
        network.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def proof(*parts: bytes) -> bytes:
    """Returns the HMAC of these parts with the secret of all ranks; b"" without a secret. Raises ValueError if the
    secret is too short."""
    secret = os.environ.get(SECRET) or ""
    if not secret:
        return b""
    if len(secret) < MIN_SECRET:
        raise ValueError(f"environment variable {SECRET} has {len(secret)} characters, must have at least {MIN_SECRET}")
    return hmac.digest(secret.encode(), b"".join(struct.pack("!I", len(part)) + part for part in parts), "sha256")


def check_proofs(proofs: Sequence[bytes], expected: Sequence[bytes]) -> None:
    """Raises ValueError if a rank has another secret or none, or if its message was changed."""
    for rank, (given, wanted) in enumerate(zip(proofs, expected, strict=True)):
        if not hmac.compare_digest(given, wanted):
            raise ValueError(
                f"environment variable {SECRET} must be the same on all ranks, or unset: on rank {rank} it is another, "
                f"or what rank {rank} told through the store of torch.distributed was changed"
            )


def _segments_sent(descriptor: int) -> tuple[int, int]:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    again, sent = (struct.unpack_from("=I", facts, at)[0] for at in (TOTAL_RETRANS, SEGS_OUT))
    return sent, again


def listen(address: str | None = None) -> socket.socket:
    """Listens on a port that the system picks. address: None for `own_address`. Raises ValueError, with the origin of
    the address, if it is not an address of this machine."""
    if address:
        origin = "address"
    elif os.environ.get(VARIABLE):
        origin = f"environment variable {VARIABLE}"
    else:
        store = os.environ.get("MASTER_ADDR") or socket.gethostname()
        origin = f"the address from which this machine reaches {store} (unless {VARIABLE} names another)"
    address = address or own_address()
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        parsed = None  # bind raises the error
    is_mapped = isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped
    if parsed and (parsed.is_unspecified or parsed.is_multicast or is_mapped or "%" in address):
        raise ValueError(f"{origin} is {address!r}, must be an address of this machine that means it on others, too")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(MAX_STRANGERS)
    except OSError as error:
        listener.close()
        raise ValueError(f"{origin} is {address!r}, must be an address of this machine: {error}") from None
    listener.setblocking(False)
    return listener


class _Joining:
    """The connections of a rank during set-up. It connects to lower ranks, and higher ranks connect to it."""

    def __init__(self, rank: int, listening: Sequence[Listening]):
        self.rank, self.listening = rank, listening
        self.made: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.strangers: dict[socket.socket, tuple[float, bytes]] = {}  # deadline, and bytes received
        self.calls: dict[int, tuple[socket.socket, bytes]] = {}  # connection, and bytes of the answer
        self.retry_at: dict[int, float] = {}
        self.why: dict[int, str] = {}

    def call(self, other: int) -> None:
        there = self.listening[other]
        connection = socket.socket(socket.AF_INET6 if ":" in there.host else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        error = connection.connect_ex((there.host, there.port))
        self.calls[other] = (connection, b"")
        self.selector.register(connection, selectors.EVENT_WRITE, other)
        if error not in (0, errno.EINPROGRESS):
            self.call_failed(other, os.strerror(error))

    def call_failed(self, other: int, why: str) -> None:
        connection, _ = self.calls.pop(other)
        self.selector.unregister(connection)
        connection.close()
        self.why[other] = why
        self.retry_at[other] = time.monotonic() + RETRY_S

    def word(self, connection: socket.socket, name: bytes, token: bytes, is_caller: bool) -> bytes:
        """Returns what proves on a connection that the token is known: the token or, with a secret, a proof that is
        valid only between these two addresses."""
        ends = [connection.getsockname()[:2], connection.getpeername()[:2]]
        caller, called = ends if is_caller else reversed(ends)
        return proof(name, token, repr((caller, called)).encode())[:TOKEN_BYTES] or token

    def say_hello(self, other: int) -> None:
        connection, _ = self.calls[other]
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return self.call_failed(other, os.strerror(error))
        try:
            token = self.word(connection, b"hello", self.listening[other].tokens[self.rank], True)
            connection.send(HELLO.pack(MAGIC, VERSION, self.rank, token))
        except OSError as failure:
            return self.call_failed(other, str(failure))
        self.selector.modify(connection, selectors.EVENT_READ, other)

    def hear_answer(self, other: int) -> None:
        connection, heard = self.calls[other]
        try:
            part = connection.recv(TOKEN_BYTES - len(heard))
        except OSError as failure:
            return self.call_failed(other, str(failure))
        if not part:
            return self.call_failed(other, "it closed the connection")
        heard += part
        self.calls[other] = (connection, heard)
        if len(heard) == TOKEN_BYTES:
            answer = self.word(connection, b"answer", self.listening[other].answers[self.rank], True)
            if not hmac.compare_digest(heard, answer):
                return self.call_failed(other, "somebody else answered")
            self.selector.unregister(connection)
            del self.calls[other]
            self.made[other] = connection

    def welcome(self, listener: socket.socket) -> None:
        try:
            stranger, _ = listener.accept()
        except OSError:
            return
        if len(self.strangers) >= MAX_STRANGERS:
            self.turn_away(next(iter(self.strangers)))  # the oldest one
        stranger.setblocking(False)
        self.strangers[stranger] = (time.monotonic() + HELLO_S, b"")
        self.selector.register(stranger, selectors.EVENT_READ)

    def listen_to(self, stranger: socket.socket, expected: set[int]) -> None:
        until, heard = self.strangers[stranger]
        try:
            part = stranger.recv(HELLO.size - len(heard))
        except OSError:
            part = b""
        heard += part
        if not part:
            return self.turn_away(stranger)
        self.strangers[stranger] = (until, heard)
        if len(heard) < HELLO.size:
            return
        magic, version, rank, token = HELLO.unpack(heard)
        own = self.listening[self.rank]
        is_known = magic == MAGIC and version == VERSION and rank in expected and rank not in self.made
        try:
            if not is_known or not hmac.compare_digest(token, self.word(stranger, b"hello", own.tokens[rank], False)):
                return self.turn_away(stranger)
            stranger.send(self.word(stranger, b"answer", own.answers[rank], False))
        except OSError:
            return self.turn_away(stranger)
        self.selector.unregister(stranger)
        del self.strangers[stranger]
        self.made[rank] = stranger

    def turn_away(self, stranger: socket.socket) -> None:
        self.selector.unregister(stranger)
        del self.strangers[stranger]
        stranger.close()

    def close(self) -> None:
        self.selector.close()
        for connection in [*self.strangers, *(connection for connection, _ in self.calls.values())]:
            connection.close()


def _connect_all(
    rank: int,
    others: Sequence[int],
    listening: Sequence[Listening],
    listener: socket.socket,
    machines: Sequence[str],
    limit: float,
    check: Callable[[], None] = lambda: None,
) -> dict[int, socket.socket]:
    """Returns the connections to the others. Raises EPError with the ranks that could not be reached in time, and what
    `check` raises, which is called about once a second."""
    warn_at = time.monotonic() + WARN_S

    def unreached(made: Mapping[int, socket.socket], why: Mapping[int, str], seconds: float) -> str:
        other, *rest = [other for other in others if other not in made]
        place = f"rank {other} ({machines[other]}, {listening[other].host} port {listening[other].port})"
        text = f"{place} did not reach rank {rank} within {seconds:g} s"
        if other < rank:
            reason = why.get(other, "no answer (a firewall?)")
            text = f"rank {rank} did not reach {place} within {seconds:g} s: {reason}"
        return (
            f"{text}{f', nor {len(rest)} others' if rest else ''}; if that is the wrong network, {VARIABLE} says on "
            "which address a rank listens, and megatron-ep check --network finds the right one"
        )

    def check_and_warn(made: Mapping[int, socket.socket], why: Mapping[int, str]) -> None:
        nonlocal warn_at
        if time.monotonic() > warn_at:
            warn_at += limit
            log.warning("%s; it tries for %g s", unreached(made, why, WARN_S), limit)
        check()

    made, why = join(rank, others, listening, listener, limit, check_and_warn)
    if len(made) < len(others):
        for connection in made.values():
            connection.close()
        raise EPError(unreached(made, why, limit))
    return made


def join(
    rank: int,
    others: Sequence[int],
    listening: Sequence[Listening],
    listener: socket.socket,
    limit: float,
    check: Callable[[Mapping[int, socket.socket], Mapping[int, str]], None] = lambda made, why: None,
) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Returns the connections made in `limit` seconds, and errors of those that this rank could not make. check: called
    with both about once a second; ends the set-up by raising."""
    joining = _Joining(rank, listening)
    callers = {other for other in others if other > rank}
    joining.selector.register(listener, selectors.EVENT_READ)
    for other in others:
        if other < rank:
            joining.call(other)
    deadline = time.monotonic() + limit
    check_at = time.monotonic() + CHECK_S
    try:
        while len(joining.made) < len(others) and (now := time.monotonic()) < deadline:
            if now > check_at:
                check(joining.made, joining.why)
                check_at = now + CHECK_S
            for key, events in joining.selector.select(min(RETRY_S, deadline - now)):
                if key.fileobj is listener:
                    joining.welcome(listener)
                elif key.data is None:
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj in joining.strangers:  # not turned away a moment ago
                        joining.listen_to(key.fileobj, callers)
                elif events & selectors.EVENT_WRITE:
                    joining.say_hello(key.data)
                else:
                    joining.hear_answer(key.data)
            now = time.monotonic()
            for stranger in [stranger for stranger, (until, _) in joining.strangers.items() if now > until]:
                joining.turn_away(stranger)
            for other in [other for other, at in joining.retry_at.items() if now > at]:
                del joining.retry_at[other]
                joining.call(other)
    except BaseException:
        for connection in joining.made.values():
            connection.close()
        raise
    finally:
        joining.close()
    return joining.made, joining.why

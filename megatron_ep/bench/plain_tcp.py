"""Plain TCP connections between ranks, one to send and one to receive: what a network gives to a program that does
nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from megatron_ep.errors import EPError
from megatron_ep.fabrics import tcp
from megatron_ep.meeting.rendezvous import StoreRendezvous


class PlainTcp:
    """A connection to the rank `to`, and one from the rank `source`, None for neither. Collective. A context manager.

    The ranks must fit: each is the source of the one that it sends to. Methods raise EPError when the source has closed
    its connection.
    """

    def __init__(self, rendezvous: StoreRendezvous, to: int | None, source: int | None) -> None:
        with tcp.listen() as listener, contextlib.ExitStack() as made:
            address, port = listener.getsockname()[:2]
            addresses = rendezvous.gather((address, port), kind=tuple[str, int])
            limit = rendezvous.timeout.total_seconds()
            listener.settimeout(limit)
            if to is not None:
                self._out = self._ready(made.enter_context(socket.create_connection(addresses[to], limit)), limit)
            if source is not None:
                self._in = self._ready(made.enter_context(listener.accept()[0]), limit)
            self._source = source
            self._stack = made.pop_all()

    @staticmethod
    def _ready(connection: socket.socket, limit: float) -> socket.socket:
        connection.settimeout(limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def stream(self, size: int) -> None:
        """Sends and receives so many bytes, at once."""
        source, target = memoryview(bytearray(1 << 20)), memoryview(bytearray(1 << 20))

        def send() -> None:
            left = size
            while left:
                left -= self._out.send(source[:left])

        sender = threading.Thread(target=send)
        sender.start()
        left = size
        while left:
            left -= self._receive(target[:left])
        sender.join()

    def ping(self, size: int, rounds: int, *, begins: bool) -> list[float]:
        """Half of each round trip of `size` bytes, in seconds, of two ranks that are connected to each other."""
        message = memoryview(bytearray(size))
        halves = []
        for _ in range(rounds):
            start = time.perf_counter()
            if begins:
                self._out.sendall(message)
            got = 0
            while got < size:
                got += self._receive(message[got:])
            if not begins:
                self._out.sendall(message)
            halves.append((time.perf_counter() - start) / 2)
        return halves

    def _receive(self, target: memoryview) -> int:
        got = self._in.recv_into(target)
        if not got:
            raise EPError(f"rank {self._source} closed its connection")
        return got

    def __enter__(self) -> PlainTcp:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

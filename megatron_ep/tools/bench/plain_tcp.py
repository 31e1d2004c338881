"""The baseline of `megatron-ep bench` between machines: plain TCP connections that carry as many bytes."""

from __future__ import annotations

import contextlib
import socket
import threading

from megatron_ep.errors import EPError
from megatron_ep.fabrics import tcp
from megatron_ep.meeting.rendezvous import StoreRendezvous


class PlainTcp:
    """A connection to the rank `to` and one from the rank `source`, to measure what a network gives to a program.
    Collective: each rank is the source of the rank that it sends to. A context manager."""

    def __init__(self, rendezvous: StoreRendezvous, to: int, source: int) -> None:
        limit = rendezvous.timeout.total_seconds()
        with tcp.listen() as listener, contextlib.ExitStack() as made:
            address, port = listener.getsockname()[:2]
            addresses = rendezvous.gather((address, port), kind=tuple[str, int])
            listener.settimeout(limit)
            self._out = made.enter_context(socket.create_connection(addresses[to], limit))
            self._in = made.enter_context(listener.accept()[0])
            self._in.settimeout(limit)
            self._stack = made.pop_all()
        self._source = source

    def exchange(self, size: int) -> None:
        """Sends and receives `size` bytes in parallel. Raises EPError if the source has closed its connection."""
        sent, received = memoryview(bytearray(1 << 20)), memoryview(bytearray(1 << 20))

        def send() -> None:
            left = size
            while left:
                left -= self._out.send(sent[:left])

        sender = threading.Thread(target=send)
        sender.start()
        left = size
        while left:
            got = self._in.recv_into(received[:left])
            if not got:
                raise EPError(f"rank {self._source} closed its connection")
            left -= got
        sender.join()

    def __enter__(self) -> PlainTcp:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

"""A store of torch.distributed whose connections and answers can be held up."""

from __future__ import annotations

import selectors
import socket
import threading
import time

import torch.distributed as dist


class StoreRelay:
    """A store behind a relay of one thread, as the store's own is, in which each connection takes `seconds`, as where a
    look-up of the name does. A context manager.

    connections: number of connections so far. open: number of those that are open.
    """

    def __init__(self, seconds: float = 0.0):
        self.connections = self.open = 0
        self.seconds = seconds
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._listener = socket.create_server(("localhost", 0), backlog=1024)
        self._pauses: list[float] = []
        self._is_over = self._is_cut = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def client(self) -> dist.TCPStore:
        return dist.TCPStore("localhost", self.port, is_master=False)

    def fall_silent(self, seconds: float) -> None:
        """Makes the store answer nothing for so long. Returns afterwards."""
        self._pauses.append(seconds)
        while self._pauses:
            time.sleep(1e-3)

    def cut(self) -> None:
        """Closes all connections."""
        self._is_cut = True
        while self._is_cut:
            time.sleep(1e-3)

    def __enter__(self) -> StoreRelay:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(60)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            ends: dict[socket.socket, socket.socket] = {}

            def close(end: socket.socket) -> None:
                other = ends.pop(end)
                del ends[other]
                for each in (end, other):
                    selector.unregister(each)
                    each.close()
                self.open -= 1

            while not self._is_over:
                if self._pauses:
                    time.sleep(self._pauses[0])
                    self._pauses.clear()
                while self._is_cut and ends:
                    close(next(iter(ends)))
                self._is_cut = False
                for key, _ in selector.select(5e-3):
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is self._listener:
                        near, _ = end.accept()
                        time.sleep(self.seconds)
                        far = socket.create_connection(("localhost", self._store.port))
                        ends |= {near: far, far: near}
                        for each in (near, far):
                            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                            selector.register(each, selectors.EVENT_READ)
                        self.connections += 1
                        self.open += 1
                    elif end in ends:
                        try:
                            data = end.recv(1 << 16)
                            ends[end].sendall(data)
                        except OSError:
                            data = b""
                        if not data:
                            close(end)
            for end in ends:
                end.close()

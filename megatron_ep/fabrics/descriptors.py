"""Sends file descriptors from process to process of a host, over Unix sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_RANK = struct.Struct("<i")
_PEER = struct.Struct("3i")  # ucred of unix(7): process, user, group


@contextlib.contextmanager
def mailbox(senders: int, seconds: float) -> Iterator[socket.socket]:
    """Listens for the descriptors of `senders` processes of this user. seconds: limit of each wait."""
    with (
        tempfile.TemporaryDirectory(prefix="megatron_ep-") as folder,  # only this user can enter it
        socket.socket(socket.AF_UNIX) as listener,
    ):
        listener.bind(str(Path(folder) / "mailbox"))
        listener.listen(max(1, senders))
        listener.settimeout(seconds)
        yield listener


def send(descriptor: int, rank: int, mailboxes: list[str], seconds: float) -> None:
    """Sends a descriptor of this rank to the mailboxes with these paths. Raises OSError if one does not take it, or is
    that of another user."""
    for path in mailboxes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(path)
            _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user != os.geteuid():
                raise PermissionError(f"user {user} listens at {path}, must be user {os.geteuid()} of this process")
            socket.send_fds(connection, [_RANK.pack(rank)], [descriptor])


def receive(listener: socket.socket, senders: int) -> dict[int, int]:
    """Returns the descriptor of each sender, by its rank, which the caller closes. Raises OSError if one is missing."""
    received: dict[int, int] = {}
    try:
        while len(received) < senders:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(listener.gettimeout())
                message, descriptors, *_ = socket.recv_fds(connection, _RANK.size, 1)
            if len(message) != _RANK.size or len(descriptors) != 1:
                raise OSError("a process ended while it sent a descriptor")
            received[_RANK.unpack(message)[0]] = descriptors[0]
    except BaseException:
        close(received)
        raise
    return received


def close(descriptors: Mapping[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)

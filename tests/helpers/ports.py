"""Ports for processes that meet."""

import contextlib
import random
import socket

# below those that Linux gives where none is asked for
FIRST, END = 10_000, 32_768


def free_port() -> int:
    """One that nobody takes by chance before it is used, as the system's own choice may be taken."""
    while True:
        port = random.SystemRandom().randrange(FIRST, END)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port

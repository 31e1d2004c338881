"""Network cards of the tests' own: libibverbs and libmlx5 are tests/csrc/fake_ibverbs.cpp."""

import ctypes
import functools
from contextlib import contextmanager

import cpp

from megatron_ep.fabrics import verbs


@functools.cache
def library() -> str:
    """Builds it."""
    return str(cpp.build("fake_ibverbs") / "libfake_ibverbs.so")


def use_library(path: str, fabric: str) -> None:
    """In this process, with the cards' own queues for mlx5."""
    verbs.LIBRARY, verbs.MLX5_LIBRARY = path, path if fabric == "mlx5" else "libnone.so.1"


@contextmanager
def cards_with(**facts: int):
    """What is true of this rank's card, of its settings in fake_ibverbs.cpp."""
    off = dict(down=0, unregistered=0, unposted=0, network=0, seed=0, astray=-1, slow=-1)
    usual = dict(devices=1, mlx5=1, stride=64, silent_after=-1, refused_after=-1, retry_ms=60_000, **off)
    usual |= dict(unforkable=0, copies=0) | dict.fromkeys((argument for argument, *_ in verbs.SETTINGS.values()), -1)
    change = ctypes.CDLL(verbs.LIBRARY).fake_ibverbs_set
    change.argtypes = [ctypes.c_char_p, ctypes.c_longlong]
    for name, value in facts.items():
        change(name.encode(), value)
    try:
        yield
    finally:
        for name in facts:
            change(name.encode(), usual[name])

"""Encodes messages between ranks as JSON. Anyone who reaches the port of the store may write to it, so a reader creates
only values of the type that it expects, raises an error for others, and never executes what it reads.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

Plain = bool | int | float | str | None

MAX_BYTES = 1 << 20  # bytes of a message: IPC handles and settings take a few hundred ...
MAX_BYTES_A_RANK = 1 << 12  # ... and more for each rank that is invited to connect: 1,700 over mlx5
MAX_TEXT = 4000  # characters of another rank's text that are shown
MAX_DIGITS = 20  # digits of a 64-bit number
SHOWN = 60  # characters of an unexpected value that are shown


def most_bytes(world_size: int) -> int:
    """Returns the largest number of bytes of a message of one of `world_size` ranks."""
    return MAX_BYTES + MAX_BYTES_A_RANK * world_size


def encode(value: Any) -> bytes:
    """Encodes plain values, bytes, lists, tuples, dicts with str keys, and dataclasses of these."""
    return json.dumps(_plain(value), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def decode(data: bytes, kind: Any, max_bytes: int = MAX_BYTES) -> Any:
    """Returns the encoded value. Raises ValueError if it is not of type `kind`.

    kind: type of the value, as in an annotation: a dataclass, tuple[int, int], list[bytes] | None, ...
    """
    assert kind not in (dict, list, tuple), "of what?"
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes, at most {max_bytes} are expected")
    try:
        tree = json.loads(data, parse_int=_int, parse_float=_float, parse_constant=_float)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    return _of_kind(tree, kind)


def readable(text: str, most: int = MAX_TEXT) -> str:
    """Returns at most `most` characters of another rank's text, without control characters, which a terminal would
    obey."""
    shown = "".join(character if character.isprintable() or character == "\n" else "?" for character in text[:most])
    return shown + (" ..." if len(text) > most else "")


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{readable(digits, SHOWN)} is no finite number")
    return number


def _of_kind(tree: Any, kind: Any) -> Any:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _of_one(tree, parts)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        kinds = typing.get_type_hints(kind)
        if not isinstance(tree, dict) or tree.keys() != kinds.keys():
            raise _unexpected(tree, kind)
        return kind(**{name: _of_kind(item, kinds[name]) for name, item in tree.items()})
    if origin is dict and isinstance(tree, dict):
        return {name: _of_kind(item, parts[1]) for name, item in tree.items()}
    if origin is list and isinstance(tree, list):
        return [_of_kind(item, parts[0]) for item in tree]
    if origin is tuple and isinstance(tree, list) and len(tree) == len(parts):
        return tuple(_of_kind(item, part) for item, part in zip(tree, parts, strict=True))
    if kind is bytes and isinstance(tree, str):
        return base64.b64decode(tree, validate=True)
    if kind is float and type(tree) is int:
        return float(tree)
    if type(tree) is not (types.NoneType if kind is None else kind):
        raise _unexpected(tree, kind)
    return tree


def _of_one(tree: Any, kinds: tuple[Any, ...]) -> Any:
    exact = [kind for kind in kinds if type(tree) is kind]  # keeps True apart from 1, and 1 from 1.0
    for kind in exact or kinds:
        try:
            return _of_kind(tree, kind)
        except ValueError as error:
            why = error
    raise why if len(kinds) == 2 and types.NoneType in kinds else _unexpected(tree, *kinds)


def _unexpected(tree: Any, *kinds: Any) -> ValueError:
    names = [kind.__name__ if isinstance(kind, type) else str(kind) for kind in kinds]
    return ValueError(f"{readable(repr(tree), SHOWN)} where {' or '.join(names)} is expected")

"""The file of a routing trace: the number of tokens that a rank sent to each expert, by step, layer and micro-batch.

Each rank has a file, `rank_00003.routing`: a line of JSON (`Header`), then records of `record_type`, written a whole
step at a time. E experts; W ranks exchange tokens, EP of them have different experts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SUFFIX = ".routing"
FORMAT = "megatron_ep routing 3"


@dataclass(frozen=True)
class Header:
    """The header of a rank's file.

    rank: rank in the job. group: ranks of the job that exchange tokens; ranks with the same experts are adjacent.
    expert_ranks: EP; an expert is on len(group) / EP ranks.
    """

    rank: int
    group: tuple[int, ...]
    expert_ranks: int
    num_experts: int
    topk: int

    def line(self) -> bytes:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}).encode() + b"\n"


def record_type(num_experts: int) -> np.dtype[Any]:
    """Returns the type of a record, one pass of a micro-batch through a layer: 12 + 4 E bytes."""
    return np.dtype([("step", "<i4"), ("layer", "<i4"), ("micro_batch", "<i4"), ("counts", "<u4", (num_experts,))])


def file_of(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}{SUFFIX}"


def read_header(file: Path) -> tuple[Header, int]:
    """Returns a file's header and the header's length in bytes.

    Raises ValueError if the file cannot be read, or is not a trace.
    """
    try:
        with open(file, "rb") as stream:
            line = stream.readline(1 << 20)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    try:
        fields = json.loads(line)
        if not line.endswith(b"\n") or fields.pop("format") != FORMAT:
            raise ValueError
        fields["group"] = tuple(fields["group"])
        header = Header(**fields)
        _check(header)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{file}: is no trace that --ep-trace of this version has written") from None
    return header, len(line)


def _check(header: Header) -> None:
    numbers = dataclasses.astuple(header)
    if not all(type(number) is int and number >= 0 for number in (*numbers[:1], *numbers[2:], *header.group)):
        raise ValueError
    if header.rank not in header.group or len(set(header.group)) != len(header.group):
        raise ValueError
    if not header.expert_ranks or len(header.group) % header.expert_ranks:
        raise ValueError
    if not header.num_experts or header.num_experts % header.expert_ranks:
        raise ValueError

"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from megatron_ep.config import MAX_TIMEOUT_S, MAX_TOPK, TIMEOUT_ALLOWED, Topology, require_int

GIB = 1 << 30


def positive(text: str) -> int:
    """Parses the argument of a count."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def seconds(text: str) -> float:
    """Parses the argument of a time limit, in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not {TIMEOUT_ALLOWED}")
    return value


def output_file(text: str) -> Path:
    """Parses the argument of an output file."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def require_memory(parser: argparse.ArgumentParser, size: int, what: str) -> None:
    """Ends the program if this machine has less memory than `size` bytes. what: what needs them, by its arguments."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    if size > free:
        parser.error(f"{what} takes {size / GIB:,.0f} GiB at least, of which this machine has {free / GIB:.0f} free")


def add_tokens(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Adds --tokens, with one number or several."""
    default = {"nargs": "+", "default": [4096]} if several else {"default": 4096}
    parser.add_argument("--tokens", type=positive, metavar="T", help="tokens per rank (4096)", **default)


def add_sizes(parser: argparse.ArgumentParser, hidden: int, experts: int) -> None:
    """Adds --hidden, --topk and --experts with these defaults."""
    parser.add_argument("--hidden", type=positive, default=hidden, metavar="H", help="(%(default)s)")
    parser.add_argument("--topk", type=positive, default=8, metavar="K", help="experts of a token (%(default)s)")
    parser.add_argument("--experts", type=positive, default=experts, metavar="E", help="in all (%(default)s)")


def require_topk(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the program if a token cannot choose --topk of --experts."""
    most = min(arguments.experts, MAX_TOPK)
    if arguments.topk > most:
        parser.error(f"--topk {arguments.topk} is over {most}: --experts, and at most {MAX_TOPK}")


def add_rounds(parser: argparse.ArgumentParser, warmup: int, iters: int) -> None:
    """Adds --iters, --warmup and --json with these defaults."""
    parser.add_argument("--iters", type=positive, default=iters, metavar="N", help="timed rounds (%(default)s)")
    parser.add_argument("--warmup", type=positive, default=warmup, metavar="N", help="rounds before (%(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the measurements there")


def default_experts(topology: Topology) -> int:
    """Returns the default of E: that of DeepSeek-V3, rounded up to a multiple of the number of ranks."""
    return -(-256 // topology.world_size) * topology.world_size


def require_ints(options: argparse.Namespace, least: int, most: int, *names: str) -> None:
    """Raises ValueError that names an option, of these, that is given and not in [least, most]."""
    for name in names:
        if getattr(options, name) is not None:
            require_int(f"--{name.replace('_', '-')}", getattr(options, name), least, most)


def numbers(name: str, text: str) -> list[int]:
    """Parses a comma-separated list. Raises ValueError that names the argument."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} is {text!r}, must be a number, or several: 2,4") from None

"""Settings that all ranks of a buffer must agree on."""

import difflib
import functools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard, TypeVar

Settings = TypeVar("Settings")

DEFAULT_TIMEOUT_S = 100.0
TIMEOUT_VARIABLE = "MEGATRON_EP_TIMEOUT"
MAX_TIMEOUT_S = 1e6
TIMEOUT_ALLOWED = f"a number of seconds in (0, {MAX_TIMEOUT_S:g}]"

# These bounds exceed any machine, and no size computed from them overflows 64 bits (32 bits for numbers of experts).
MAX_RANKS, MAX_EXPERTS, MAX_CHANNELS, MAX_RING = 1 << 16, 1 << 20, 1 << 12, 1 << 32
# Limits of the kernels: kMaxTopk in csrc/core/row.h, kMaxNodeRanks in csrc/core/topology.h, max_tokens in
# csrc/core/low_latency_heap.h. Rows are counted in 32 bits.
MAX_TOPK, MAX_NODE_RANKS, MAX_LOW_LATENCY_TOKENS, MAX_ROWS, MAX_ROW_BYTES = 32, 72, 1024, 2**31 - 1, 2**29
# Numbers of element types in messages between ranks; the summable ones are those of csrc/core/dtypes.h.
SUMMABLE_TYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "float64": 3}
ELEMENT_TYPES = {**SUMMABLE_TYPES, "float8_e4m3fn": 4}


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}, must be {allowed}")


def require_int(name: str, value: object, lowest: int, highest: int) -> None:
    """Raises ValueError unless value is an int in [lowest, highest]."""
    ok = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest
    _require(ok, name, value, f"an int in [{lowest}, {highest}]")


def require_int_or_none(name: str, value: object, lowest: int, highest: int) -> None:
    """Raises ValueError unless value is None or an int in [lowest, highest]."""
    if value is not None:
        require_int(name, value, lowest, highest)


def require_equal(by_rank: Sequence[Mapping[str, object]], kind: str = "") -> None:
    """Raises ValueError, on all ranks alike, unless each rank has the same values by name. kind: of the names."""
    for rank, values in enumerate(by_rank):
        for name, first in by_rank[0].items():
            if (value := values.get(name)) != first:
                raise ValueError(f"{kind}{name} is {first!r} on rank 0 and {value!r} on rank {rank}, must be equal")


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether value is an int or float, but not a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_timeout(name: str, value: object) -> None:
    """Raises ValueError unless value is a number of seconds that a wait may take."""
    ok = is_number(value) and 0 < value <= MAX_TIMEOUT_S
    _require(ok, name, value, TIMEOUT_ALLOWED)


def require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises ValueError unless value is one of these strings."""
    _require(isinstance(value, str) and value in allowed, name, value, f"one of {', '.join(map(repr, allowed))}")


def require_type(name: str, value: object, kind: type) -> None:
    """Raises ValueError unless value is of the type."""
    _require(isinstance(value, kind), name, value, f"a megatron_ep.{kind.__name__}")


def nearest_name(name: str, allowed: Mapping[str, str] | Collection[str]) -> str:
    """Returns the end of a message about an unknown name: "; did you mean num_sms?", or nothing.

    allowed: the names, or how to write each.
    """
    found = difflib.get_close_matches(name, allowed, n=1)
    written = allowed[found[0]] if found and isinstance(allowed, Mapping) else "".join(found)
    return f"; did you mean {written}?" if found else ""


def name_unknown_settings(cls: type[Settings]) -> type[Settings]:
    """Makes a dataclass's constructor suggest the nearest name for an unknown keyword, including those of `tuning`."""
    init = cls.__init__
    names = {each.name: each.name for each in fields(cls)}  # type: ignore[arg-type]
    if "tuning" in names:
        names = {each.name: f"tuning=Tuning({each.name}=...)" for each in fields(Tuning)} | names

    @functools.wraps(init)
    def checked(self: Settings, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name not in names:
                raise TypeError(f"{cls.__name__} has no setting {name}{nearest_name(name, names)}")
        init(self, *args, **settings)

    setattr(cls, "__init__", checked)  # noqa: B010 (mypy refuses the assignment)
    return cls


@dataclass(frozen=True)
class Topology:
    """N nodes of G ranks each. Rank r is local rank r % G of node r // G.

    nodes: N, number of scale-up domains. Ranks of one domain access each other's memory directly.
    ranks_per_node: G, at least 1.
    """

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        require_int("Topology.nodes", self.nodes, 1, MAX_RANKS)
        require_int("Topology.ranks_per_node", self.ranks_per_node, 1, MAX_RANKS // self.nodes)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@name_unknown_settings
@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Hints for the sizes of rings and chunks. They do not change results. Defaults may change between versions.

    channels: C, independent slices of the tokens, each with its own rings and roles. None: 1 on the host; on a GPU as
        many as keep the warps of `Config.num_sms` SMs busy, or fewer if a LocalCluster has several nodes, because all
        their rings share one cache.
    nvl_ring_bytes: bytes of one ring between two ranks of a node; each rank's heap has C * W of them. A ring holds a
        power of two of rows, at least one. None: 256 KiB on the host; four rows on a GPU, so that the rings of its many
        channels stay in the cache.
    rdma_ring_bytes: bytes of one ring between two ranks of a rail; each rank's heap has 2 * C * (N - 1) of them. None:
        512 KiB on the host; on a GPU 32 rows, 16 or 8 if all rings of a rank together would take more than 192 MiB, and
        four for a LocalCluster.
    rdma_chunk_tokens: rows per put and signal to another node; at most half a ring.
    local_pass: whether intra-rank permute and reduce run as separate kernels on the SMs that `Config.num_sms` leaves
        free, or on all SMs before or after the exchange if fewer than a third are free. They copy the rows that stay on
        their rank and those for a token's further experts on a rank, and sum over a rank's experts for combine.
        Combine does without them if processes share a GPU, or in a graph with a driver older than CUDA 12.3. None: on
        a GPU, if it saves time.

    Raises ValueError for values out of range.
    """

    channels: int | None = None
    nvl_ring_bytes: int | None = None
    rdma_ring_bytes: int | None = None
    rdma_chunk_tokens: int = 8
    local_pass: bool | None = None

    def __post_init__(self) -> None:
        require_int_or_none("Tuning.channels", self.channels, 1, MAX_CHANNELS)
        require_int_or_none("Tuning.nvl_ring_bytes", self.nvl_ring_bytes, 64, MAX_RING)
        require_int_or_none("Tuning.rdma_ring_bytes", self.rdma_ring_bytes, 64, MAX_RING)
        require_int("Tuning.rdma_chunk_tokens", self.rdma_chunk_tokens, 1, 1 << 20)
        if self.local_pass is not None:
            ok = isinstance(self.local_pass, bool)
            _require(ok, "Tuning.local_pass", self.local_pass, "True, False or None")


@name_unknown_settings
@dataclass(frozen=True)
class Config:
    """Settings of a buffer, equal on all of its ranks.

    num_experts: E, all experts of the group; a multiple of the number of ranks. Expert e lives on rank e // (E / W).
    num_sms: SMs that a launch uses per rank on a GPU. None: 24, or 16 from eight nodes on; in the low-latency mode 24,
        or 64 where it sends rows as lines (docs/protocol.md); for a LocalCluster an equal share of the GPU per rank if
        that is less.
    timeout: seconds that a single wait may take. Must be longer than one rank may keep the others waiting, for example
        for a save. None: the environment variable MEGATRON_EP_TIMEOUT, else the timeout of the process group's
        collectives (torch: 600 for NCCL, 1800 for gloo; Megatron's --distributed-timeout-minutes); without a process
        group 100.
    row_bytes: bytes of the largest row that will travel, H times the size of an element. Rings whose size is None then
        hold at least four such rows. None, or less: 14 KiB, H = 7168 in bf16.
    max_tokens: a promise that no rank dispatches more tokens in a call, unless the call has a `max_tokens` of its own;
        at most 1024. Dispatches with few tokens then go in one hop, which takes less time: see docs/tuning.md. Needs
        memory that grows with it and with the number of ranks. None: no promise. A warning says if it is more than are
        faster in one hop on these GPUs.
    tuning: sizes of rings and chunks.

    Raises ValueError for values out of range, TypeError for an unknown name.
    """

    num_experts: int
    num_sms: int | None = field(default=None, kw_only=True)
    timeout: float | None = field(default=None, kw_only=True)
    row_bytes: int | None = field(default=None, kw_only=True)
    max_tokens: int | None = field(default=None, kw_only=True)
    tuning: Tuning = field(default=Tuning(), kw_only=True)

    def __post_init__(self) -> None:
        require_int("Config.num_experts", self.num_experts, 1, MAX_EXPERTS)
        require_int_or_none("Config.num_sms", self.num_sms, 1, MAX_CHANNELS)
        require_int_or_none("Config.row_bytes", self.row_bytes, 1, MAX_RING // 64)
        require_int_or_none("Config.max_tokens", self.max_tokens, 1, MAX_LOW_LATENCY_TOKENS)
        if self.timeout is not None:
            require_timeout("Config.timeout", self.timeout)
        require_type("Config.tuning", self.tuning, Tuning)

    @property
    def timeout_seconds(self) -> float:
        """The timeout in effect, in seconds. For a buffer use the config that it has.

        Raises ValueError if the environment variable is not a number > 0.
        """
        if self.timeout is not None:
            return float(self.timeout)
        text = os.environ.get(TIMEOUT_VARIABLE)
        if not text:
            return DEFAULT_TIMEOUT_S
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        variable = f"environment variable {TIMEOUT_VARIABLE}"
        _require(0 < seconds <= MAX_TIMEOUT_S, variable, text, TIMEOUT_ALLOWED)
        return seconds

    def check_ranks(self, topology: Topology) -> None:
        """Raises ValueError unless the experts divide evenly among the ranks."""
        world_size = topology.world_size
        allowed = f"a multiple of the {world_size} ranks"
        _require(self.num_experts % world_size == 0, "Config.num_experts", self.num_experts, allowed)


# Names of the settings of a Config that are keys of recipes and flags of commands.
SETTING_NAMES = ("num_sms", "timeout", "row_bytes")
assert {"num_experts", "max_tokens", "tuning", *SETTING_NAMES} == {each.name for each in fields(Config)}

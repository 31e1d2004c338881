"""What all ranks of a buffer must agree on."""

import difflib
import functools
import math
import os
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, TypeGuard, TypeVar

Settings = TypeVar("Settings")

DEFAULT_TIMEOUT_S = 100.0
TIMEOUT_VARIABLE = "MEGATRON_EP_TIMEOUT"
MAX_TIMEOUT_S = 1e6
TIMEOUT_ALLOWED = f"a number of seconds in (0, {MAX_TIMEOUT_S:g}]"

# Far beyond any machine, and small enough that no size made of them overflows 64 bits (32 for numbers of experts).
MAX_RANKS, MAX_EXPERTS, MAX_CHANNELS, MAX_RING = 1 << 16, 1 << 20, 1 << 12, 1 << 32
# What the kernels are made for: kMaxTopk in csrc/core/row.h, kMaxNodeRanks in csrc/core/topology.h, kMaxTokens in
# csrc/core/low_latency_heap.h. Rows are counted in 32 bits.
MAX_TOPK, MAX_NODE_RANKS, MAX_LOW_LATENCY_TOKENS, MAX_ROWS = 32, 72, 1024, 2**31 - 1


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value!r}, must be {allowed}")


def require_int(name: str, value: object, lowest: int, highest: int) -> None:
    """Raises ValueError unless value is an int in [lowest, highest]."""
    ok = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest
    _require(ok, name, value, f"an int in [{lowest}, {highest}]")


def is_number(value: object) -> TypeGuard[float]:
    """A bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_timeout(name: str, value: object) -> None:
    """Raises ValueError unless value is a number of seconds that a wait may take."""
    ok = is_number(value) and 0 < value <= MAX_TIMEOUT_S
    _require(ok, name, value, TIMEOUT_ALLOWED)


def require_type(name: str, value: object, kind: type) -> None:
    """Raises ValueError unless value is of the type."""
    _require(isinstance(value, kind), name, value, f"a megatron_ep.{kind.__name__}")


def nearest_name(name: str, allowed: Collection[str]) -> str:
    """For the end of a sentence about a name that is not allowed: "; did you mean num_sms?", or nothing."""
    found = difflib.get_close_matches(name, allowed, n=1)
    return f"; did you mean {found[0]}?" if found else ""


def name_unknown_settings(cls: type[Settings]) -> type[Settings]:
    """A dataclass whose constructor says, of a keyword that it does not have, which one is probably meant."""
    init = cls.__init__
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]

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

    nodes: N, the number of scale-up domains, whose ranks reach each other's memory directly.
    ranks_per_node: G, any number from 1.
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
@dataclass(frozen=True)
class Config:
    """Settings of a buffer; the same on all of its ranks.

    num_experts: E, all experts of the group; a multiple of the number of ranks. Expert e lives on rank e // (E / W).
    channels: C, independent slices of the tokens, each with rings and roles of its own. None: 1 on the host, and on a
        GPU as many as keep the warps of num_sms SMs busy, or fewer if a LocalCluster has several nodes: all their rings
        share one cache.
    timeout: seconds that a single wait may take: longer than one rank may keep the others waiting, as for a save. None:
        the environment variable MEGATRON_EP_TIMEOUT, else the limit of the process group's own collectives (torch: 600
        for NCCL, 1800 for gloo; Megatron's --distributed-timeout-minutes); without a process group 100.
    row_bytes: of the largest row that will travel, H times the size of an element: rings whose size is left open then
        hold at least four of them. None, or less: 14 KiB, H = 7168 in bf16.
    nvl_ring_bytes: size of one ring between two ranks of a node; there are C * W of them in each rank's heap. A ring
        holds a power of two of rows, at least one. None: 256 KiB on the host; four rows on a GPU, which has many
        channels and rows that stay in its cache if they are few.
    rdma_ring_bytes: size of one ring between two ranks of a rail; each rank's heap has 2 * C * (N - 1) of them. None:
        512 KiB on the host; on a GPU 32 rows, 16 or 8 where all rings of a rank together would take more than 192 MiB,
        and four for a LocalCluster.
    rdma_chunk_tokens: rows after which another node is told of them; at most half a ring.
    num_sms: SMs that a launch uses for each rank on a GPU. None: 24, or an equal share of the GPU for each of a
        LocalCluster's ranks if that is less.
    local_pass: whether copies and sums inside a rank (intra-rank permute and reduce) run as launches of their own:
        dispatch's copies to a token's second and further experts on a rank, the rows that stay on their rank, and
        combine's sums over a rank's experts. They run on the SMs that num_sms leaves free; where that is less than a
        third of the GPU, before or after the exchange on all SMs. Combine goes without them in a captured graph and
        where processes share a GPU. The bits are the same either way. None: on a GPU, where it saves time.
    """

    num_experts: int
    channels: int | None = None
    timeout: float | None = None
    row_bytes: int | None = None
    nvl_ring_bytes: int | None = None
    rdma_ring_bytes: int | None = None
    rdma_chunk_tokens: int = 16
    num_sms: int | None = None
    local_pass: bool | None = None

    def __post_init__(self) -> None:
        require_int("Config.num_experts", self.num_experts, 1, MAX_EXPERTS)
        for name in ("channels", "num_sms"):
            if getattr(self, name) is not None:
                require_int(f"Config.{name}", getattr(self, name), 1, MAX_CHANNELS)
        for name in ("nvl_ring_bytes", "rdma_ring_bytes"):
            if getattr(self, name) is not None:
                require_int(f"Config.{name}", getattr(self, name), 64, MAX_RING)
        if self.row_bytes is not None:
            require_int("Config.row_bytes", self.row_bytes, 1, MAX_RING // 64)
        require_int("Config.rdma_chunk_tokens", self.rdma_chunk_tokens, 1, 1 << 20)
        if self.local_pass is not None:
            ok = isinstance(self.local_pass, bool)
            _require(ok, "Config.local_pass", self.local_pass, "True, False or None")
        if self.timeout is not None:
            require_timeout("Config.timeout", self.timeout)

    @property
    def timeout_seconds(self) -> float:
        """The timeout in force; for a buffer in the config that it has.

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

"""The protocol under a virtual clock. Times are in ns, rates in GB/s."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

CONSTANTS: tuple[str, ...]

class Machine:
    def __init__(self, *, sms: int, constants: Mapping[str, float]) -> None: ...

class Transfers:
    def __init__(
        self,
        machine: Machine,
        *,
        nodes: int,
        ranks_per_node: int,
        simulated_nodes: int,
        num_experts: int,
        topk: int,
        num_tokens: int,
        num_sms: int,
        maps_rail: bool,
        run: Mapping[str, Any],
        channels: int,
        nvl_rows: int,
        rdma_rows: int,
        nvl_batch: int,
        rdma_chunk: int,
        slot_ratio: int,
        payload_bytes: float,
        scale_bytes: float,
        slot_bytes: float,
        combine_bytes: float,
        combine_slot_bytes: float,
        permutes_apart: bool,
        sums_apart: bool,
        topk_idx: Sequence[int],
    ) -> None: ...
    def notify(self, look: Callable[[int, int], None] | None = None) -> dict[str, Any]: ...
    def dispatch(self, look: Callable[[int, int], None] | None = None) -> dict[str, Any]: ...
    def combine(self, look: Callable[[int, int], None] | None = None) -> dict[str, Any]: ...
    def first_reason(self) -> tuple[str, int] | None: ...
    def incidents(self, rank: int) -> list[dict[str, Any]]: ...
    @property
    def rail_rows(self) -> int: ...
    @property
    def peer_rows(self) -> int: ...

class LowLatency:
    def __init__(
        self,
        machine: Machine,
        *,
        nodes: int,
        ranks_per_node: int,
        simulated_nodes: int,
        num_experts: int,
        topk: int,
        num_tokens: int,
        num_sms: int,
        maps_rail: bool,
        run: Mapping[str, Any],
        payload_bytes: int,
        scale_bytes: int,
        combine_bytes: int,
        quantizes: bool,
        sums_at_expert: bool,
        topk_idx: Sequence[int],
    ) -> None: ...
    def dispatch(self, look: Callable[[int, int], None] | None = None) -> dict[str, Any]: ...
    def combine(self, look: Callable[[int, int], None] | None = None) -> dict[str, Any]: ...
    def arrivals(self, combine: bool) -> tuple[int, int]: ...
    def first_reason(self) -> tuple[str, int] | None: ...
    def incidents(self, rank: int) -> list[dict[str, Any]]: ...

"""The simulated case: ranks, rows, routing and settings, and the buffer settings that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.buffer import sizes
from megatron_ep.buffer.cuda import MIN_STORES_PER_SM, CudaBackend
from megatron_ep.config import MAX_LOW_LATENCY_TOKENS, MAX_NODE_RANKS, MAX_TOPK, Config, Topology, require_int
from megatron_ep.normal.plan import NVL_BATCH, arrivals_of, pays_intra_rank_pass, sum_bytes_of

BF16_BYTES, SCALE_BYTES, WEIGHT_BYTES, BLOCK = 2, 4, 4, 128  # fp8 rows have a scale of fp32 for each 128 values
MAX_TOKENS, MAX_HIDDEN, MAX_SIMULATED_RANKS = 1 << 20, 1 << 20, 1 << 13


@dataclass(frozen=True)
class Case:
    """A dispatch and a combine, with a process per GPU.

    config: the Config of a `Buffer`, with the same defaults.
    mode: "normal", or "low-latency": both halves of a call in one launch, with max_tokens equal to num_tokens.
    num_tokens, hidden, topk: T, H and K.
    dtype: type of dispatched rows, "bf16" or "fp8" with a scale per 128 values; combined rows are bf16. The low-latency
        mode sends bf16 rows as fp8.
    sum_at: argument of the low-latency mode's combine, "token" or "expert", see `LowLatency.combine`.
    routing: how likely experts are, of which each token has distinct ones: "uniform": equally; "zipf:S": expert i with
        weight 1 / (i + 1)^S; "nodes:M": equally, on M random nodes per token.
    images: M, the number of simulated nodes, a divisor of N; the others do the same with all nodes shifted. None: N,
        which maps_rail requires.
    maps_rail: whether nodes map each other's memory, like nodes of one NVLink domain, and use no network cards.
    seed: seed of the experts that tokens choose.
    order_seed: seed of the order of simultaneous events; 0: the order of their announcement.
    """

    topology: Topology
    config: Config
    mode: str = "normal"
    num_tokens: int = 4096
    hidden: int = 7168
    topk: int = 8
    dtype: str = "bf16"
    sum_at: str = "token"
    routing: str = "uniform"
    images: int | None = None
    maps_rail: bool = False
    seed: int = 0
    order_seed: int = 0

    def __post_init__(self) -> None:
        self.config.check_ranks(self.topology)
        require_int("ranks_per_node", self.topology.ranks_per_node, 1, MAX_NODE_RANKS)
        if self.mode not in ("normal", "low-latency"):
            raise ValueError(f"mode is {self.mode!r}, must be normal or low-latency")
        require_int("num_tokens", self.num_tokens, 1, MAX_LOW_LATENCY_TOKENS if self.is_low_latency else MAX_TOKENS)
        require_int("hidden", self.hidden, 8, MAX_HIDDEN)
        require_int("topk", self.topk, 1, min(MAX_TOPK, self.config.num_experts))
        if self.dtype not in ("bf16", "fp8"):
            raise ValueError(f"dtype is {self.dtype!r}, must be bf16 or fp8")
        if self.sum_at not in ("token", "expert"):
            raise ValueError(f"sum_at is {self.sum_at!r}, must be token or expert")
        if self.sum_at == "expert" and not self.is_low_latency:
            raise ValueError("sum_at is 'expert', which only mode low-latency has")
        if self.hidden % 8:
            raise ValueError(f"hidden is {self.hidden}, must be a multiple of 8")
        if self.images is not None and (self.images < 1 or self.topology.nodes % self.images):
            raise ValueError(f"images is {self.images}, must divide the {self.topology.nodes} nodes")
        if self.maps_rail and self.simulated_nodes < self.topology.nodes:
            raise ValueError(f"images is {self.images}, must be None where nodes reach each other's memory")
        require_int("ranks that are simulated", self.simulated_ranks, 1, MAX_SIMULATED_RANKS)
        self._check_routing()
        require_int("num_sms", self.num_sms, 1, 1 << 10)

    def _check_routing(self) -> None:
        kind, _, text = self.routing.partition(":")
        error = ValueError(f"routing is {self.routing!r}, must be uniform, zipf:S with S in [0, 4], or nodes:M")
        if kind == "uniform" and not text:
            return
        try:
            value = float(text) if kind == "zipf" else int(text)
        except ValueError:
            raise error from None
        if kind == "nodes":
            nodes = self.topology.nodes
            require_int("M of routing nodes:M", value, -(-self.topk // (self.config.num_experts // nodes)), nodes)
        elif kind != "zipf" or not math.isfinite(value) or not 0 <= value <= 4:
            raise error

    @property
    def is_low_latency(self) -> bool:
        return self.mode == "low-latency"

    @property
    def simulated_nodes(self) -> int:
        return self.images or self.topology.nodes

    @property
    def simulated_ranks(self) -> int:
        return self.simulated_nodes * self.topology.ranks_per_node

    @property
    def num_sms(self) -> int:
        if self.config.num_sms is not None:
            return self.config.num_sms
        if self.is_low_latency:
            return sizes.low_latency_sms(lines=not self.uses_network)
        return sizes.default_sms(self.topology)

    @property
    def uses_network(self) -> bool:
        return self.topology.nodes > 1 and not self.maps_rail

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Returns the bytes of a dispatched row: payload and scales."""
        if self.dtype == "bf16":
            return self.hidden * BF16_BYTES, 0
        return self.hidden, -(-self.hidden // BLOCK) * SCALE_BYTES

    @property
    def combine_bytes(self) -> int:
        """Returns the bytes of a combined row, which has no scales."""
        return self.hidden * BF16_BYTES

    def row_format(self, payload_bytes: int, scale_bytes: int) -> _C.RowFormat:
        return _C.RowFormat(
            payload_bytes=payload_bytes,
            scale_bytes=scale_bytes,
            weight_bytes=WEIGHT_BYTES,
            topk=self.topk,
            payload_type=0,
        )

    def compiled_settings(self) -> dict[str, Any]:
        """Returns the settings for the extension, without the choices of experts."""
        of_mode = self._low_latency_settings() if self.is_low_latency else self._normal_settings()
        return {
            "nodes": self.topology.nodes,
            "ranks_per_node": self.topology.ranks_per_node,
            "simulated_nodes": self.simulated_nodes,
            "num_experts": self.config.num_experts,
            "topk": self.topk,
            "num_tokens": self.num_tokens,
            "num_sms": self.num_sms,
            "maps_rail": self.maps_rail,
            "seed": self.order_seed,
            **of_mode,
        }

    def _low_latency_settings(self) -> dict[str, Any]:
        payload, scales = self.row_bytes
        return {
            "payload_bytes": payload,
            "scale_bytes": scales,
            "combine_bytes": self.combine_bytes,
            "quantizes": self.dtype == "fp8",
            "sums_at_expert": self.sum_at == "expert",
        }

    def _normal_settings(self) -> dict[str, Any]:
        payload, _ = self.row_bytes
        rows, bf16_bytes = self.num_tokens * self.topk, self.combine_bytes
        arrived = round(rows * arrivals_of(self.topology.world_size, self.topk))
        least, forced = CudaBackend.min_local_bytes, self.config.tuning.local_pass
        stores = MIN_STORES_PER_SM * self.num_sms
        permutes = pays_intra_rank_pass(self.topology, self.topk, rows, payload, least, stores)
        sums = pays_intra_rank_pass(self.topology, self.topk, rows, bf16_bytes, least)
        has_memory = sum_bytes_of(self.topology.world_size, self.topk, rows, arrived, bf16_bytes) > 0
        sms, sizes_of_rows = self.num_sms, (self.row_bytes, (bf16_bytes, 0))
        return {
            **ring_settings(self.topology, self.config, sms, *sizes_of_rows, topk=self.topk, weight_bytes=WEIGHT_BYTES),
            "permutes_apart": permutes if forced is None else forced,
            "sums_apart": (sums if forced is None else forced) and has_memory,
        }

    def choices(self) -> list[Any]:
        """Returns the expert ids, int32 [T, K], of each simulated rank."""
        return [self._choices_of(rank) for rank in range(self.simulated_ranks)]

    def _choices_of(self, rank: int) -> torch.Tensor:
        kind, _, text = self.routing.partition(":")
        num_tokens, num_experts, nodes = self.num_tokens, self.config.num_experts, self.topology.nodes
        generator = torch.Generator().manual_seed((self.seed << 20) + rank)
        # The topk largest of log(weight) + Gumbel noise are drawn without replacement.
        keys = torch.rand(num_tokens, num_experts, generator=generator).clamp_(min=1e-30)
        if kind == "zipf":
            keys = -(-keys.log_()).log_()
            keys -= float(text) * torch.arange(1, num_experts + 1).log()
        elif kind == "nodes":
            chosen = torch.rand(num_tokens, nodes, generator=generator).topk(int(text), sorted=False).indices
            allowed = torch.zeros(num_tokens, nodes, dtype=torch.bool).scatter_(1, chosen, True)
            keys *= allowed.repeat_interleave(num_experts // nodes, dim=1)
        return keys.topk(self.topk, sorted=False).indices.to(torch.int32).contiguous()


def ring_settings(
    topology: Topology,
    config: Config,
    num_sms: int,
    dispatched: tuple[int, int],
    combined: tuple[int, int],
    *,
    topk: int,
    weight_bytes: int,
) -> dict[str, Any]:
    """Returns a buffer's settings of rings, for the extension.

    dispatched, combined: payload and scales of a row in bytes; only dispatched rows may have scales.

    Raises ValueError for rows that do not fit into a ring.
    """
    heap = sizes.gpu_heap(topology, config, num_sms)

    def slots(payload_bytes: int, scale_bytes: int) -> tuple[int, int, int]:
        row = _C.RowFormat(
            payload_bytes=payload_bytes, scale_bytes=scale_bytes, weight_bytes=weight_bytes, topk=topk, payload_type=0
        )
        nvl, rdma = row.slots(heap.nvl_ring_bytes), row.slots(heap.rdma_ring_bytes)
        if not nvl or not rdma:
            raise ValueError(
                f"a row has {payload_bytes + scale_bytes} bytes, but no ring holds one of {row.slot_bytes}"
            )
        return nvl, rdma, row.slot_bytes

    nvl_rows, rdma_rows, slot_bytes = slots(*dispatched)
    combine_nvl_rows, _, combine_slot_bytes = slots(*combined)
    return {
        "channels": sizes.gpu_channels(topology, config, num_sms),
        "nvl_rows": nvl_rows,
        "rdma_rows": rdma_rows,
        "nvl_batch": min(NVL_BATCH, max(1, nvl_rows // 2)),
        "rdma_chunk": config.tuning.rdma_chunk_tokens,
        "slot_ratio": nvl_rows // combine_nvl_rows,
        "payload_bytes": float(dispatched[0]),
        "scale_bytes": float(dispatched[1]),
        "slot_bytes": float(slot_bytes),
        "combine_bytes": float(combined[0]),
        "combine_slot_bytes": float(combine_slot_bytes),
        "weight_bytes": weight_bytes,
    }

"""Sizes of DeepEP's buffers, which users of V1 compute and pass on."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from megatron_ep import _C, config
from megatron_ep.buffer import sizes
from megatron_ep.buffer.arguments import MAX_PADDED_ROWS

ALIGNMENT = 128  # bytes, to whose multiples sizes are rounded up
NODE_RANKS = 8  # ranks of a node in DeepEP


@dataclass(frozen=True)
class Config:
    """DeepEP's Config. Only num_sms is used: the sizes of chunks are stored and ignored."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            config.require_int(f"Config.{name}", getattr(self, name), 1, 1 << 20)
        for kind in ("nvl", "rdma"):
            send = getattr(self, f"num_max_{kind}_chunked_send_tokens")
            recv = getattr(self, f"num_max_{kind}_chunked_recv_tokens")
            if send >= recv:
                raise ValueError(
                    f"Config.num_max_{kind}_chunked_send_tokens is {send}, must be less than the {recv} of "
                    f"num_max_{kind}_chunked_recv_tokens"
                )

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes of a buffer on each rank, without those for other nodes. Buffers accept any number: they
        are as large as calls need."""
        parts = self._parts(hidden_bytes, num_ranks)
        return _align(sum(size for name, size in parts.items() if not name.startswith("network")))

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Returns the bytes for other nodes; 0 on one node."""
        parts = self._parts(hidden_bytes, num_ranks)
        return _align(sum(size for name, size in parts.items() if name.startswith("network")))

    def _parts(self, hidden_bytes: int, num_ranks: int) -> dict[str, int]:
        config.require_int("hidden_bytes", hidden_bytes, 1, config.MAX_RING // 64)
        ranks = topology_of(num_ranks)
        settings = config.Config(num_experts=num_ranks, row_bytes=row_class(hidden_bytes), num_sms=self.num_sms)
        return sizes.gpu_heap(ranks, settings, self.num_sms).parts


def topology_of(num_ranks: int) -> config.Topology:
    """Returns the topology for which DeepEP computes sizes: nodes of 8 ranks, or one node of any other number."""
    config.require_int("num_ranks", num_ranks, 1, config.MAX_RANKS)
    if num_ranks > NODE_RANKS and num_ranks % NODE_RANKS == 0:
        return config.Topology(num_ranks // NODE_RANKS, NODE_RANKS)
    return config.Topology(1, num_ranks)


def row_class(row_bytes: int) -> int | None:
    """Returns `Config.row_bytes` of a buffer for such rows: a power of two, so that rows of similar size share one."""
    return None if row_bytes <= sizes.WIDEST_ROW_BYTES else 1 << (row_bytes - 1).bit_length()


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Returns the bytes that the low-latency mode takes on each rank, for any K of DeepEP (at most 11)."""
    ranks = topology_of(num_ranks)
    row = _C.RowFormat(payload_bytes=2 * hidden, scale_bytes=0, weight_bytes=0, topk=11, payload_type=0)
    heap = _C.LowLatencyHeap(
        nodes=ranks.nodes,
        ranks_per_node=ranks.ranks_per_node,
        num_experts=num_experts,
        max_tokens=max_tokens,
        largest=row,
        staged=ranks.nodes > 1,
        channels=1,
        masking=False,
        lines=ranks.nodes == 1,
    )
    return _align(heap.bytes)


def tokens_in(num_bytes: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Returns the largest number of tokens per rank for which the low-latency mode takes at most `num_bytes`, or 0."""
    most = min(config.MAX_LOW_LATENCY_TOKENS, MAX_PADDED_ROWS // num_experts)
    return bisect.bisect_right(
        range(1, most + 1), num_bytes, key=lambda tokens: low_latency_bytes(tokens, hidden, num_ranks, num_experts)
    )


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

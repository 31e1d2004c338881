"""`megatron-ep env --plan NODES RANKS`: what a buffer on GPUs would be made of. Needs no GPU.

Every figure comes from the code that sizes a buffer and its launches, so that it cannot differ from them. What is
launched ahead of its counts may have room for a seventh more rows.
"""

from __future__ import annotations

from typing import Any

from megatron_ep import _C
from megatron_ep.buffer import sizes
from megatron_ep.config import MAX_NODE_RANKS, MAX_ROWS, MAX_TOPK, Config, Topology, require_int
from megatron_ep.fabrics.nvshmem import queue_pairs
from megatron_ep.normal.plan import arrivals_of, sum_bytes_of
from megatron_ep.normal.row_counts import max_rail_rows

BF16_BYTES = 2
Sections = dict[str, dict[str, Any]]


def make_plan(
    topology: Topology, config: Config, *, hidden: int, topk: int, num_tokens: int, max_recv_tokens: int | None = None
) -> Sections:
    """Sections of named facts about one rank, a process a GPU.

    hidden: H of bf16 rows.
    topk: K.
    num_tokens: T.
    max_recv_tokens: R. None: T * K, so many as arrive when experts are chosen evenly.

    Raises ValueError for what `megatron_ep.Buffer` and `dispatch` would refuse.
    """
    config.check_ranks(topology)
    require_int("RANKS (of a node)", topology.ranks_per_node, 1, MAX_NODE_RANKS)
    require_int("hidden", hidden, 1, 1 << 20)
    require_int("topk", topk, 1, MAX_TOPK)
    require_int("max_tokens", num_tokens, 1, 1 << 26)
    rows = num_tokens * topk if max_recv_tokens is None else max_recv_tokens
    require_int("max_recv_tokens", rows, 1, MAX_ROWS)
    sms = config.num_sms or sizes.default_sms(topology)
    heap = sizes.gpu_heap(topology, config, sms)
    row = _C.RowFormat(payload_bytes=hidden * BF16_BYTES, scale_bytes=0, weight_bytes=4, topk=topk, payload_type=0)
    nvl_rows, rdma_rows = (row.slots(size) for size in (heap.nvl_ring_bytes, heap.rdma_ring_bytes))
    if not nvl_rows or not rdma_rows:
        raise ValueError(f"hidden is {hidden}, but no ring holds a row of {row.slot_bytes} bytes: set row_bytes")
    rail = max_rail_rows(topology, rows, rows, num_tokens)
    tables = {
        "counts and indices": 4 * heap.layout(num_tokens, topk)["size"],
        f"output rows of {rows} rows": 4 * rows * topk,
        f"experts of {rail} rows that pass through": 4 * rail * topk,
    }
    # without a limit so many tokens arrive as lie on a rank when experts are chosen evenly
    tokens = rows if max_recv_tokens is not None else round(rows * arrivals_of(topology.world_size, topk))
    sums = sum_bytes_of(topology.world_size, topk, rows, tokens, hidden * BF16_BYTES)
    others = topology.nodes - 1
    ring_rows = min(nvl_rows, rdma_rows) if others else nvl_rows
    between = {
        "to and from another node, each": f"{heap.channels * others} of {rdma_rows} rows, {heap.rdma_ring_bytes} bytes",
        "rows a put": min(config.tuning.rdma_chunk_tokens, max(1, rdma_rows // 2)),
        "queue pairs over IBGDA, to all ranks": topology.world_size * queue_pairs(heap, sms),
    }
    return {
        f"{topology.nodes} x {topology.ranks_per_node} ranks, {config.num_experts} experts, H = {hidden} bf16": {
            "SMs": sms,
            "channels": heap.channels,
            "warps, dispatch": _warps(topology, sms, heap.channels, ring_rows, combine=False),
            "warps, combine": _warps(topology, sms, heap.channels, ring_rows, combine=True),
        },
        "rings": {
            "inside a node": f"{heap.channels * topology.world_size} of {nvl_rows} rows, {heap.nvl_ring_bytes} bytes",
            **(between if others else {}),
        },
        "memory a rank": {
            **{name: _megabytes(size) for name, size in heap.parts.items()},
            "heap": _megabytes(heap.bytes),
        },
        f"memory of a handle, T = {num_tokens}, K = {topk}": {
            **{name: _megabytes(size) for name, size in tables.items()},
            "handle": _megabytes(sum(tables.values())),
            "besides, in a combine: sums of its intra-rank pass, at most": _megabytes(sums),
        },
    }


def _warps(topology: Topology, sms: int, channels: int, ring_rows: int, *, combine: bool) -> str:
    nodes, ranks = topology.nodes, topology.ranks_per_node
    roles = _C.cuda_roles(
        nodes=nodes, ranks_per_node=ranks, num_sms=sms, channels=channels, ring_rows=ring_rows, combine=combine
    )
    if roles is None:
        raise ValueError(f"num_sms is {sms}, too few for {channels} channels")
    peers = f"{roles['peer_warps']} {'senders' if combine else 'receivers'} of {roles['ranks_per_peer_warp']} ranks"
    own = f"{roles['self_warps']} {'receiver' if combine else 'sender'}{'s' if roles['self_warps'] > 1 else ''}"
    if nodes == 1:
        return f"{roles['warps']} a channel: {own}, {peers}"
    own += "" if combine else " inside the node"
    kinds = ("forwarders",) if combine else ("senders", "forwarders")
    rails = ", ".join(f"{roles['rdma_warps']} {name} of {roles['nodes_per_rdma_warp']} nodes" for name in kinds)
    return f"{roles['warps']} a channel: {own}, {peers}, {rails}, {2 * roles['coordinators']} coordinators"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"

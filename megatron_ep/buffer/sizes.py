"""Sizes of a buffer on a rank: SMs, channels, rings, and the heap that holds them.

A ring holds a power of two of rows. If `Tuning` has no size, it is sized in rows of 14 KiB (H = 7168 in bf16, the
widest of the public models), or of `Config.row_bytes` if those are larger.
"""

from __future__ import annotations

from megatron_ep import _C
from megatron_ep.config import MAX_TOPK, Config, Topology
from megatron_ep.fabrics.gpu import DEFAULT_SMS

# SMs of the low-latency mode with packets with inline flags (lines): at T = 128 on two H200 dispatch and combine take
# 77 us with 24 SMs, 43 with 64 and 38 with 128.
LINES_SMS = 64
# Tokens of a rank for each SM up to which dispatch and combine take less time in one hop than through rings. On two
# H200, in us: with 24 SMs 77 in one hop and 76 through rings at T = 128, 127 and 122 at T = 256; with 64 SMs 124 and
# 145 at T = 512, 235 and 226 at T = 1024.
ONE_HOP_TOKENS_PER_SM = 8
# Bytes of a rank's rows up to which this holds if a network carries them, to each rank and not only to each node of a
# token. Predicted, see docs/tuning.md.
ONE_HOP_BYTES_OVER_NETWORK = 448 << 10
# From MANY_NODES nodes on the normal mode waits for the network card, so that fewer SMs take hardly longer: at T = 4096
# dispatch and combine take at most 3 % longer, by the predictions in docs/tuning.md.
MANY_NODES, MANY_NODES_SMS = 8, 16
WIDEST_ROW_BYTES = 14 << 10
# Rows of an NVLink ring on a GPU: with two to four its writer and its reader work in parallel, and all rings stay in
# the L2 cache.
NVL_ROWS = 4
# Rows of a network ring, which hide the network's latency: 32, or fewer if all network rings of a rank would take more
# than RDMA_BYTES. With 16 channels, 8 rows of 14 KiB are 1.8 MB in flight to each node: 37 us at 50 GB/s (400 Gbit/s).
MAX_RDMA_ROWS, MIN_RDMA_ROWS = 32, 8
RDMA_BYTES = 192 << 20
SHARED_GPU_RDMA_ROWS = 4  # there is no network latency to hide, and all rings share one cache
HOST_NVL_RING_BYTES, HOST_RDMA_RING_BYTES = 256 << 10, 512 << 10


def default_sms(topology: Topology) -> int:
    """Returns the SMs of a rank on a GPU for the normal mode, if the config has none."""
    return MANY_NODES_SMS if topology.nodes >= MANY_NODES else DEFAULT_SMS


def most_tokens_in_one_hop(config: Config, sms: int, over_network: bool) -> int:
    """Returns the tokens of a rank up to which a launch on this many SMs is faster in one hop than through rings."""
    if over_network:
        return max(1, ONE_HOP_BYTES_OVER_NETWORK // (config.row_bytes or WIDEST_ROW_BYTES))
    return ONE_HOP_TOKENS_PER_SM * sms


def low_latency_sms(lines: bool) -> int:
    """Returns the SMs of a rank on a GPU for the low-latency mode, if the config has none. lines: see `LINES_SMS`."""
    return LINES_SMS if lines else DEFAULT_SMS


def gpu_channels(topology: Topology, config: Config, sms: int, local_ranks: int = 1) -> int:
    """Returns the channels of a buffer on a GPU.

    sms: SMs of each rank.
    local_ranks: ranks that share a GPU.
    """
    if config.tuning.channels is not None:
        return config.tuning.channels
    nodes, ranks_per_node = topology.nodes, topology.ranks_per_node
    return _C.cuda_channels(nodes=nodes, ranks_per_node=ranks_per_node, num_sms=sms, local_ranks=local_ranks)


def gpu_heap(topology: Topology, config: Config, sms: int, local_ranks: int = 1) -> _C.Heap:
    """Returns the heap of a rank on a GPU; see `gpu_channels`."""
    channels = gpu_channels(topology, config, sms, local_ranks)
    slot = slot_bytes(config)
    rdma_rows = MAX_RDMA_ROWS if local_ranks == 1 else SHARED_GPU_RDMA_ROWS
    rings = 2 * channels * (topology.nodes - 1)  # one to stage and one to receive
    while rdma_rows > MIN_RDMA_ROWS and rings * rdma_rows * slot > RDMA_BYTES:
        rdma_rows //= 2
    return _heap(topology, config, channels, NVL_ROWS * slot, rdma_rows * slot)


def host_heap(topology: Topology, config: Config) -> _C.Heap:
    """Returns the heap of a rank on the host."""
    least = NVL_ROWS * slot_bytes(config)
    return _heap(
        topology, config, config.tuning.channels or 1, max(HOST_NVL_RING_BYTES, least), max(HOST_RDMA_RING_BYTES, least)
    )


def slot_bytes(config: Config) -> int:
    """Returns the bytes of a slot for the largest row and all that may travel with it: 16 KiB, or more if row_bytes is
    larger."""
    return max(WIDEST_ROW_BYTES + (2 << 10), _row(config.row_bytes or 0).slot_bytes)


def largest_row(config: Config) -> _C.RowFormat:
    """Returns the largest row of a call in one hop."""
    return _row(max(WIDEST_ROW_BYTES, config.row_bytes or 0))


def _row(payload_bytes: int) -> _C.RowFormat:
    return _C.RowFormat(payload_bytes=payload_bytes, scale_bytes=0, weight_bytes=8, topk=MAX_TOPK, payload_type=0)


def _heap(topology: Topology, config: Config, channels: int, nvl_ring_bytes: int, rdma_ring_bytes: int) -> _C.Heap:
    """Returns a heap. nvl_ring_bytes, rdma_ring_bytes: sizes of rings if the config has none."""
    return _C.Heap(
        nodes=topology.nodes,
        ranks_per_node=topology.ranks_per_node,
        num_experts=config.num_experts,
        channels=channels,
        nvl_ring_bytes=config.tuning.nvl_ring_bytes or nvl_ring_bytes,
        rdma_ring_bytes=config.tuning.rdma_ring_bytes or rdma_ring_bytes,
    )

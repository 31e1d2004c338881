"""The low-latency mode's memory, and its launches on the ranks of a buffer that live in this process."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_ep import _C
from megatron_ep.buffer import sizes
from megatron_ep.buffer.host import HostBackend
from megatron_ep.buffer.interface import Backend, Values
from megatron_ep.buffer.low_latency_mask import Masks
from megatron_ep.fabrics import gpu
from megatron_ep.fabrics.connection import LowLatencyConnection

SEND, RECEIVE, SEND_AND_RECEIVE = map(int, (_C.Phase.send, _C.Phase.receive, _C.Phase.send_and_receive))

HOST_WARPS = 1
SEEDED_WARPS = 3  # with a seed, more warps give more interleavings


class LowLatencyRanks:
    """The low-latency mode of the ranks of this process."""

    def __init__(self, heap: _C.LowLatencyHeap, connection: LowLatencyConnection, masks: Masks | None):
        self.heap = heap
        self._offsets: dict[int, dict[str, int]] = {}
        self.launcher: _C.LowLatencyLauncher = connection.launcher
        self._masks = masks  # launches, including those in graphs, need the memory of the masks
        self.memories = connection.memories
        self.network_memory = connection.network_memory

    def offsets(self, topk: int) -> dict[str, int]:
        """Returns the offsets of the parts of a handle's layout."""
        if topk not in self._offsets:
            self._offsets[topk] = self.heap.layout(topk=topk, warps=self.launcher.warps)
        return self._offsets[topk]

    def launch(self, backend: Backend, call: _C.Call, stream: int, values: Values) -> Any:
        """Launches both halves of a call. Returns what `_C.Launcher.launch` does."""
        # Blocks of processes that share a GPU may not run in parallel, so that no launch may wait for another.
        last = SEND_AND_RECEIVE
        if backend.shares_gpu:
            backend.launch(self.launcher, call, SEND, stream, values, self)
            last = RECEIVE
        return backend.launch(self.launcher, call, last, stream, values, self)

    def reset(self) -> None:
        self.launcher.reset()

    def release(self) -> None:
        del self.launcher
        self.memories.clear()
        self.network_memory = None


class OneHop(NamedTuple):
    """The launches of a buffer's dispatches and combines with few tokens.

    max_tokens: promised tokens of a rank up to which a dispatch takes them. row_bytes: size of the largest row.
    keeps_lines: whether rows go as lines, which flat rows need.
    """

    ranks: LowLatencyRanks
    max_tokens: int
    row_bytes: int
    keeps_lines: bool


def connect_one_hop(group: Any) -> OneHop | None:
    """Returns the launches of calls with at most `Config.max_tokens` tokens; None without it. Collective."""
    if (most := group.config.max_tokens) is None:
        return None
    largest = sizes.largest_row(group.config)
    ranks, _ = connect(group, most, largest, None, sums_at_expert=True)
    group.live_backend().attach(ranks)
    return OneHop(ranks, ranks.heap.max_tokens, largest.payload_bytes, ranks.heap.lines)


def connect(
    group: Any, max_tokens: int, largest: Any, mask_timeout: float | None, *, sums_at_expert: bool = False
) -> tuple[LowLatencyRanks, Masks | None]:
    """Returns the ranks and the masks of a buffer's low-latency mode. Collective.

    sums_at_expert: whether every combine sums there, and on a GPU max_tokens is only as large as is faster than rings.
    """
    backend, topology = group.live_backend(), group.topology
    local = len(group.ranks) == topology.world_size
    masks = None
    if mask_timeout is not None:
        masks = Masks(
            group.ranks,
            topology.world_size,
            group.device,
            mask_timeout=mask_timeout,
            timeout=group.config.timeout_seconds,
        )
        backend.masks = True

    def make_heap(channels: int, staged: bool, lines: bool = False) -> Any:
        """Returns a heap. lines: whether to use packets with inline flags, which needs mapped ranks without masks."""
        return _C.LowLatencyHeap(
            nodes=topology.nodes,
            ranks_per_node=topology.ranks_per_node,
            num_experts=group.config.num_experts,
            max_tokens=max_tokens,
            largest=largest,
            staged=staged,
            channels=channels,
            masking=masks is not None,
            lines=lines,
            sums_at_expert=sums_at_expert,
        )

    if isinstance(backend, HostBackend):
        warps = SEEDED_WARPS if backend.is_seeded else HOST_WARPS
        # With a seed, rows pass through a simulated network, and some warps share a channel.
        has_network = backend.is_seeded or group.spans_machines
        staged = has_network and topology.nodes > 1
        heap = make_heap(max(1, warps - 1), staged, lines=masks is None and not staged)
        anonymous = [_C.Segment.anonymous(heap.bytes) for _ in group.ranks] if local else None
        segments = anonymous or group.shared_segments(heap.bytes)
        made = _C.host_low_latency(group=backend.launcher, heap=heap, segments=segments, warps=warps)
        group.open_on_network(tolerates_loss=masks is not None)
        return LowLatencyRanks(heap, LowLatencyConnection(made, list(segments)), masks), masks
    is_mapped = backend.connection.maps_all_ranks
    lines = is_mapped and masks is None and group.keeps_lines()
    blocks, staged = _blocks(group, lines), not is_mapped and topology.nodes > 1
    if sums_at_expert:
        max_tokens = min(max_tokens, sizes.most_tokens_in_one_hop(group.config, blocks, staged))
    heap = make_heap(1 if is_mapped else blocks, staged, lines)
    connection = group.low_latency_connection(heap, blocks)
    if not is_mapped:
        group.open_on_network(tolerates_loss=masks is not None)
    return LowLatencyRanks(heap, connection, masks), masks


def _blocks(group: Any, lines: bool) -> int:
    """Returns the SMs of a launch. The ranks of this process are launched in sequence, so each may use those of all."""
    return gpu.num_sms(group.config, group.device, len(group.ranks), sizes.low_latency_sms(lines)) * len(group.ranks)

"""The low-latency mode's memory, and its launches on the ranks of a buffer that live in this process."""

from __future__ import annotations

import logging
from typing import Any

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

log = logging.getLogger(__name__)


class LowLatencyRanks:
    """The low-latency mode of the ranks of this process, a part of their buffer. Construction is collective.

    group: the ranks, a `RankGroup`; not kept, because it keeps this, and only the collector would then free both.
    max_tokens: largest number of tokens of a rank; less if `sums_at_expert` lowers it.
    largest: format of the largest row.
    mask_timeout: see `LowLatency`; None: no masks.
    sums_at_expert: whether every combine sums there, and on a GPU max_tokens is only as large as is faster than rings.
    """

    def __init__(
        self, group: Any, max_tokens: int, largest: Any, mask_timeout: float | None, *, sums_at_expert: bool = False
    ):
        self.largest = largest
        self.masks: Masks | None = None  # launches, including those in graphs, need their memory
        if mask_timeout is not None:
            world, timeout = group.topology.world_size, group.config.timeout_seconds
            self.masks = Masks(group.ranks, world, group.device, mask_timeout=mask_timeout, timeout=timeout)
            group.live_backend().masks = True
        self.heap, connection = connect(group, max_tokens, largest, self.masks is not None, sums_at_expert)
        self.max_tokens: int = self.heap.max_tokens
        self.launcher: _C.LowLatencyLauncher = connection.launcher
        self.memories, self.network_memory = connection.memories, connection.network_memory
        self._offsets: dict[int, dict[str, int]] = {}

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
        if self.masks is not None:
            self.masks.reset()

    def release(self) -> None:
        del self.launcher
        self.memories.clear()
        self.network_memory = None


def connect_one_hop(group: Any) -> LowLatencyRanks | None:
    """Returns the launches of calls with at most `Config.max_tokens` tokens; None without it. Collective."""
    if (most := group.config.max_tokens) is None:
        return None
    ranks = LowLatencyRanks(group, most, sizes.largest_row(group.config), None, sums_at_expert=True)
    group.live_backend().attach(ranks)
    if ranks.max_tokens < most and 0 in group.ranks:
        log.warning(
            "Config.max_tokens is %d, but with more than %d tokens rings are faster here: only calls whose max_tokens "
            "is at most that go in one hop",
            most,
            ranks.max_tokens,
        )
    return ranks


def connect(
    group: Any, max_tokens: int, largest: Any, masking: bool, sums_at_expert: bool
) -> tuple[_C.LowLatencyHeap, LowLatencyConnection]:
    """Connects the ranks of a low-latency mode. Collective. See `LowLatencyRanks`."""
    backend, topology = group.live_backend(), group.topology

    def make_heap(channels: int, staged: bool, lines: bool) -> _C.LowLatencyHeap:
        """Returns a heap. lines: whether to use packets with inline flags, which needs mapped ranks without masks."""
        return _C.LowLatencyHeap(
            nodes=topology.nodes,
            ranks_per_node=topology.ranks_per_node,
            num_experts=group.config.num_experts,
            max_tokens=max_tokens,
            largest=largest,
            staged=staged,
            channels=channels,
            masking=masking,
            lines=lines,
            sums_at_expert=sums_at_expert,
        )

    if isinstance(backend, HostBackend):
        warps = SEEDED_WARPS if backend.is_seeded else HOST_WARPS
        # With a seed, rows pass through a simulated network, and some warps share a channel.
        has_network = backend.is_seeded or group.spans_machines
        staged = has_network and topology.nodes > 1
        heap = make_heap(max(1, warps - 1), staged, lines=not masking and not staged)
        segments = group.shared_segments(heap.bytes)
        made = _C.host_low_latency(launcher=backend.launcher, heap=heap, segments=segments, warps=warps)
        group.open_on_network(tolerates_loss=masking)
        return heap, LowLatencyConnection(made, segments)
    is_mapped = backend.connection.maps_all_ranks
    lines = is_mapped and not masking and group.keeps_lines()
    # The ranks of this process are launched in sequence, so each may use the SMs of all.
    local = len(group.ranks)
    blocks = gpu.num_sms(group.config, group.device, local, sizes.low_latency_sms(lines)) * local
    staged = not is_mapped and topology.nodes > 1
    if sums_at_expert:
        max_tokens = min(max_tokens, sizes.most_tokens_in_one_hop(group.config, blocks, staged))
    heap = make_heap(1 if is_mapped else blocks, staged, lines)
    connection = group.low_latency_connection(heap, blocks)
    if not is_mapped:
        group.open_on_network(tolerates_loss=masking)
    return heap, connection

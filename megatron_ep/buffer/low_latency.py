"""The low-latency mode's memory, and its launches on the ranks of a buffer that live in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_ep import _C
from megatron_ep.buffer import sizes
from megatron_ep.buffer.cuda import CudaBackend
from megatron_ep.buffer.host import HostBackend
from megatron_ep.buffer.interface import RankTensors
from megatron_ep.buffer.low_latency_mask import Masks
from megatron_ep.fabrics import gpu
from megatron_ep.fabrics.connection import LowLatencyConnection

HOST_WARPS = 1
SEEDED_WARPS = 3  # more to interleave


class Call(Protocol):
    """A dispatch or combine whose sending half was launched."""

    @property
    def received(self) -> bool: ...

    def give_up(self) -> None: ...  # it can be received no more


class LowLatencyRanks(Protocol):
    """See `interface.Backend`: the same for the halves of low-latency calls.

    Tensors are handed over as `interface.RankTensors`, one per rank.
    """

    warps: int  # of a rank in a launch
    memories: list[Any]  # see `interface.HasMemory`
    network_memory: Any

    def enqueue_dispatch(
        self,
        tensors: Sequence[RankTensors],
        row: _C.RowFormat,
        options: _C.LowLatencyOptions,
        launches: _C.LowLatencyLaunches,
    ) -> None: ...

    def enqueue_combine(
        self,
        tensors: Sequence[RankTensors],
        row: _C.RowFormat,
        options: _C.LowLatencyOptions,
        dtype: int,
        launches: _C.LowLatencyLaunches,
    ) -> None: ...

    def reset(self) -> None: ...

    def let_go(self) -> None: ...  # see `interface.Part`


class HostLowLatencyRanks:
    """See `LowLatencyRanks`."""

    def __init__(self, backend: HostBackend, heap: _C.LowLatencyHeap, segments: Sequence[_C.Segment], warps: int):
        self.warps = warps
        self.memories = list(segments)
        self.network_memory = None
        self._group = _C.LowLatencyGroup(group=backend.group, heap=heap, segments=self.memories, warps=warps)
        self.enqueue_dispatch = self._group.dispatch
        self.enqueue_combine = self._group.combine

    def reset(self) -> None:
        self._group.reset()

    def let_go(self) -> None:
        del self._group
        self.memories.clear()


class InFlight:
    """The last two calls of a kind: a third must not be sent before the first has been received."""

    def __init__(self, kind: str):
        self._kind = kind
        self._calls: deque[Call] = deque(maxlen=2)

    def check(self) -> None:
        """Raises ValueError if there is no bank for another call."""
        if len(self._calls) == 2 and not self._calls[0].received:
            raise ValueError(
                f"the {self._kind} before the last has not been received, must be before another {self._kind} is sent: "
                "call the hook that it returned (two may be under way)"
            )

    def check_received(self) -> None:
        """Raises ValueError if a call has not been received."""
        if not all(call.received for call in self._calls):
            raise ValueError(f"a {self._kind} is under way, must be received before: call the hook that it returned")

    def add(self, call: Call) -> None:
        self._calls.append(call)

    def give_up(self) -> None:
        for call in self._calls:
            call.give_up()
        self._calls.clear()


class CudaLowLatencyRanks:
    """See `LowLatencyRanks`: on torch's current stream."""

    def __init__(self, backend: CudaBackend, connection: LowLatencyConnection, masks: Masks | None):
        self._backend = backend
        self._group = connection.group
        self._masks = masks  # for as long as there are launches, those in graphs too
        self.memories = connection.memories
        self.network_memory = connection.network_memory
        self.warps = self._group.warps

    def enqueue_dispatch(self, tensors: Sequence[Any], row: Any, options: Any, launches: Any) -> None:
        for each in self._one_by_one(launches):
            self._backend.launch(self._group.dispatch, tensors, row, options, each, part=self)

    def enqueue_combine(self, tensors: Sequence[Any], row: Any, options: Any, dtype: int, launches: Any) -> None:
        for each in self._one_by_one(launches):
            self._backend.launch(self._group.combine, tensors, row, options, dtype, each, part=self)

    def _one_by_one(self, launches: Any) -> Sequence[Any]:
        """Processes that share a GPU may keep each other's blocks from it: then no launch may wait for another."""
        if self._backend.shares_gpu and launches is _C.LowLatencyLaunches.both:
            return _C.LowLatencyLaunches.send, _C.LowLatencyLaunches.receive
        return (launches,)

    def reset(self) -> None:
        self._group.reset()

    def let_go(self) -> None:
        del self._group, self._backend
        self.memories.clear()
        self.network_memory = None


def connect(
    group: Any, max_tokens: int, largest: Any, mask_timeout: float | None
) -> tuple[Any, LowLatencyRanks, Masks | None]:
    """Returns the heap, the ranks and the masks of a buffer's low-latency mode. Collective."""
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
        )

    if isinstance(backend, HostBackend):
        warps = SEEDED_WARPS if backend.is_seeded else HOST_WARPS
        # With a seed rows pass through a simulated network, and some warps share a channel.
        has_network = backend.is_seeded or group.spans_machines
        staged = has_network and topology.nodes > 1
        heap = make_heap(max(1, warps - 1), staged, lines=masks is None and not staged)
        anonymous = [_C.Segment.anonymous(heap.bytes) for _ in group.ranks] if local else None
        segments = anonymous or group.shared_segments(heap.bytes)
        ranks = HostLowLatencyRanks(backend, heap, segments, warps)
        group.open_on_network(tolerates_loss=masks is not None)
        return heap, ranks, masks
    is_mapped = isinstance(backend.group, _C.CudaGroup)
    lines = is_mapped and masks is None and group.keeps_lines()
    wanted = sizes.LINES_SMS if lines else sizes.DEFAULT_SMS
    # The ranks of this process are launched one after the other, so that each launch may use the SMs of all.
    blocks = gpu.num_sms(group.config, group.device, len(group.ranks), wanted) * len(group.ranks)
    heap = make_heap(1 if is_mapped else blocks, staged=not is_mapped and topology.nodes > 1, lines=lines)
    connection = group.low_latency_connection(heap, blocks)
    if not is_mapped:
        group.open_on_network(tolerates_loss=masks is not None)
    return heap, CudaLowLatencyRanks(backend, connection, masks), masks

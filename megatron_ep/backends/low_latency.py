"""The low-latency mode's memory, and its launches on the ranks of a buffer that live in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_ep import _C
from megatron_ep.backends.host import HostBackend
from megatron_ep.errors import EPError

HOST_WARPS = 1
SEEDED_WARPS = 3  # more to interleave


class Call:
    """A dispatch or combine whose sending half was launched."""

    received = False


class LowLatencyRanks(Protocol):
    """See `interface.Backend`: the same for the halves of low-latency calls.

    Tensors are handed over as `_C.LowLatencyTensors`, one per rank.
    """

    warps: int  # of a rank in a launch

    def dispatch(self, tensors: Sequence[Any], row: Any, options: Any, *, receive: bool) -> None: ...

    def combine(self, tensors: Sequence[Any], row: Any, options: Any, *, receive: bool, dtype: int) -> None: ...

    def reset(self) -> None: ...


class HostLowLatencyRanks:
    """See `LowLatencyRanks`."""

    def __init__(self, backend: HostBackend, heap: Any, segments: Sequence[Any], warps: int):
        self.warps = warps
        self._group = _C.LowLatencyGroup(group=backend.group, heap=heap, segments=list(segments), warps=warps)

    def dispatch(self, tensors: Sequence[Any], row: Any, options: Any, *, receive: bool) -> None:
        self._group.dispatch(receive=receive, tensors=list(tensors), format=row, options=options)

    def combine(self, tensors: Sequence[Any], row: Any, options: Any, *, receive: bool, dtype: int) -> None:
        self._group.combine(receive=receive, tensors=list(tensors), format=row, options=options, dtype=dtype)

    def reset(self) -> None:
        self._group.reset()


class InFlight:
    """The last two calls of a kind: a third must not be sent while the first has not been received."""

    def __init__(self, kind: str):
        self._kind = kind
        self._calls: deque[Call] = deque(maxlen=2)

    def check(self) -> None:
        """Raises ValueError if a further call has no bank."""
        if len(self._calls) == 2 and not self._calls[0].received:
            raise ValueError(
                f"the {self._kind} before the last has not been received, must be before another {self._kind} is sent: "
                "call the hook that it returned (two may be under way)"
            )

    def add(self, call: Call) -> None:
        self._calls.append(call)

    def clear(self) -> None:
        self._calls.clear()


def connect(buffer: Any, max_tokens: int, largest: Any) -> tuple[Any, LowLatencyRanks]:
    """The heap and the ranks of a buffer's low-latency mode. Collective."""
    backend, topology = buffer._live_backend(), buffer.topology
    if not isinstance(backend, HostBackend):
        raise EPError(f"the low-latency mode is not there yet on device {str(buffer.device)!r}, only on the host")
    local = len(buffer.ranks) == topology.world_size
    warps = SEEDED_WARPS if backend.is_seeded else HOST_WARPS
    heap = _C.LowLatencyHeap(
        nodes=topology.nodes,
        ranks_per_node=topology.ranks_per_node,
        num_experts=buffer.config.num_experts,
        max_tokens=max_tokens,
        largest=largest,
        staged=topology.nodes > 1,
        channels=warps,
    )
    segments = [_C.Segment.anonymous(heap.bytes) for _ in buffer.ranks] if local else buffer.shared_segments(heap.bytes)
    return heap, HostLowLatencyRanks(backend, heap, segments, warps)

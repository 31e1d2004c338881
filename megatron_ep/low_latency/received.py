"""The result of a low-latency dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.normal.handle import shapes_of


@dataclass(repr=False)
class LowLatencyReceived:
    """Result of a low-latency dispatch: tensors on the buffer's device, or lists with one tensor per rank with a
    LocalCluster. Valid once the call has been received.

    x: [L, W * max_tokens, H], or with expert_capacity that many rows per expert (layout "masked"), or [R, H]
        ("grouped"), in the dtype that was dispatched, float8_e4m3fn with `fp8`. The rows of a local expert are
        contiguous, in the order of (source rank, token). Rows without a token are undefined, or zeros if the dispatched
        tensors require a gradient.
    scales: for float8 rows, otherwise None: the shape of x with ceil(H / 128) instead of H, float32 or float8_e8m0fnu.
        Column-major float8_e8m0fnu are int32 with H / 512 instead of H, four scales each, the first in the low byte.
    straight_through: if bfloat16 x became float8 and requires a gradient, otherwise None: the shape of x, bfloat16. Has
        no memory and must not be read; its gradient, for example from `float8.dequantize`, is that of the rows.
    probs: x's shape without H, the weight of each row; None if no weights were given.
    handle: for combine.

    Read from the handle: recv_counts, expert_starts and overflow. Do not write to overflow.
    """

    x: Any
    scales: Any
    straight_through: Any
    probs: Any
    handle: LowLatencyHandle

    def __repr__(self) -> str:
        return shapes_of(self, "x", "scales", "probs")

    @property
    def recv_counts(self) -> Any:
        """int32 [L], rows that arrived for each local expert, without padding: the `masked_m` of a masked GEMM."""
        return _one(self.handle, self.handle.counts)

    @property
    def expert_starts(self) -> Any:
        """int32 [L + 1], the first row of each expert, counted in rows of x; the last entry is where the rows end."""
        return _one(self.handle, self.handle.starts)

    @property
    def overflow(self) -> Any:
        """int32 [1], not 0 if rows did not fit into max_recv_tokens or expert_capacity; those rows are missing."""
        return _one(self.handle, self.handle.overflow)


def _one(handle: LowLatencyHandle, view_of: Callable[[int], torch.Tensor]) -> Any:
    """Creates a view on access: most callers need few of them, and each takes torch some time."""
    return handle.group.for_caller([view_of(i) for i in range(len(handle.layouts))])


def received_of(
    handle: LowLatencyHandle, rows: Any, probs: Any, scales: Any, stand_ins: Any = None
) -> LowLatencyReceived:
    """Returns the result by what all ranks of this process received; for tensors that there are not, None of each rank
    or of all. stand_ins: see `LowLatencyReceived.straight_through`."""

    def one(of_ranks: Any) -> Any:
        return None if of_ranks is None or of_ranks[0] is None else handle.group.for_caller(list(of_ranks))

    return LowLatencyReceived(one(rows), one(scales), one(stand_ins), one(probs), handle)

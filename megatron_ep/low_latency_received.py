"""What a low-latency dispatch returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_ep.buffer import LocalCluster
from megatron_ep.low_latency_handle import LowLatencyHandle
from megatron_ep.low_latency_rows import Float8


@dataclass
class LowLatencyReceived:
    """What a low-latency dispatch returns: tensors, or lists of them with a LocalCluster. All of them are on the
    buffer's device, and good once the call has been received.

    x: [L, W * max_tokens, H], or with expert_capacity that many rows for each expert (layout "masked"), or [R, H]
        ("grouped"), the dtype of what was dispatched, float8_e4m3fn with `fp8`; the rows of a local expert lie
        together, in the order of (source rank, token). Rows without a token hold anything, or zeros if what was
        dispatched needs a gradient.
    scales: of float8 rows, else None: the shape of x with ceil(H / 128) in place of H, float32 or float8_e8m0fnu.
        Column-major float8_e8m0fnu are int32 with H / 512 in its place, four scales each, the first in the low byte.
    straight_through: if bfloat16 x became float8 and needs a gradient, else None: the shape of x, bfloat16. Takes no
        memory and must not be read; the gradient of the rows is what it gets, as from `float8.dequantize`.
    probs: x's shape without H, the weight of each row; None when no weights were given.
    tokens_per_expert: int32 [L], rows of each local expert, without padding.
    expert_starts: int32 [L + 1], where each expert's rows begin, counted in rows of x; the last: where they end.
    overflow: int32 [1], not 0 when rows did not fit into expert_capacity or max_recv_tokens; those rows are missing.
    handle: for combine.
    """

    x: Any
    scales: Any
    straight_through: Any
    probs: Any
    tokens_per_expert: Any
    expert_starts: Any
    overflow: Any
    handle: LowLatencyHandle


def received_of(
    handle: LowLatencyHandle, float8: Float8 | None, has_probs: bool, out: tuple[torch.Tensor, ...]
) -> LowLatencyReceived:
    """out: of `low_latency_calls.Dispatch`."""
    n, group = len(handle.ranks), handle.calls.group
    is_there = {
        "x": True,
        "probs": has_probs,
        "scales": float8 is not None,
        "straight_through": float8 is not None and float8.straight_through,
    }
    names = [name for name, there in is_there.items() if there]
    parts = {name: list(out[i * n : i * n + n]) for i, name in enumerate(names)}
    if handle.masked:
        for name in set(names) - {"scales"}:
            parts[name] = [tensor.unflatten(0, (group.num_local_experts, -1)) for tensor in parts[name]]

    def one(tensors: list[torch.Tensor] | None) -> Any:
        return tensors if tensors is None or isinstance(group, LocalCluster) else tensors[0]

    return LowLatencyReceived(
        x=one(parts["x"]),
        scales=one(parts.get("scales")),
        straight_through=one(parts.get("straight_through")),
        probs=one(parts.get("probs")),
        tokens_per_expert=one([handle.counts(rank) for rank in handle.ranks]),
        expert_starts=one([handle.starts(rank) for rank in handle.ranks]),
        overflow=one([handle.overflow(rank) for rank in handle.ranks]),
        handle=handle,
    )

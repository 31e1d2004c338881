"""Flat dispatches and combines of one rank, as both of DeepEP's interfaces need them. Not differentiable by itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ep.buffer import Buffer
from megatron_ep.normal import api, launches
from megatron_ep.normal.handle import CountsToAskFor, Handle

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass
class Received:
    """Of a flat dispatch: x [R, H], scales [R, S], weights [R, K]."""

    x: torch.Tensor
    scales: torch.Tensor | None
    weights: torch.Tensor | None

    @property
    def rows(self) -> Rows:
        return self.x if self.scales is None else (self.x, self.scales)

    def tensors(self) -> list[torch.Tensor | None]:
        return [self.x, self.scales, self.weights]


@dataclass(eq=False)
class FlatHandle:
    """What a flat dispatch learned.

    ids: topk_idx of the dispatch, [T, K].
    """

    handle: Handle
    ids: torch.Tensor

    @property
    def buffer(self) -> Buffer:
        buffer = self.handle.buffer
        assert isinstance(buffer, Buffer)
        return buffer

    @property
    def num_tokens(self) -> int:
        return self.handle.ranks[0].num_tokens

    @property
    def num_rows(self) -> int:
        return self.handle.ranks[0].rows

    @property
    def local_ids(self) -> torch.Tensor:
        """int32 [R, K], the handle's own."""
        return self.handle.ranks[0].dst_rows

    @property
    def source_tokens(self) -> torch.Tensor:
        """int32 [R], which token of its source a row is."""
        tokens = self.handle.ranks[0].source_tokens
        assert tokens is not None
        return tokens

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """int64 [L], as the dispatch was asked to align them."""
        return self.handle.ranks[0].counts[1]

    @functools.cached_property
    def rows_per_rank(self) -> torch.Tensor:
        """int32 [W], that came from each."""
        rank, heap, world = self.handle.ranks[0], self.buffer.heap, self.buffer.topology.world_size
        first = heap.received_offset(rank.num_tokens, self.handle.topk)
        return rank.layout[first : first + heap.channels * world].view(heap.channels, world).sum(0, dtype=torch.int32)

    @functools.cached_property
    def rows_per_expert(self) -> torch.Tensor:
        """int32 [L], for each local expert, not aligned."""
        rank, heap = self.handle.ranks[0], self.buffer.heap
        first = heap.expert_count_offset(rank.num_tokens, self.handle.topk)
        return rank.layout[first : first + heap.local_experts].clone()


def check_rows(x: Rows, buffer: Buffer, num_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H] and its scales [T, S], of any S and four-byte type, both contiguous. Raises ValueError."""
    values, scales = x if isinstance(x, tuple) else (x, None)
    api.as_list("x", values, buffer)
    api.check_payload("x", [values], [len(values) if num_tokens is None else num_tokens], api.PAYLOAD_DTYPES)
    if (values.dtype == torch.float8_e4m3fn) != (scales is not None):
        raise ValueError(f"x is {values.dtype}, must be a tensor, or of float8_e4m3fn in a tuple with its scales")
    if scales is None:
        return values, None
    api.check_dtype("scales of x", scales, (torch.float32, torch.int32))
    if scales.dim() != 2 or len(scales) != len(values):
        raise ValueError(f"scales of x have shape {tuple(scales.shape)}, must be [{len(values)}, S]")
    return values, scales.contiguous()


def dispatch(
    buffer: Buffer,
    x: Rows,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    alignment: int = 1,
    num_rows: int | None = None,
    all_weights: bool = False,
) -> tuple[Received, FlatHandle]:
    """ids [T, K], int32 or int64, in [0, E) or -1, may name an expert twice; weights float32 [T, K].

    num_rows: R, fixed; rows behind the last one hold anything, and have no experts.
    all_weights: also those of other ranks' experts, which are 0 otherwise.
    """
    with buffer.abort_peers_on_error():
        buffer.check_usable()
        api.as_list("topk_idx", ids, buffer)
        api.check_ids([ids])
        values, scales = check_rows(x, buffer, len(ids))
        _check_weights(buffer, weights, tuple(ids.shape))
        request = CountsToAskFor([ids], alignment, 0, num_rows, allows_repeats=True, keeps_source_tokens=True)
        handle = Handle(buffer, ids.shape[1], [], request, is_flat=True)
        received = _launch(handle, values, scales, weights, all_weights)
    return received, FlatHandle(handle, ids)


def dispatch_again(
    flat: FlatHandle, x: Rows, weights: torch.Tensor | None = None, *, all_weights: bool = False
) -> Received:
    """With the handle of an earlier dispatch."""
    buffer = flat.buffer
    with buffer.abort_peers_on_error():
        buffer.check_usable()
        values, scales = check_rows(x, buffer, flat.num_tokens)
        _check_weights(buffer, weights, (flat.num_tokens, flat.handle.topk))
        return _launch(flat.handle, values, scales, weights, all_weights)


def combine(
    flat: FlatHandle,
    x: torch.Tensor,
    weights: torch.Tensor | None = None,
    biases: Sequence[torch.Tensor] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [R, H], weights float32 [R, K] to the sums [T, H] and [T, K] over the ranks that had a token: of weights all,
    also those of experts elsewhere. biases: [T, H], added to the sums."""
    buffer = flat.buffer
    with buffer.abort_peers_on_error():
        buffer.check_usable()
        api.as_list("x", x, buffer)
        api.check_payload("x", [x], [flat.num_rows], api.COMBINE_DTYPES)
        _check_weights(buffer, weights, (flat.num_rows, flat.handle.topk))
        for bias in biases:
            api.as_list("bias", bias, buffer)
            api.check_weights("bias", [bias], [(flat.num_tokens, x.shape[1])], (x.dtype,))
        y = launches.launch_combine(flat.handle, [x], None)[0][0]
        for bias in biases:
            y = y + bias
        if weights is None:
            return y, None
        return y, launches.launch_combine(flat.handle, [weights], None)[0][0]


def _check_weights(buffer: Buffer, weights: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    if weights is not None:
        api.as_list("topk_weights", weights, buffer)
        api.check_weights("topk_weights", [weights], [shape], (torch.float32,))


def _launch(
    handle: Handle,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    weights: torch.Tensor | None,
    all_weights: bool,
) -> Received:
    out, out_scales, out_weights = launches.launch_dispatch(
        handle,
        [values],
        None if scales is None else [scales],
        None if weights is None else [weights],
        clears_end=False,
        all_weights=all_weights,
    )
    return Received(
        out[0], None if out_scales is None else out_scales[0], None if out_weights is None else out_weights[0]
    )

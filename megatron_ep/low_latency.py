"""The low-latency mode: dispatch and combine of few tokens, in one hop and without a wait of the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.backends import low_latency as backends
from megatron_ep.buffer import Buffer, LocalCluster
from megatron_ep.config import require_int
from megatron_ep.functional import (
    MAX_TOPK,
    MOST_PADDED_ROWS,
    MOST_ROW_BYTES,
    MOST_ROWS,
    PAYLOAD_DTYPES,
    WEIGHT_DTYPES,
    Tensors,
    _as_list,
    _check_dtype,
    _check_ids,
    _check_payload,
    _check_weights,
)
from megatron_ep.low_latency_calls import (
    Combine,
    Counters,
    Dispatch,
    LowLatencyCalls,
    Pending,
    WeightedCombine,
)
from megatron_ep.low_latency_handle import LowLatencyHandle
from megatron_ep.low_latency_received import received_of
from megatron_ep.low_latency_rows import Float8, float8_of, row_format
from megatron_ep.masked_ranks import MaskedRanks, check_policy
from megatron_ep.rank_group import COMBINE_DTYPES, RankGroup

LAYOUTS = ("masked", "grouped")
PLACES = ("token", "expert")


class LowLatency(MaskedRanks):
    """Dispatch and combine of at most max_tokens tokens a rank: a token goes straight to each rank that wants it.

    For inference, mostly: latency counts, batches are small, and the host must not wait. max_tokens fixes all shapes.
    Belongs to a buffer, whose failures it shares and whose calls it may be mixed with in any order; it has memory of
    its own. Construction and all calls are collective.

    A call is sent at once, and received at once or, with return_recv_hook, when the hook is called; in between nothing
    of it runs. Two dispatches and two combines may be under way, received in any order; all ranks must send in the same
    order.

    buffer: a Buffer or LocalCluster.
    max_tokens: the most tokens that any rank dispatches, at most 1024.
    hidden, dtype: of the largest row. Others may be used as long as they have no more bytes; rows of `hidden` elements
        as float8 always fit.
    topk: the largest K, at most 32.

    on_dead_rank: what becomes of a call when a rank does not take part. "raise": EPTimeoutError on all ranks. "mask":
        calls go on without that rank, from then on; `active_ranks` shows it. A masked rank r is as if every pick of its
        experts were -1 and it had no tokens. A rank that reports an error of its own (wrong arguments, Ctrl-C, an
        exception) ends the calls of all as ever. The same on all ranks.
    mask_timeout: seconds after which a rank that others wait for, and that waits for nobody itself, is masked; a tenth
        of a second up to a few for inference, more than the ranks ever are apart. At most Config.timeout, which bounds
        any wait. None: a tenth of Config.timeout.

    Takes about 2 * (W + topk) * max_tokens * hidden * itemsize bytes of memory on each rank, with "mask" 2 * W * (1 +
    min(topk, L)) * max_tokens * hidden * itemsize; and more between nodes of the host, where rows take the path that
    they take on a network and are staged.

    Raises ValueError for arguments that are out of range or differ between ranks, EPError where the buffer's fabric
    does not have the low-latency mode.
    """

    def __init__(
        self,
        buffer: RankGroup,
        *,
        max_tokens: int,
        hidden: int,
        topk: int,
        dtype: torch.dtype = torch.bfloat16,
        on_dead_rank: str = "raise",
        mask_timeout: float | None = None,
    ):
        if not isinstance(buffer, (Buffer, LocalCluster)):
            raise ValueError(f"buffer is a {type(buffer).__name__}, must be a Buffer or LocalCluster")
        self.buffer = buffer
        self.max_tokens = max_tokens
        self._topk = topk

        def check() -> None:
            buffer.check_usable()
            most = min(_C.LowLatencyHeap.most_tokens, MOST_PADDED_ROWS // buffer.config.num_experts)
            require_int("max_tokens", max_tokens, 1, most)
            require_int("topk", topk, 1, MAX_TOPK)
            if dtype not in COMBINE_DTYPES:
                raise ValueError(f"dtype is {dtype}, must be one of {', '.join(map(str, COMBINE_DTYPES))}")
            require_int("hidden", hidden, 1, MOST_ROW_BYTES // dtype.itemsize)
            check_policy(on_dead_rank, mask_timeout, buffer.config.timeout_seconds)

        self._settings = settings = {
            "max_tokens": max_tokens,
            "hidden": hidden,
            "topk": topk,
            "dtype": dtype,
            "on_dead_rank": on_dead_rank,
            "mask_timeout": mask_timeout,
        }
        if isinstance(buffer, LocalCluster):
            check()
        else:
            buffer.agree_on(check, settings)
        self._row_bytes = hidden * dtype.itemsize
        rows = (row_format(topk, hidden, dtype, None), row_format(topk, hidden, torch.float8_e4m3fn, torch.float32))
        self._largest = max(rows, key=lambda row: row.slot_bytes)
        patience = None
        if on_dead_rank == "mask":
            patience = buffer.config.timeout_seconds / 10 if mask_timeout is None else float(mask_timeout)
        self._calls = LowLatencyCalls(buffer, *backends.connect(buffer, max_tokens, self._largest, patience))

    @property
    def memory_bytes(self) -> int:
        """What each rank keeps for this mode."""
        return self._calls.heap.bytes

    def dispatch(
        self,
        x: Tensors,
        topk_idx: Tensors,
        topk_weights: Tensors | None = None,
        *,
        layout: str = "masked",
        expert_alignment: int = 1,
        expert_capacity: int | None = None,
        max_recv_tokens: int | None = None,
        fp8: str | None = None,
        scales: Tensors | None = None,
        scale_layout: str = "row",
        recv_rows: Tensors | None = None,
        recv_wait_ns: Tensors | None = None,
        return_recv_hook: bool = False,
    ) -> Any:
        """Sends every token to the ranks of its experts.

        x: [T, H], contiguous; bfloat16, float16, float32, float64, or float8_e4m3fn with scales. T may differ between
            ranks and be 0. Gets a gradient, unless float8.
        topk_idx: [T, K], int32 or int64: distinct expert ids in [0, E), or -1 for no expert. On a GPU wrong ids are
            found later, by the next call or `synchronize`.
        topk_weights: [T, K], float32 or float64: arrives with the rows as `probs`. Gets a gradient.
        layout: "masked": each expert has W * max_tokens rows, for a masked GEMM. "grouped": one expert's rows follow
            the other's, for a contiguous grouped GEMM.
        expert_capacity: masked: gives each expert this many rows instead; more than fit are left out and reported in
            `overflow`. W times the most tokens of a rank are enough.
        expert_alignment: grouped: pads each expert's rows to a multiple of this.
        max_recv_tokens: grouped: R. None: as many rows as may come, W * max_tokens * min(K, L), and their padding.
        fp8: bfloat16 x becomes float8_e4m3fn on the way: each 128 elements of a row get a scale, their largest |x| /
            448, kept as "fp32", rounded up to a power of two ("pow2"), or that as float8_e8m0fnu ("ue8m0"). Bit by bit
            what `megatron_ep.reference.quantize` gives; a block with an infinity or NaN becomes NaN. The gradient of x
            is that of the rows (straight through), in bfloat16: see `LowLatencyReceived.straight_through`.
        scales: [T, ceil(H / 128)], float32 or float8_e8m0fnu, of float8 x.
        scale_layout: "row": as [.., ceil(H / 128)] lies in memory. "column": the same shape, its last two dimensions
            transposed in memory and columns aligned to 16 bytes, as grouped fp8 GEMMs want them (DeepGEMM's MN-major
            scales for TMA); float8_e8m0fnu four to an int32, and H a multiple of 512.
        recv_rows: int64 [W]: to each rank's number is added how many tokens came from it, each once, however many
            experts here it chose. Added on the buffer's device, when the call is received; in CUDA graphs too.
        recv_wait_ns: int64 [W]: to each rank's number are added the nanoseconds from the beginning of the receiving
            half until the last for which it had to wait for that rank was here; 0 if all was here already. On a GPU its
            clock may tick as slowly as once in a microsecond. Added as recv_rows are.
        return_recv_hook: returns (received, hook): the call is received when hook() is called, on torch's then current
            stream, and what was received is good only from then on. x may be overwritten before.

        Returns LowLatencyReceived. Raises ValueError for a wrong argument, and for a third dispatch under way, before
        anything is sent; EPTimeoutError when another rank does not take part, unless those are masked. Then the
        backward pass raises EPError if a rank was masked since the forward pass.
        """
        self._calls.in_flight["dispatch"].check()
        with self._checked() as group:
            if layout not in LAYOUTS:
                raise ValueError(f"layout is {layout!r}, must be one of {', '.join(map(repr, LAYOUTS))}")
            xs, ids = _as_list("x", x, group), _as_list("topk_idx", topk_idx, group)
            weights = None if topk_weights is None else _as_list("topk_weights", topk_weights, group)
            _check_ids(ids)
            topk, num_tokens = ids[0].shape[1], [idx.shape[0] for idx in ids]
            if topk > self._topk:
                raise ValueError(f"topk_idx has K = {topk}, must be at most the {self._topk} of LowLatency")
            for tokens in num_tokens:
                if tokens > self.max_tokens:
                    raise ValueError(f"x has {tokens} tokens, must have at most max_tokens = {self.max_tokens}")
            row_scales = None if scales is None else _as_list("scales", scales, group)
            _check_payload("x", xs, num_tokens, PAYLOAD_DTYPES)
            float8 = float8_of(xs, fp8, row_scales, scale_layout)
            self._check_row("x", xs[0], float8)
            _check_weights("topk_weights", weights, [(tokens, topk) for tokens in num_tokens], WEIGHT_DTYPES)
            counters = self._counters(recv_rows=recv_rows, recv_wait_ns=recv_wait_ns)
            rows = self._rows(layout, topk, expert_alignment, max_recv_tokens, expert_capacity)
            if group.device.type == "cpu":
                self._check_id_values(ids)
            parts = [self._calls.new_part(topk, tokens, rows) for tokens in num_tokens]
            handle = LowLatencyHandle(self._calls, topk, layout == "masked", expert_alignment, parts)
        zero = torch.is_grad_enabled() and any(t.requires_grad for t in (*xs, *(weights or ())))
        pending: list[Pending] | None = [] if return_recv_hook else None
        out = Dispatch.apply(handle, ids, zero, pending, float8, counters, *xs, *(weights or ()))
        received = received_of(handle, float8, weights is not None, out)
        return received if pending is None else (received, pending[0].receive)

    def combine(
        self,
        x: Tensors,
        handle: LowLatencyHandle,
        weights: Tensors | None = None,
        *,
        sum_at: str = "token",
        renormalize: bool = False,
        out: Tensors | None = None,
        recv_wait_ns: Tensors | None = None,
        return_recv_hook: bool = False,
    ) -> Any:
        """Brings the rows of a dispatch back and sums them per token.

        x: rows as the dispatch of `handle` gave them, contiguous; bfloat16, float16, float32 or float64. Rows without a
            token are ignored. Read where it lies and written straight to the memory of the token's rank: nothing is
            staged, except between nodes. Gets a gradient.
        handle: of the dispatch. May be combined any number of times.
        weights: what rows are multiplied by: [T, K] with sum_at="token", as x without its last dimension with
            "expert"; float32, or float64 when x is float64. Gets a gradient.
        sum_at: "token": each expert's row travels, and they are summed in the order of k and rounded once. "expert":
            a rank first sums the rows of its experts, so that one row a (token, rank) travels, about 1.5 times fewer
            with 8 ranks and K = 8; such a partial sum is rounded to x's dtype.
        renormalize: where picks of masked ranks are left out, a token's other weights are multiplied by the sum of all
            over the sum of the others (unless that is 0). Only with weights at the token, without a gradient and with
            on_dead_rank="mask".
        out: [T, H], x's dtype: gets the sums. Not where a gradient is needed.
        recv_wait_ns: as of `dispatch`.
        return_recv_hook: returns (y, hook): y is good once hook() has been called, and x may be overwritten before.

        Returns [T, H] in x's dtype; zeros for a token without experts. Products and sums run in float32 (float64 for
        float64), each product rounded before it is added. Raises as `dispatch` does.
        """
        self._calls.in_flight["combine"].check()
        with self._checked() as group:
            if not isinstance(handle, LowLatencyHandle) or handle.calls is not self._calls:
                raise ValueError(f"handle is a {type(handle).__name__}, must be of a dispatch of this LowLatency")
            handle.check()
            if sum_at not in PLACES:
                raise ValueError(f"sum_at is {sum_at!r}, must be one of {', '.join(map(repr, PLACES))}")
            xs = self._flat("x", _as_list("x", x, group), handle, 1)
            _check_payload("x", xs, [rank.rows for rank in handle.ranks], COMBINE_DTYPES)
            self._check_row("x", xs[0])
            factors = None if weights is None else _as_list("weights", weights, group)
            if factors is not None:
                allowed = (torch.float64 if xs[0].dtype == torch.float64 else torch.float32,)
                shapes: list[tuple[int, ...]] = [(rank.num_tokens, handle.topk) for rank in handle.ranks]
                if sum_at == "expert":
                    factors = self._flat("weights", factors, handle, 0)
                    shapes = [(rank.rows,) for rank in handle.ranks]
                _check_weights("weights", factors, shapes, allowed)
            outs = None if out is None else self._check_out(_as_list("out", out, group), xs, factors, handle)
            counters = self._counters(recv_wait_ns=recv_wait_ns)
            if renormalize:
                self._check_renormalize(xs, factors, sum_at)
        pending: list[Pending] | None = [] if return_recv_hook else None
        if renormalize:
            with group.abort_peers_on_error():
                y, _, call = self._calls.combine(
                    handle,
                    xs,
                    token_weights=factors,
                    renormalize=True,
                    out=outs,
                    counters=counters,
                    at_once=pending is None,
                )
            if pending is not None:
                pending.append(call)
        elif factors is None:
            y = Combine.apply(handle, sum_at == "expert", outs, pending, counters, *xs)
        else:
            y = WeightedCombine.apply(handle, sum_at == "expert", outs, pending, counters, *xs, *factors)
        y = y if outs is None else outs
        result = list(y) if isinstance(group, LocalCluster) else y[0]
        return result if pending is None else (result, pending[0].receive)

    # ---- arguments and results

    @contextlib.contextmanager
    def _checked(self) -> Iterator[RankGroup]:
        with self.buffer.abort_peers_on_error():
            self.buffer.check_usable()
            yield self.buffer

    def _counters(self, **tensors: Tensors | None) -> Counters:
        counters = {name: _as_list(name, given, self.buffer) for name, given in tensors.items() if given is not None}
        world = self.buffer.topology.world_size
        for name, of_ranks in counters.items():
            for tensor in of_ranks:
                if tensor.dtype != torch.int64 or tuple(tensor.shape) != (world,):
                    raise ValueError(
                        f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, must be torch.int64 of shape "
                        f"({world},)"
                    )
        return counters

    def _check_row(self, name: str, x: torch.Tensor, float8: Float8 | None = None) -> None:
        if float8 is not None:
            row = row_format(self._topk, x.shape[1], torch.float8_e4m3fn, float8.scale_dtype)
            if row.slot_bytes > self._largest.slot_bytes:
                raise ValueError(
                    f"{name} has rows of {x.shape[1]} x torch.float8_e4m3fn and their scales, must have at most the "
                    f"{self._row_bytes} bytes of LowLatency's hidden and dtype"
                )
        elif x.shape[1] * x.element_size() > self._row_bytes:
            raise ValueError(
                f"{name} has rows of {x.shape[1]} x {x.dtype}, must have at most the {self._row_bytes} bytes of "
                "LowLatency's hidden and dtype"
            )

    def _rows(
        self,
        layout: str,
        topk: int,
        expert_alignment: int,
        max_recv_tokens: int | None,
        expert_capacity: int | None = None,
    ) -> int:
        world, local_experts = self.buffer.topology.world_size, self.buffer.num_local_experts
        require_int("expert_alignment", expert_alignment, 1, MOST_PADDED_ROWS // local_experts)
        if layout == "masked":
            if expert_alignment != 1 or max_recv_tokens is not None:
                raise ValueError(
                    f"expert_alignment is {expert_alignment} and max_recv_tokens {max_recv_tokens}, must be left out "
                    "with layout 'masked'"
                )
            if expert_capacity is None:
                return local_experts * world * self.max_tokens
            require_int("expert_capacity", expert_capacity, 1, MOST_PADDED_ROWS // local_experts)
            return local_experts * expert_capacity
        if expert_capacity is not None:
            raise ValueError(f"expert_capacity is {expert_capacity}, must be left out with layout 'grouped'")
        if max_recv_tokens is not None:
            require_int("max_recv_tokens", max_recv_tokens, 1, MOST_ROWS)
            return max_recv_tokens
        return world * self.max_tokens * min(topk, local_experts) + local_experts * (expert_alignment - 1)

    def _check_id_values(self, ids: list[torch.Tensor]) -> None:
        experts = self.buffer.config.num_experts
        for rank, idx in zip(self.buffer.ranks, ids, strict=True):
            ordered = idx.sort(dim=1).values
            repeated = (ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)
            bad = ((idx < -1) | (idx >= experts)).any(dim=1) | repeated.any(dim=1)
            if bad.any():
                token = int(bad.nonzero()[0])
                where = f" of rank {rank}" if len(ids) > 1 else ""
                raise ValueError(
                    f"topk_idx{where} is {idx[token].tolist()} at token {token}, must hold distinct ids in "
                    f"[0, {experts}), or -1 for no expert"
                )

    def _flat(self, name: str, tensors: list[torch.Tensor], handle: LowLatencyHandle, inner: int) -> list[torch.Tensor]:
        """As one dimension of rows, and `inner` others."""
        if not handle.masked:
            return tensors
        flat = []
        for tensor, rank in zip(tensors, handle.ranks, strict=True):
            shape = (self.buffer.num_local_experts, rank.rows // self.buffer.num_local_experts)
            if tensor.dim() != 2 + inner or tuple(tensor.shape[:2]) != shape:
                allowed = ", ".join(map(str, shape)) + (", H" if inner else "")
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be [{allowed}]")
            flat.append(tensor.flatten(0, 1))
        return flat

    def _check_out(
        self,
        outs: list[torch.Tensor],
        xs: list[torch.Tensor],
        factors: list[torch.Tensor] | None,
        handle: LowLatencyHandle,
    ) -> list[torch.Tensor]:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*xs, *(factors or ()), *outs)):
            raise ValueError("out must not be given where a gradient is needed")
        for tensor, x, rank in zip(outs, xs, handle.ranks, strict=True):
            _check_dtype("out", tensor, (x.dtype,))
            if tuple(tensor.shape) != (rank.num_tokens, x.shape[1]):
                raise ValueError(f"out has shape {tuple(tensor.shape)}, must be {(rank.num_tokens, x.shape[1])}")
        return outs

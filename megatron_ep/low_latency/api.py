"""The low-latency mode: dispatch and combine for few tokens, in one hop, without waiting on the host.

Shapes: T tokens of this rank, H elements of a row, K experts of a token, E experts in all, L = E / ranks local experts,
R rows that arrive on this rank.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from megatron_ep.buffer.any_buffer import AnyBuffer, rank_group_of
from megatron_ep.buffer.arguments import MAX_PADDED_ROWS, Tensors, check_summable
from megatron_ep.buffer.call_cache import CallCache, signature
from megatron_ep.buffer.low_latency import LowLatencyRanks
from megatron_ep.config import MAX_LOW_LATENCY_TOKENS, MAX_ROW_BYTES, MAX_TOPK, require_int
from megatron_ep.low_latency import checks
from megatron_ep.low_latency.autograd import differentiable_combine, differentiable_dispatch
from megatron_ep.low_latency.calls import LowLatencyCalls
from megatron_ep.low_latency.handle import LowLatencyHandle
from megatron_ep.low_latency.membership import MaskedRanks, check_policy
from megatron_ep.low_latency.plans import RECEIVED, Pending
from megatron_ep.low_latency.received import LowLatencyReceived, received_of
from megatron_ep.normal.one_hop import row_format


class LowLatency(MaskedRanks):
    """Dispatch and combine for at most max_tokens tokens per rank, each sent directly to the ranks of its experts.

    Intended for inference: small batches, where latency matters and the host must not wait. max_tokens fixes all
    shapes. Belongs to a buffer: it shares the buffer's failures, its calls may be mixed with the buffer's in any order,
    and it has separate memory. Construction and all calls are collective.

    A call is sent immediately. It is received immediately or, with return_recv_hook, when the hook is called; in
    between no kernel of it runs. Two dispatches and two combines may be in flight, received in any order. All ranks
    must send in the same order.

    buffer: a Buffer or LocalCluster.
    max_tokens: the largest number of tokens that any rank dispatches, at most 1024.
    hidden, dtype: elements and type of the largest row. Rows with fewer bytes may be used too; rows of `hidden`
        elements as float8 always fit.
    topk: the largest K, at most 32.

    on_dead_rank: what happens if a rank does not take part; equal on all ranks. "raise": EPTimeoutError on all
        ranks. "mask": this and later calls continue without that rank; `active_ranks` and a warning in the log show it.
        A masked rank is treated as if every choice of its experts were -1 and it had no tokens. If it arrives later, it
        gets an EPMaskedError. A rank that reports an error (invalid arguments, Ctrl-C, an exception) still ends the
        calls of all ranks.
    mask_timeout: seconds after which ranks mask a rank that they wait for, unless that rank is waiting itself. Must
        exceed any delay between ranks: from a tenth of a second to a few seconds for inference. At most Config.timeout,
        which bounds every wait. None: a tenth of Config.timeout, at most 10.

    `memory_bytes` is the memory that each rank needs. In units of max_tokens * hidden * itemsize bytes it is about
    2 * (8/7 * (W + min(W, topk)) + topk), with "mask" 2 * W * (1 + min(topk, L)), and over a network 2 * (W + topk) and
    room for the rows that are staged.

    Raises ValueError for arguments that are out of range or differ between ranks, EPError if a rank does not come or
    its memory cannot be set up.
    """

    def __init__(
        self,
        buffer: AnyBuffer,
        *,
        max_tokens: int,
        hidden: int,
        topk: int,
        dtype: torch.dtype = torch.bfloat16,
        on_dead_rank: str = "raise",
        mask_timeout: float | None = None,
    ):
        group = self._group = rank_group_of(buffer)
        self.buffer = buffer
        self.max_tokens = max_tokens

        def check() -> None:
            group.check_usable()
            most = min(MAX_LOW_LATENCY_TOKENS, MAX_PADDED_ROWS // group.config.num_experts)
            require_int("max_tokens", max_tokens, 1, most)
            require_int("topk", topk, 1, MAX_TOPK)
            check_summable("dtype", dtype, group.device.type)
            require_int("hidden", hidden, 1, MAX_ROW_BYTES // dtype.itemsize)
            check_policy(on_dead_rank, mask_timeout, group.config.timeout_seconds)

        self._settings = settings = {
            "max_tokens": max_tokens,
            "hidden": hidden,
            "topk": topk,
            "dtype": dtype,
            "on_dead_rank": on_dead_rank,
            "mask_timeout": mask_timeout,
        }
        group.agree_on(check, settings)
        rows = (row_format(topk, hidden, dtype, None), row_format(topk, hidden, torch.float8_e4m3fn, torch.float32))
        largest = max(rows, key=lambda row: row.slot_bytes)
        patience = None
        if on_dead_rank == "mask":
            patience = min(group.config.timeout_seconds, 100.0) / 10 if mask_timeout is None else float(mask_timeout)
        ranks = LowLatencyRanks(group, max_tokens, largest, patience)
        self._calls = LowLatencyCalls(group, ranks, hidden * dtype.itemsize)
        self._plans = CallCache()

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that each rank keeps for this mode."""
        return self._calls.ranks.heap.bytes

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

        x: [T, H]; bfloat16, float16, float32, float64, or float8_e4m3fn with scales. T may differ between ranks and be
            0. A gradient requires a type that `megatron_ep.combine` takes; float8 gets none. This, topk_idx,
            topk_weights and scales are copied if they are not contiguous.
        topk_idx: [T, K], int32 or int64: distinct expert ids in [0, E), or -1 for no expert. On a GPU invalid ids are
            found later, by the next call or `synchronize`.
        topk_weights: [T, K], float32 or float64: arrives with the rows as `probs`. Gets a gradient. bfloat16 and
            float16 become float32.
        layout: "masked": each expert has W * max_tokens rows, for a masked GEMM. "grouped": the rows of experts are
            contiguous, for a contiguous grouped GEMM.
        expert_capacity: masked: gives each expert this many rows instead. Rows that do not fit are omitted and reported
            in `overflow`. W times the largest number of tokens of a rank is always enough.
        expert_alignment: grouped: pads each expert's rows to a multiple of this.
        max_recv_tokens: grouped: R. None: room for every row that may arrive, W * max_tokens * min(K, L), and padding.
        fp8: sends bfloat16 x as float8_e4m3fn, with one scale per 128 elements of a row, their largest |x| / 448: kept
            as "fp32", rounded up to a power of two ("pow2"), or that as float8_e8m0fnu ("ue8m0"). Gives the bits of
            `megatron_ep.reference.quantize`; a block with an infinity or NaN becomes NaN. The gradient of x is that of
            the rows (straight through), in bfloat16: see `LowLatencyReceived.straight_through`.
        scales: [T, ceil(H / 128)], float32 or float8_e8m0fnu: scales of float8 x.
        scale_layout: "row": row-major [.., ceil(H / 128)]. "column": the same shape, with its last two dimensions
            transposed in memory and columns aligned to 16 bytes, as grouped fp8 GEMMs expect (DeepGEMM's MN-major
            scales for TMA); float8_e8m0fnu are packed four to an int32, and H must be a multiple of 512.
        recv_rows: int64 [W]: the number of tokens from each rank is added to its entry. A token counts once, even if it
            chose several experts of this rank. Added on the buffer's device when the call is received, in CUDA graphs
            too.
        recv_wait_ns: int64 [W]: the time that the receiving half waited for each rank is added to its entry, in
            nanoseconds from the beginning of the half until the rank's last data arrived; 0 if it did not wait. A GPU's
            clock may have a resolution of only a microsecond. Added as recv_rows is.
        return_recv_hook: returns (received, hook): the call is received when hook() is called, on torch's current
            stream at that time, and the tensors are valid only afterwards. x may be overwritten before.

        Returns LowLatencyReceived. Raises ValueError for an invalid argument, and for a third dispatch in flight,
        before anything is sent; EPTimeoutError if another rank does not take part, unless dead ranks are masked. With
        masks, the backward pass raises EPError if a rank was masked since the forward pass, and a call, on a GPU
        possibly a later one, raises EPMaskedError if others have masked this rank because it did not come.
        """
        group, calls = self._group, self._calls
        if calls.dispatches.first is not RECEIVED:
            calls.dispatches.check()
        pending: list[Pending] | None = [] if return_recv_hook else None
        tensors: tuple[Any, ...] = (x, topk_idx, topk_weights, scales, recv_rows, recv_wait_ns)
        settings = (layout, expert_alignment, expert_capacity, max_recv_tokens, fp8, scale_layout)
        types = (expert_alignment.__class__, expert_capacity.__class__, max_recv_tokens.__class__)
        others = () if scales is recv_rows is recv_wait_ns is None else tensors[3:]
        key: Any = signature(settings + types, x, topk_idx, topk_weights, *others)
        plan, backend, inputs = self._plans.get(key), group._backend, [tensors]
        try:
            if plan is not None and backend is not None and backend.aborted() is None:
                needs_gradient = key[0]
            else:
                group.check_usable()
                plan, inputs, needs_gradient = checks.check_dispatch(calls, tensors, settings)
                self._keep(key, plan, tensors, inputs[0])
                backend = calls.backend
            if group.device.type == "cpu":  # on a GPU the kernels check them
                checks.check_id_values(group, inputs)
            handle = LowLatencyHandle(calls, plan)
            if not needs_gradient:
                parts = calls.dispatch(handle, backend, inputs, pending)
        except BaseException as error:
            group.abort_peers(error)
            raise
        if needs_gradient:
            received = received_of(handle, *differentiable_dispatch(handle, inputs, pending))
        elif group.takes_lists:
            received = received_of(handle, *zip(*parts, strict=True))
        else:
            [(rows, probs, row_scales)] = parts
            received = LowLatencyReceived(rows, row_scales, None, probs, handle)
        return (received, pending[0].receive) if pending else received

    def _keep(self, key: Any, plan: Any, given: tuple[Any, ...], taken: tuple[Any, ...]) -> None:
        """Keeps the plan of a call whose tensors are used as they were given."""
        if all(map(operator.is_, given, taken)):
            self._plans.add(key, plan)

    def combine(
        self,
        x: Tensors,
        handle: LowLatencyHandle,
        topk_weights: Tensors | None = None,
        *,
        row_weights: Tensors | None = None,
        sum_at: str = "token",
        renormalize: bool = False,
        out: Tensors | None = None,
        recv_wait_ns: Tensors | None = None,
        return_recv_hook: bool = False,
    ) -> Any:
        """Brings the rows of a dispatch back and sums them per token.

        x: rows in the layout of the dispatch of `handle`; of a type that `megatron_ep.combine` takes. Rows without a
            token are ignored. x is read in place (copied if it is not contiguous) and written directly to the memory of
            the token's rank; only rows for a network are staged. Gets a gradient.
        handle: handle of the dispatch. May be combined any number of times.
        topk_weights: [T, K], with sum_at="token": factors of the rows of a token. float32, or float64 if x is float64,
            which bfloat16 and float16 become. Gets a gradient.
        row_weights: x's shape without H, with sum_at="expert": factor of each row, such as `received.probs`. Type and
            gradient as for topk_weights.
        sum_at: "token": each expert's row travels, and they are summed in the order of k and rounded once. "expert":
            a rank first sums the rows of its experts, so that one row per (token, rank) travels, about 1.5 times fewer
            with 8 ranks and K = 8; such a partial sum is rounded to x's dtype, and takes the place of its rank's last
            expert among the token's choices. Within a node this gives the bits of `megatron_ep.combine`.
        renormalize: if choices of masked ranks are omitted, a token's other weights are multiplied by the sum of all
            weights over the sum of the others (unless that is 0). Only with topk_weights, without a gradient and
            with on_dead_rank="mask".
        out: [T, H], x's dtype: receives the sums. Not allowed if a gradient is needed.
        recv_wait_ns: see `dispatch`.
        return_recv_hook: returns (y, hook): y is valid once hook() has been called; x may be overwritten before.

        Returns [T, H] in x's dtype; zeros for a token without experts. Products and sums run in float32 (float64 for
        float64), each product rounded before it is added. Raises as `dispatch` does.
        """
        group, calls = self._group, self._calls
        if calls.combines.first is not RECEIVED:
            calls.combines.check()
        pending: list[Pending] | None = [] if return_recv_hook else None
        factors = topk_weights if row_weights is None else row_weights
        key: Any = None
        if is_own := isinstance(handle, LowLatencyHandle) and handle.calls is calls:
            how = (sum_at, topk_weights is None, row_weights is None, renormalize, renormalize.__class__)
            others = () if out is recv_wait_ns is None else (out, recv_wait_ns)
            key = signature((handle.plan, *how), x, None, factors, *others)
        tensors: tuple[Any, ...] = (x, None, factors, out, recv_wait_ns)
        plan, backend, inputs = self._plans.get(key), group._backend, [tensors]
        try:
            if plan is not None and backend is not None and backend.aborted() is None:
                needs_gradient = key[0]
            else:
                group.check_usable()
                if not is_own:
                    raise ValueError(f"handle is a {type(handle).__name__}, must be of a dispatch of this LowLatency")
                handle.check()
                weights = topk_weights, row_weights
                plan, inputs, needs_gradient = checks.check_combine(handle, tensors, *weights, sum_at, renormalize)
                self._keep(key, plan, tensors, inputs[0])
                backend = calls.backend
            if not needs_gradient:
                parts = calls.combine(handle, backend, plan, inputs, pending)
        except BaseException as error:
            group.abort_peers(error)
            raise
        if needs_gradient:
            parts = differentiable_combine(handle, plan, inputs, pending)
        sums = [y for y, *_ in parts] if group.takes_lists else parts[0][0]
        return (sums, pending[0].receive) if pending else sums

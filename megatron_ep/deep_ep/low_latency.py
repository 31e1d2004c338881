"""The low-latency mode of DeepEP's `Buffer` (its V1)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ep.config import require_int
from megatron_ep.deep_ep.events import EventOverlap, refuse, run
from megatron_ep.deep_ep.handles import LowLatencyTuple, require_handle
from megatron_ep.deep_ep.instances import OverInstances
from megatron_ep.deep_ep.transfers import Rows
from megatron_ep.errors import EPError
from megatron_ep.meeting.rendezvous import RankEndedError

Hook = Callable[[], None]
NAMES = {  # names in errors of `megatron_ep.LowLatency`, and those of DeepEP's arguments
    "max_tokens = ": "num_max_dispatch_tokens_per_rank = ",
    "LowLatency's hidden and dtype": "a row in bfloat16 as of the dispatch",
    **dict.fromkeys(("fp8='fp32'", "fp8='pow2'", "fp8='ue8m0'"), "use_fp8=True"),
}


@contextlib.contextmanager
def _in_names_of_deep_ep() -> Iterator[None]:
    try:
        yield
    except (ValueError, EPError) as error:
        text = str(error)
        for ours, theirs in NAMES.items():
            text = text.replace(ours, theirs)
        error.args = (text, *error.args[1:])
        raise


class LowLatencyCalls(OverInstances):
    """Low-latency calls: tokens are sent directly to the ranks of their experts, at most
    num_max_dispatch_tokens_per_rank (1024) from each rank."""

    group_size: int
    enable_shrink: bool
    _asked_to_mask: set[int]

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing, because the two modes share no memory."""

    @_in_names_of_deep_ep()
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, torch.Tensor, LowLatencyTuple, EventOverlap, Hook | None]:
        """Sends x, bfloat16 [T, H], as rows [L, M, H] of each local expert, in the order of (source rank, token).

        M = W * num_max_dispatch_tokens_per_rank, any H (with use_ue8m0 a multiple of 512), K <= 32.

        use_fp8: rows arrive as float8_e4m3fn with scales [L, M, H / 128], float32, column-major; round_scale: powers of
            two; use_ue8m0, with it: int32 [L, M, H / 512], four exponents each.
        cumulative_local_expert_recv_stats: int32 [L], to which the rows of each expert are added.
        dispatch_wait_recv_cost_stats: int64 [W], to which the nanoseconds of waiting for each rank are added.
        return_recv_hook: rows are valid once the returned hook has been called; not with async_finish.

        Returns rows (and scales), int32 [L] rows of each expert, the handle, the event, the hook.
        """
        instances, most = self._instances(), num_max_dispatch_tokens_per_rank
        with instances.abort_peers_on_error():
            if use_ue8m0 and not (round_scale and use_fp8):
                raise ValueError("use_ue8m0 is True, must be False without use_fp8 and round_scale")
            _check_ends(async_finish, return_recv_hook)
            low_latency = instances.low_latency(x.device, num_experts, most, x.shape[-1], topk_idx.shape[-1])
            if len(x) > most:
                raise ValueError(f"x has {len(x)} tokens, must have at most num_max_dispatch_tokens_per_rank = {most}")
        self._mask_those_asked_for()
        settings: dict[str, Any] = {"fp8": None}
        if use_fp8:
            settings = {"fp8": "ue8m0" if use_ue8m0 else "pow2" if round_scale else "fp32", "scale_layout": "column"}
        stats = cumulative_local_expert_recv_stats

        def call() -> tuple[Any, Hook | None, torch.Tensor]:
            with torch.no_grad():
                result = low_latency.dispatch(
                    x,
                    topk_idx,
                    layout="masked",
                    expert_capacity=self.group_size * most,
                    recv_wait_ns=dispatch_wait_recv_cost_stats,
                    return_recv_hook=return_recv_hook,
                    **settings,
                )
            received, receive = result if return_recv_hook else (result, None)
            layout = received.handle.layouts[0]

            def count() -> None:
                if stats is not None:
                    stats.add_(received.recv_counts)

            if receive is None:
                count()
                return received, None, layout
            return received, _on_stream_of_now(x.device, receive, count), layout

        read = (x, topk_idx, stats, dispatch_wait_recv_cost_stats)
        (received, hook, _), event = run(call, read, is_async=async_finish)
        handle = LowLatencyTuple(low_latency, received.handle, topk_idx, most, x.shape[1])
        rows: Rows = (received.x, received.scales) if use_fp8 else received.x
        return rows, received.recv_counts, handle, event, hook

    @_in_names_of_deep_ep()
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyTuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Sums the rows x [L, M, H] of each token to [T, H], times topk_weights float32 [T, K], in the order of k.

        topk_idx: topk_idx of the dispatch. A choice that is -1 only here gets a weight of 0: its row still travels, and
            must be finite, as NaN or infinity times 0 is NaN.
        handle: handle of the dispatch, which may be combined any number of times.
        zero_copy: x is the result of `get_next_low_latency_combine_buffer` for this handle, if that was called. Rows
            are always read in place.
        use_logfmt: True raises NotImplementedError, because rows travel unchanged.
        """
        with self._instances().abort_peers_on_error():
            if use_logfmt:
                refuse("use_logfmt", True, "rows are combined in bfloat16")
            _check_ends(async_finish, return_recv_hook)
            require_handle(handle, LowLatencyTuple, "low_latency_dispatch of this Buffer")
            low_latency, device = handle.low_latency, x.device
            rows = handle.combine_buffer if zero_copy and handle.combine_buffer is not None else x
            weights = topk_weights
            if topk_idx is not handle.topk_idx:
                if topk_idx.shape != topk_weights.shape:
                    shapes = (tuple(tensor.shape) for tensor in (topk_idx, topk_weights))
                    raise ValueError("topk_idx has shape {}, must be {} as topk_weights".format(*shapes))
                weights = torch.where(topk_idx < 0, torch.zeros_like(topk_weights), topk_weights)

        def call() -> tuple[torch.Tensor, Hook | None]:
            with torch.no_grad():
                result = low_latency.combine(
                    rows,
                    handle.handle,
                    weights,
                    out=out,
                    recv_wait_ns=combine_wait_recv_cost_stats,
                    return_recv_hook=return_recv_hook,
                )
            if not return_recv_hook:
                return result, None
            return result[0], _on_stream_of_now(device, result[1])

        read = (rows, weights, out, combine_wait_recv_cost_stats, handle.handle.layouts[0])
        (y, hook), event = run(call, read, is_async=async_finish)
        return y, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyTuple) -> torch.Tensor:
        """Returns bfloat16 [L, M, H] for the rows of a combine of this handle with zero_copy."""
        if handle.combine_buffer is None:
            device = handle.handle.group.device
            handle.combine_buffer = torch.empty(handle.shape, dtype=torch.bfloat16, device=device)
        return handle.combine_buffer

    # ---- masked ranks

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank in further low-latency calls. All other ranks have to call this.

        With mask=False, readmits a rank whose process lives: all ranks, including masked ones, have to call it
        together, as with `reset`. Raises megatron_ep.EPError if one does not come; then nothing changes.
        """
        self._check_shrink()
        require_int("rank_to_mask", rank_to_mask, 0, self.group_size - 1)
        if mask:
            self._asked_to_mask.add(rank_to_mask)
            self._mask_those_asked_for()
        else:
            self._take_back({rank_to_mask})

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Writes 1 to mask_status, int32 [W], for each masked rank."""
        self._check_shrink()
        for low_latency in self._instances().all_low_latency():
            mask_status.copy_(1 - low_latency.active_ranks)
            return
        asked = [int(rank in self._asked_to_mask) for rank in range(self.group_size)]
        mask_status.copy_(torch.tensor(asked, dtype=torch.int32, device=mask_status.device))

    def low_latency_clean_mask_buffer(self) -> None:
        """Readmits all ranks, with a call on all ranks together: see `low_latency_update_mask_buffer`. Ranks whose
        processes have ended stay masked; if no others are masked, ranks need not call this together."""
        self._check_shrink()
        try:
            self._take_back(set(range(self.group_size)))
        except RankEndedError as error:
            if self._masked() - error.ranks:
                raise

    def _check_shrink(self) -> None:
        if not self.enable_shrink:
            raise ValueError("enable_shrink is False, must be True for masks")

    def _take_back(self, ranks: set[int]) -> None:
        """Resets the buffer, which readmits all ranks, and masks the ranks that are not in `ranks` again."""
        others = self._masked() - ranks
        if self._instances().all_low_latency():
            self.reset()
        self._asked_to_mask = others
        self._mask_those_asked_for()

    def _masked(self) -> set[int]:
        masked = set(self._asked_to_mask)
        for low_latency in self._instances().all_low_latency():
            masked |= set((low_latency.active_ranks == 0).nonzero()[:, 0].tolist())
        return masked

    def _mask_those_asked_for(self) -> None:
        everyone = self._instances().all_low_latency() if self._asked_to_mask else []
        for low_latency in everyone:
            low_latency.active_ranks[sorted(self._asked_to_mask)] = 0
        if everyone:
            self._asked_to_mask.clear()


def _check_ends(async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        raise ValueError("async_finish is True, must be False with return_recv_hook")


def _on_stream_of_now(device: torch.device, receive: Hook, then: Hook | None = None) -> Hook:
    """Returns a hook that runs both functions on the stream that is current at this call."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def hook() -> None:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            receive()
            if then is not None:
                then()

    return hook

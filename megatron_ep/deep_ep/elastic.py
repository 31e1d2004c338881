"""DeepEP's `ElasticBuffer` (its V2), over this library."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep.buffer.sizes import default_sms
from megatron_ep.config import MAX_CHANNELS, MAX_ROWS, Topology, require_int, require_timeout
from megatron_ep.deep_ep import transfers
from megatron_ep.deep_ep.config import Config, topology_of
from megatron_ep.deep_ep.elastic_handle import EPHandle, max_rows
from megatron_ep.deep_ep.events import Event, EventHandle, EventOverlap, refuse, run, wait_for
from megatron_ep.deep_ep.handles import require_handle
from megatron_ep.deep_ep.instances import Instances, OverInstances, ranks_of
from megatron_ep.deep_ep.transfers import Received, Routes, Rows, device_of, row_bytes
from megatron_ep.meeting import nodes
from megatron_ep.meeting.place import is_known

MAKER = "a dispatch of this library's ElasticBuffer"  # of its handles
BYTES = 2 << 20  # bytes, to whose multiples sizes are rounded up
COLUMN_ALIGNMENT = 4  # elements, to whose multiples columns of scales are aligned
NOT_HERE = (
    "agrs_get_inplace_tensor",
    "agrs_new_session",
    "agrs_set_config",
    "all_gather",
    "create_agrs_session",
    "destroy_agrs_session",
    "engram_fetch",
    "engram_write",
    "get_agrs_buffer_size_hint",
    "get_agrs_num_max_session_bytes",
    "get_engram_storage_size_hint",
    "get_pp_buffer_size_hint",
    "pp_recv",
    "pp_send",
    "pp_set_config",
)


class ElasticBuffer(OverInstances):
    """Dispatch and combine of a process group, on the GPUs or the CPU, where the tensors of a call are.

    The constructor allocates nothing: the first dispatch sets up memory for its number of experts.

    num_bytes: stored, or computed from the sizes after it; memory grows to what calls need.
    num_max_tokens_per_rank: the largest number of tokens of a rank, unless a dispatch passes another number. 0: any
        number; then a dispatch with do_cpu_sync=False has to pass it.
    allow_multiple_reduction: whether the sum of a token's rows may be rounded more than once, because each rank sums
        the rows of its experts before they travel. False: rows of do_expand return as float32, in twice the bytes, and
        their sum is rounded once.
    num_gpu_timeout_secs: limit of a wait, in seconds.
    deterministic: always True. num_topk, sl_idx, num_allocated_qps, num_cpu_timeout_secs, allow_hybrid_mode and
        prefer_overlap_with_compute are ignored.

    Raises ValueError for invalid arguments, and NotImplementedError for num_cpu_bytes. Calls raise as those of
    `Buffer`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        is_known(group)  # raises if it is no group
        if num_cpu_bytes:
            refuse("num_cpu_bytes", num_cpu_bytes, "it needs no memory of the host")
        require_int("num_max_tokens_per_rank", num_max_tokens_per_rank, 0, MAX_ROWS)
        require_timeout("num_gpu_timeout_secs", num_gpu_timeout_secs)
        if num_bytes is None:
            if not num_max_tokens_per_rank or not hidden:
                raise ValueError("num_bytes is None, must be given without num_max_tokens_per_rank and hidden")
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk)
        require_int("num_bytes", num_bytes, 0, 1 << 62)
        self.group = group
        self.rank_idx, self.num_ranks = group.rank(), group.size()
        self.num_bytes = -(-num_bytes // BYTES) * BYTES
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps
        self.explicitly_destroy = explicitly_destroy
        self._rounds_once = not allow_multiple_reduction
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self._default_sms = default_sms(Topology(self.num_scaleout_ranks, self.num_scaleup_ranks))
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.runtime = Instances(ranks_of(group), timeout=float(num_gpu_timeout_secs))

    # ---- sizes, domains, streams

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Returns the approximate bytes of a buffer on each rank; a buffer accepts any number."""
        num_ranks = group.size()
        config = Config(default_sms(topology_of(num_ranks)))
        hints = (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint)
        return -(-sum(hint(2 * hidden, num_ranks) for hint in hints) // BYTES) * BYTES

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Calls the function `get_logical_domain_size`."""
        return get_logical_domain_size(self.group)

    get_physical_domain_size = get_logical_domain_size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, **_: Any) -> int:
        """Returns this library's default."""
        return self._default_sms

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        return num_sms

    @staticmethod
    def capture() -> EventHandle:
        """Returns an event after all work on the current stream so far."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Runs the group's barrier. with_cpu_sync: the host waits as well."""
        dist.barrier(self.group)
        if with_cpu_sync and torch.cuda.is_available():
            torch.cuda.synchronize()

    # ---- dispatch and combine

    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Sends tokens to the ranks of their experts.

        x: [T, H], contiguous, any dtype that megatron_ep.dispatch takes; or float8_e4m3fn and its scales [T, S],
            float32 or int32.
        topk_idx: [T, K], distinct ids or -1, K <= 32; topk_weights: float32 [T, K].
        cumulative_local_expert_recv_stats: int32 [L], to which the rows of each expert are added.
        do_expand: False: one row for each token that chose an expert of a rank, in the order of (source rank, token),
            with its local ids [R, K] (-1: of another rank) and all its weights [R, K]. True: one row for each of a
            token's experts, grouped by expert, each group padded with zeros to expert_alignment; no ids, weights [R].
        num_max_tokens_per_rank: largest T. 0: any T.
        do_cpu_sync: None: True, without a handle. False: R is fixed by num_max_tokens_per_rank, which all ranks must
            pass equally, and the host does not wait. If it is smaller here than elsewhere and more tokens come, the
            last ones are omitted, weights are NaN, and `megatron_ep.raise_if_failed` raises EPOverflowError.
        handle: handle of an earlier dispatch with or without do_expand, whose layout is used again.
        do_handle_copy: False: the handle has topk_idx itself, not a copy.
        use_tma_aligned_col_major_sf: scales are column-major, columns aligned to 16 bytes.
        num_sms: 0: this library's default. num_qps, allocate_on_comm_stream, do_zero_padding: ignored.

        Returns rows (and scales), ids, weights, the handle (the argument, if one was passed), the event.
        """
        has_counts = do_cpu_sync is None or do_cpu_sync
        alignment = 1 if expert_alignment is None else expert_alignment
        tokens = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        instances, is_flat = self._instances(), not do_expand
        with instances.abort_peers_on_error():
            if handle is not None:
                require_handle(handle, EPHandle, MAKER)
                if topk_idx is not None or do_cpu_sync:
                    raise ValueError("topk_idx and do_cpu_sync must not be given with a handle")
                for name, value in (
                    ("num_experts", num_experts),
                    ("num_max_tokens_per_rank", num_max_tokens_per_rank),
                    ("expert_alignment", expert_alignment),
                ):
                    if value is not None and value != getattr(handle, name):
                        raise ValueError(f"{name} is {value}, must be {getattr(handle, name)} as of the handle")
                if cumulative_local_expert_recv_stats is not None:
                    raise ValueError("cumulative_local_expert_recv_stats must not be given with a handle")
            else:
                if topk_idx is None or num_experts is None:
                    raise ValueError("topk_idx and num_experts must be given without a handle")
                require_int("expert_alignment", alignment, 1, 1 << 20)
                require_int("num_sms", num_sms, 0, MAX_CHANNELS)
                least, most = (0, MAX_ROWS) if has_counts else (1, MAX_ROWS // self.num_ranks)
                require_int("num_max_tokens_per_rank", tokens, least, most)
                device, combined = device_of(x), torch.float32 if self._rounds_once else torch.bfloat16
                buffer, limit = instances.normal(device, num_experts, num_sms or None, row_bytes(x, combined))

        def call() -> tuple[Received, Routes, torch.Tensor | None]:
            wait_for(previous_event_before_epilogue)
            if handle is not None:
                routes = handle.of_layout(is_flat)
                received = transfers.dispatch_again(routes, x, topk_weights, all_weights=True)
            else:
                assert topk_idx is not None
                num_rows = None
                if not has_counts:
                    topk, experts = topk_idx.shape[-1], buffer.num_local_experts
                    num_rows = max_rows(self.num_ranks * tokens, topk, experts, alignment, is_flat)
                received, routes = transfers.dispatch_rows(
                    buffer,
                    x,
                    topk_idx,
                    topk_weights,
                    alignment=alignment,
                    num_rows=num_rows,
                    limit=None if has_counts else limit,
                    max_tokens=tokens,
                    all_weights=True,
                    is_flat=is_flat,
                )
            ids = routes.local_ids.to(routes.ids.dtype) if is_flat else None
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(routes.rows_per_expert)
            if use_tma_aligned_col_major_sf and received.scales is not None:
                received = received._replace(scales=_column_major(received.scales))
            return received, routes, ids

        read = (x, topk_idx, topk_weights, cumulative_local_expert_recv_stats)
        (received, routes, ids), event = run(call, read, previous_event, async_with_compute_stream)
        if handle is None:
            assert topk_idx is not None
            handle = EPHandle(
                routes,
                topk_idx.clone() if do_handle_copy else topk_idx,
                do_expand=do_expand,
                expert_alignment=alignment,
                num_max_tokens_per_rank=num_max_tokens_per_rank or self.num_max_tokens_per_rank,
                num_sms=num_sms or self._default_sms,
                has_counts=has_counts,
            )
        return received.rows, ids, received.weights, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums each token's rows.

        x: rows in the layout of the handle's dispatch, any dtype that megatron_ep.combine takes.
        topk_weights: weights from that dispatch; they return as [T, K], each from the rank of its expert, 0 for -1.
        bias: one or two [T, H], added to the sums.

        Returns [T, H]; [T, K] or None; the event.
        """
        with self._instances().abort_peers_on_error():
            routes = require_handle(handle, EPHandle, MAKER).of_layout(not handle.do_expand)

        def call() -> tuple[torch.Tensor, torch.Tensor | None]:
            wait_for(previous_event_before_epilogue)
            rounds_once = handle.do_expand and self._rounds_once
            return transfers.combine(routes, x, topk_weights, bias, rounds_once=rounds_once)

        read = (x, topk_weights, bias)
        (y, weights), event = run(call, read, previous_event, async_with_compute_stream)
        return y, weights, event


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Returns the number of nodes and of ranks per node of buffers.

    Uses MEGATRON_EP_RANKS_PER_NODE, or the ranks that torchrun has started on each machine if their number divides the
    group's; otherwise one node. Raises ValueError if MEGATRON_EP_RANKS_PER_NODE does not divide it.
    """
    num_ranks = group.size()
    wanted = os.environ.get(nodes.VARIABLE)
    if wanted:
        topology = nodes.topology_of([""] * num_ranks, wanted)
        return topology.nodes, topology.ranks_per_node
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or num_ranks
    if per_node > num_ranks or num_ranks % per_node:
        per_node = num_ranks
    return num_ranks // per_node, per_node


get_physical_domain_size = get_logical_domain_size


def _refusing(name: str) -> Any:
    def method(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"ElasticBuffer.{name} is not in megatron_ep.deep_ep")

    return staticmethod(method)


for _name in NOT_HERE:
    setattr(ElasticBuffer, _name, _refusing(_name))


def _column_major(scales: torch.Tensor) -> torch.Tensor:
    """Returns a column-major copy of [R, S]."""
    rows = -(-len(scales) // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
    columns = torch.empty_strided(scales.shape, (1, rows), dtype=scales.dtype, device=scales.device)
    return columns.copy_(scales)

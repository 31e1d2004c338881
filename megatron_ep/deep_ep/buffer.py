"""DeepEP's `Buffer` (its V1), over this library."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from megatron_ep.buffer import arguments
from megatron_ep.buffer import buffer as ours
from megatron_ep.config import MAX_CHANNELS, MAX_TOPK, require_int
from megatron_ep.deep_ep import transfers
from megatron_ep.deep_ep.config import ALIGNMENT, NODE_RANKS, Config, low_latency_bytes
from megatron_ep.deep_ep.events import EventHandle, EventOverlap, refuse, run
from megatron_ep.deep_ep.handles import NormalHandle, require_handle
from megatron_ep.deep_ep.instances import Communicator, Instances, ranks_of
from megatron_ep.deep_ep.low_latency import LowLatencyCalls
from megatron_ep.deep_ep.transfers import Rows, device_of, row_bytes
from megatron_ep.normal import expert_ids

MAKER = "a dispatch of this library's Buffer"  # of its handles
DispatchLayout = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]


class Buffer(LowLatencyCalls):
    """Normal and low-latency mode of a process group, on the GPUs or the CPU, where the tensors of a call are.

    The constructor allocates nothing: the first dispatch sets up memory for its number of experts.

    group: a group of any backend of torch.distributed.
    comm: a communicator of mpi4py instead of a group; it becomes the attribute group. torch.distributed need not be
        initialized, and the constructor is collective.
    num_nvl_bytes, num_rdma_bytes: stored; memory grows to what the largest call needs. The low-latency mode has room
        for the tokens for which get_low_latency_rdma_size_hint returns num_rdma_bytes, or for more if a call needs it.
    enable_shrink: low-latency calls continue without ranks that do not take part.
    num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl: ignored.

    Raises ValueError without group and comm, or for numbers of bytes that are not multiples of 128. Calls raise
    ValueError that names an invalid argument, and megatron_ep.EPError if another rank does not take part in time; then
    `reset` on all ranks makes the buffer usable again.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Communicator | None = None,
    ):
        for name, value in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            require_int(name, value, 0, 1 << 62)
            if value % ALIGNMENT:
                raise ValueError(f"{name} is {value}, must be a multiple of {ALIGNMENT}")
        ranks = ranks_of(group, comm)
        self.group = comm if group is None else group
        self.rank, self.group_size = ranks.rank, ranks.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime = Instances(ranks, masks=enable_shrink, low_latency_bytes=num_rdma_bytes)
        self._scratch: dict[bool, torch.Tensor] = {}
        self._asked_to_mask: set[int] = set()

    def destroy(self) -> None:
        """Frees the memory, as `ElasticBuffer.destroy` does."""
        self._scratch.clear()
        super().destroy()

    # ---- sizes, settings, streams

    @staticmethod
    def is_sm90_compiled() -> bool:
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Sets the SMs of new buffers, for calls without a config. Raises ValueError unless the number is even."""
        require_int("new_num_sms", new_num_sms, 2, MAX_CHANNELS)
        if new_num_sms % 2:
            raise ValueError(f"new_num_sms is {new_num_sms}, must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, 24 if num_ranks == 2 else 6, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms, {2: 10, 4: 9}.get(num_ranks, 4), 256, 6, 128)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return low_latency_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def capture() -> EventOverlap:
        """Returns an event after all work on the current stream so far."""
        return EventOverlap(EventHandle())

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> torch.Tensor:
        """Returns memory of num_nvl_bytes (num_rdma_bytes) on the current GPU, or on the CPU if there is none, from the
        byte `offset` on. It is separate from the memory of the transfers."""
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        require_int("offset", offset, 0, num_bytes)
        if use_rdma_buffer not in self._scratch:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._scratch[use_rdma_buffer] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        memory = self._scratch[use_rdma_buffer][offset:]
        elements = memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        if size is None:
            return elements
        if size.numel() > len(elements):
            raise ValueError(f"size is {tuple(size)}, must be at most {len(elements)} elements of {dtype}")
        return elements[: size.numel()].view(size)

    # ---- normal mode

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchLayout:
        """Counts the destinations of this rank's tokens.

        Returns tokens per rank int32 [W]; per node of 8 ranks int32 [W / 8], None up to 8 ranks; per expert int32 [E];
        whether a token goes to a rank bool [T, W]; the event. On a GPU invalid ids are not counted here; the dispatch
        refuses them.
        """
        require_int("num_experts", num_experts, 1, 1 << 20)
        if num_experts % self.group_size:
            raise ValueError(f"num_experts is {num_experts}, must be a multiple of the {self.group_size} ranks")
        if not isinstance(topk_idx, torch.Tensor):
            raise ValueError(f"topk_idx is a {type(topk_idx).__name__}, must be a tensor")
        arguments.check_ids([topk_idx])
        if topk_idx.device.type == "cpu":
            expert_ids.check(topk_idx, num_experts, allows_repeats=True)
        parts, event = run(
            lambda: layout_of(topk_idx, num_experts, self.group_size), (topk_idx,), previous_event, async_finish
        )
        return *parts, event

    def dispatch(
        self,
        x: Rows,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int] | None, NormalHandle | None, EventOverlap]:
        """Sends one row for each token that chose an expert of a rank, in the order of (source rank, token).

        x: [T, H], contiguous, any dtype that megatron_ep.dispatch takes; or float8_e4m3fn and its scales [T, S],
            float32 or int32.
        handle: handle of an earlier dispatch, whose layout and buffer are used again regardless of config; then the
            three results after x are None, and so is the handle.
        num_tokens_per_rank, num_tokens_per_rdma_rank: ignored.
        num_tokens_per_expert: int32 [E]: determines E, and without topk_idx the numbers that are returned.
        is_token_in_rank: bool [T, W]: destinations of tokens, if topk_idx is not given.
        topk_idx, topk_weights: [T, K], int64 or int32, -1 for no expert, K <= 32; float32 [T, K]. Both or neither.
        expert_alignment: rounds up the numbers of rows of experts; rows are not padded.
        num_worst_tokens: fixes R, and the host does not wait. Rows after the last one have no experts (-1). If more
            tokens come, the last ones are omitted, weights are NaN, and `megatron_ep.raise_if_failed` raises
            EPOverflowError.
        config: only its num_sms is used.
        allocate_on_comm_stream: ignored.

        Returns x [R, H] (and scales [R, S]); local expert ids [R, K], or -1; weights [R, K], 0 where the id is -1; rows
        of each local expert, [] with num_worst_tokens; the handle; the event for async_finish.
        """
        instances = self._instances()
        if handle is not None:
            with instances.abort_peers_on_error():
                for name, value in (("topk_idx", topk_idx), ("topk_weights", topk_weights)):
                    if value is not None:
                        raise ValueError(f"{name} must not be given with a handle")
                routes = require_handle(handle, NormalHandle, MAKER).routes
            again, event = run(lambda: transfers.dispatch_again(routes, x), (x,), previous_event, async_finish)
            return again.rows, None, None, None, None, event
        with instances.abort_peers_on_error():
            if num_tokens_per_expert is None:
                raise ValueError("num_tokens_per_expert is None, must be int32 [E] unless a handle is given")
            if (topk_idx is None) != (topk_weights is None):
                raise ValueError("topk_idx and topk_weights must be given together")
            if topk_idx is None and (is_token_in_rank is None or num_worst_tokens):
                raise ValueError("topk_idx is None, must be given with num_worst_tokens and without is_token_in_rank")
            require_int("num_worst_tokens", num_worst_tokens, 0, (1 << 31) - 1)
            num_experts, num_sms = len(num_tokens_per_expert), (config or Config(Buffer.num_sms)).num_sms
            buffer, limit = instances.normal(device_of(x), num_experts, num_sms, row_bytes(x))

        def call() -> tuple[transfers.Received, transfers.Routes, torch.Tensor, list[int], torch.Tensor | None]:
            ids = topk_idx
            if ids is None:
                assert is_token_in_rank is not None
                ids = ids_of_ranks(is_token_in_rank, num_experts)
            received, routes = transfers.dispatch_rows(
                buffer,
                x,
                ids,
                topk_weights,
                alignment=expert_alignment,
                num_rows=num_worst_tokens or None,
                limit=limit if num_worst_tokens else None,
            )
            if topk_idx is None:
                counts = counts_of_all(buffer, num_tokens_per_expert)
                numbers = [-(-count // expert_alignment) * expert_alignment for count in counts]
            else:
                numbers = [] if num_worst_tokens else routes.tokens_per_expert.tolist()
            tokens = is_token_in_rank
            if tokens is None:
                tokens = layout_of(ids, num_experts, self.group_size)[3]
            local_ids = None if topk_idx is None else routes.local_ids.to(topk_idx.dtype)
            return received, routes, tokens, numbers, local_ids

        read = (x, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_expert)
        (received, routes, tokens, numbers, local_ids), event = run(call, read, previous_event, async_finish)
        made = NormalHandle(routes, tokens, num_sms // 2)
        return received.rows, local_ids, received.weights, numbers, made, event

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sums each token's rows over the ranks that received it.

        x: [R, H], contiguous; bfloat16, float16, float32 or float64.
        topk_weights: float32 [R, K], summed over the ranks as the rows are, regardless of their experts.
        bias: one or two [T, H], added to the sums.

        Returns [T, H], zeros for a token without rows; [T, K] or None; the event for async_finish.
        """
        with self._instances().abort_peers_on_error():
            routes = require_handle(handle, NormalHandle, MAKER).routes
        (y, weights), event = run(
            lambda: transfers.combine(routes, x, topk_weights, bias, sums_weights=True),
            (x, topk_weights, bias),
            previous_event,
            async_finish,
        )
        return y, weights, event

    # DeepEP's own calls use these names if a group has several nodes; the arguments are the same.
    internode_dispatch = dispatch
    internode_combine = combine


def layout_of(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns tokens per rank int32 [W], per node of 8 ranks int32 [W / 8] or None, per expert int32 [E], and whether a
    token goes to a rank, bool [T, W]. topk_idx: [T, K]; a repeated expert counts twice, an invalid id does not
    count."""
    ids = topk_idx.long()
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)  # invalid ids count in an extra element
    experts = topk_idx.new_zeros(num_experts + 1, dtype=torch.int32)
    experts.scatter_add_(0, ids.flatten(), torch.ones_like(ids, dtype=torch.int32).flatten())
    ranks = ids.div(num_experts // num_ranks, rounding_mode="floor")
    goes = torch.zeros(len(ids), num_ranks + 1, dtype=torch.bool, device=ids.device).scatter_(1, ranks, True)
    goes = goes[:, :num_ranks].contiguous()
    nodes = None
    if num_ranks > NODE_RANKS:
        padded = torch.nn.functional.pad(goes, (0, -num_ranks % NODE_RANKS)).view(len(ids), -1, NODE_RANKS)
        nodes = padded.any(dim=2).sum(0, dtype=torch.int32)
    return goes.sum(0, dtype=torch.int32), nodes, experts[:num_experts], goes


def ids_of_ranks(is_token_in_rank: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Takes bool [T, W]; returns int64 [T, W], the first expert of each rank that a token goes to, or -1."""
    num_ranks = is_token_in_rank.shape[1]
    if num_ranks > MAX_TOPK:
        refuse("topk_idx", None, f"give topk_idx with more than {MAX_TOPK} ranks")
    first = torch.arange(0, num_experts, num_experts // num_ranks, device=is_token_in_rank.device)
    return torch.where(is_token_in_rank, first, -1)


def counts_of_all(buffer: ours.Buffer, num_tokens_per_expert: torch.Tensor) -> list[int]:
    """Sums int32 [E] over ranks for this rank's experts: every rank dispatches a row of L numbers to each rank."""
    world, local_experts = buffer.topology.world_size, buffer.num_local_experts
    counts = num_tokens_per_expert.int().view(world, local_experts)
    ids = torch.arange(0, world * local_experts, local_experts, device=counts.device).view(world, 1)
    received, _ = transfers.dispatch_rows(buffer, counts.view(torch.float32), ids, None)
    return received.x.view(torch.int32).sum(0).tolist()

"""The ranks of a DeepEP buffer, and the buffers of this library that implement it. They are created by the first call
that needs them, because DeepEP's constructors have neither the number of experts nor the device. All ranks make the
same calls, so they create the same buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.buffer.buffer import Buffer, buffer_of
from megatron_ep.buffer.distributed import DistributedRankGroup, patience
from megatron_ep.config import MAX_EXPERTS, MAX_LOW_LATENCY_TOKENS, MAX_TOPK, Config, require_int
from megatron_ep.deep_ep.config import row_class, tokens_in
from megatron_ep.low_latency.api import LowLatency
from megatron_ep.meeting.place import is_known, opened_place, place_of
from megatron_ep.meeting.processes import OfOneProcess
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.normal.row_limit import RowLimit
from megatron_ep.overlap import communication_stream

TOO_FEW_ROWS = (
    "more rows came than num_worst_tokens or num_max_tokens_per_rank makes room for; those behind are left out and the "
    "weights are NaN; raise it, on all ranks alike"
)


class Communicator(Protocol):
    """The methods of mpi4py's communicators that this module calls."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...

    def bcast(self, obj: Any, root: int = 0) -> Any: ...


@dataclass(frozen=True)
class BufferRanks:
    """The ranks of a DeepEP buffer, and this one among them. buffer: creates a buffer of all ranks; collective."""

    rank: int
    size: int
    buffer: Callable[[Config, torch.device], Buffer]


def ranks_of(group: dist.ProcessGroup | None, comm: Communicator | None = None) -> BufferRanks:
    """Returns the ranks of a group of any backend, or else of comm. Raises ValueError without either.

    With comm torch.distributed need not be initialised. It is collective then: rank 0 opens a TCPStore and broadcasts
    its address.
    """
    if group is not None:
        if is_known(group) is not None:
            place_of(group).publish()
        return BufferRanks(group.rank(), group.size(), lambda config, device: Buffer(group, config, device=device))
    if comm is None:
        raise ValueError("group is None, must be a process group, or comm a communicator of mpi4py")
    rank, size = comm.Get_rank(), comm.Get_size()
    place = opened_place(rank, size, comm.bcast)

    def buffer(config: Config, device: torch.device) -> Buffer:
        rendezvous = StoreRendezvous.at(place, timedelta(seconds=patience(config)))
        return buffer_of(DistributedRankGroup(rendezvous, config, None, device))

    return BufferRanks(rank, size, buffer)


class Instances:
    """Buffers of one DeepEP buffer's ranks. Handles keep their buffer: it closes with the last of them.

    There is one for each device and number of experts, and one for the low-latency mode, with the size of the largest
    call so far: a larger call replaces it.

    timeout: seconds that a wait may take; None: the default of `megatron_ep.Config`.
    low_latency_bytes: least size of the low-latency mode, see `config.low_latency_bytes`.
    """

    def __init__(
        self, ranks: BufferRanks, timeout: float | None = None, masks: bool = False, low_latency_bytes: int = 0
    ):
        self._ranks = ranks
        self._timeout = timeout
        self._masks = masks
        self._low_latency_bytes = low_latency_bytes
        self._normal: dict[tuple[Any, ...], tuple[Buffer, RowLimit]] = {}
        self._low_latency: dict[tuple[Any, ...], tuple[Buffer, LowLatency]] = {}
        self._sizes: dict[tuple[Any, ...], tuple[int, ...]] = {}  # size of the buffer or mode with that key

    def normal(
        self, device: torch.device, num_experts: int, num_sms: int | None, row_bytes: int
    ) -> tuple[Buffer, RowLimit]:
        """Returns the buffer for such a call, and the limit of its dispatches with a fixed R. Collective if it is
        created or replaced."""
        require_int("num_experts", num_experts, 1, MAX_EXPERTS)
        if device.type == "cpu":
            num_sms = None
        key = (device, num_experts, num_sms is None)
        size, is_new = self._grown(key, (num_sms or 0, row_class(row_bytes) or 0))
        if is_new:
            self._sizes.pop(key, None)  # the next call makes another one if this set-up fails
            if key in self._normal:
                self._normal.pop(key)[1].report_unseen()
            sms, row_bytes = size
            config = Config(num_experts, num_sms=sms or None, row_bytes=row_bytes or None, timeout=self._timeout)
            self._normal[key] = self._ranks.buffer(config, device), RowLimit(TOO_FEW_ROWS)
            self._sizes[key] = size
        return self._normal[key]

    def _grown(self, key: tuple[Any, ...], wanted: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """Returns the size that fits this call and all earlier ones, and whether it is larger than before."""
        had = self._sizes.get(key)
        size = wanted if had is None else tuple(map(max, wanted, had))
        return size, size != had

    def low_latency(
        self, device: torch.device, num_experts: int, max_tokens: int, hidden: int, topk: int
    ) -> LowLatency:
        """Returns the mode with room for such a call. Collective if it is created or replaced."""
        require_int("num_max_dispatch_tokens_per_rank", max_tokens, 1, MAX_LOW_LATENCY_TOKENS)
        require_int("K of topk_idx", topk, 1, MAX_TOPK)
        require_int("num_experts", num_experts, 1, MAX_EXPERTS)
        key = (device, num_experts, "low latency")
        size, is_new = self._grown(key, (max_tokens, hidden, topk))
        if is_new:
            if self._masks and key in self._sizes:
                raise ValueError(
                    f"(num_max_dispatch_tokens_per_rank, hidden, K) are {(max_tokens, hidden, topk)}, must be at most "
                    f"{self._sizes[key]} with enable_shrink, as in the first call or by num_rdma_bytes: a rank may be "
                    "gone that would have to take part in another set-up"
                )
            max_tokens, hidden, topk = size
            if self._low_latency_bytes:
                room = tokens_in(self._low_latency_bytes, hidden, self._ranks.size, num_experts)
                max_tokens = max(max_tokens, room)
            self._sizes.pop(key, None)
            self._low_latency.pop(key, None)  # frees its memory for the new one, unless handles keep it
            buffer, _ = self.normal(device, num_experts, None, 2 * hidden)
            policy = "mask" if self._masks else "raise"
            mode = LowLatency(buffer, max_tokens=max_tokens, hidden=hidden, topk=topk, on_dead_rank=policy)
            self._low_latency[key] = buffer, mode
            self._sizes[key] = (max_tokens, hidden, topk)
        return self._low_latency[key][1]

    def all_low_latency(self) -> list[LowLatency]:
        return [mode for _, mode in self._low_latency.values()]

    def reset(self) -> None:
        """Resets all buffers: see `megatron_ep.Buffer.reset`. Collective."""
        for buffer in self._buffers():
            buffer.reset()

    @contextlib.contextmanager
    def abort_peers_on_error(self) -> Iterator[None]:
        """As `RankGroup.abort_peers_on_error`, for whichever buffer the other ranks wait in."""
        try:
            yield
        except BaseException as error:
            for buffer in self._buffers():
                rank_group_of(buffer).abort_peers(error)
            raise

    def _buffers(self) -> list[Buffer]:
        """Returns the buffers in the same order on all ranks."""
        # A low-latency mode keeps its buffer, even if another one has replaced it in `_normal`.
        return list(dict.fromkeys(buffer for buffer, _ in (*self._normal.values(), *self._low_latency.values())))

    def close(self) -> None:
        """Closes all buffers, without waiting for other ranks."""
        buffers, limits = self._buffers(), [limit for _, limit in self._normal.values()]
        for made in (self._low_latency, self._normal, self._sizes):
            made.clear()
        with contextlib.suppress(RuntimeError):  # a GPU that no longer works is reported elsewhere
            for limit in limits:
                limit.report_unseen()
        while buffers:
            buffers.pop().close()


class OverInstances(OfOneProcess):
    """Base of DeepEP's V1 and V2 buffers. runtime: None once the buffer is destroyed."""

    runtime: Instances | None

    def destroy(self) -> None:
        """Frees the memory, independently of other ranks."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()

    def reset(self) -> None:
        """Makes the buffer usable again after an error, and readmits masked ranks that live. Collective. DeepEP has no
        such method."""
        self._instances().reset()

    def _instances(self) -> Instances:
        if self.runtime is None:
            raise ValueError("buffer is destroyed")
        return self.runtime

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the stream of asynchronous calls on the current GPU."""
        return communication_stream(torch.device("cuda", torch.cuda.current_device()))

"""The interface of backends, which launch on the ranks of a buffer in this process and report failures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megatron_ep import _C
from megatron_ep.diagnosis.blame import RankStatus

# What a call has of one rank: numbers and addresses by the names of members in csrc/bindings, of RankTensors
# (launch_args.h) or LowLatencyTensors (low_latency_args.h). What is left out is 0, or as they say. A dict is made and
# read in a fraction of the time of an object of the extension.
RankTensors = dict[str, int]


@dataclass
class RankHandle:
    """One rank's part of a handle: what notify learned, and tables that dispatch fills."""

    num_tokens: int  # T
    layout: torch.Tensor  # int32, as csrc/core/layout.h lays it out
    rows: int  # R, rows of the tensors that hold what arrived, padding included
    counts: torch.Tensor  # int64 [2, L], tokens per expert, padding included: once for the caller, and the handle's own
    dst_rows: torch.Tensor  # int32 [received rows, K]; with flat rows the local expert, or -1
    rail_experts: torch.Tensor  # int32 [rail rows, K]; anything if there are none
    rail_rows: int
    made_on: int  # the stream, see Backend.current_stream
    has_tables: bool = False  # whether a dispatch that fills the two was launched
    has_given_counts: bool = False  # whether the caller has taken the counts
    source_tokens: torch.Tensor | None = None  # int32 [received rows], if asked for: the number at the source
    addresses: RankTensors | None = None  # of these tensors, once a launch has used them
    own_rows: int | None = None  # of a layout that was made by a plan: rows of this rank that stay here


class RowCounts(NamedTuple):
    """Numbers of rows that the tables and tensors of a rank's dispatch need room for."""

    rows: int  # R, see RankHandle
    received: int  # tokens that arrive
    rail: int  # tokens that pass through this rank to others of its node


class LastCounts(NamedTuple):
    """Totals of a rank's previous dispatch, which the next one may expect again."""

    num_tokens: int  # T
    expert_rows: int
    received_rows: int
    rail_rows: int


class CountSettings(NamedTuple):
    """Settings of an exchange of counts, as the extension takes them."""

    topk: int
    index_bytes: int
    expert_alignment: int
    expert_capacity: int  # 0: none
    allows_repeats: bool


class Totals(Protocol):
    """What notify tells the host about one rank (`_C.Totals`)."""

    expert_rows: int  # of the expert-grouped output, padding included
    received_rows: int  # tokens that arrive
    rail_rows: int  # tokens that pass through this rank to others of its node
    bad_token: int  # any token of this rank with invalid expert ids, -1: none


class HasMemory(Protocol):
    @property
    def memories(self) -> Sequence[Any]: ...  # of all ranks, where they are mapped

    @property
    def network_memory(self) -> Any: ...  # of this rank, where a network's library has it; else None


class Part(HasMemory, Protocol):
    """What a buffer has besides its backend."""

    def reset(self) -> None: ...

    def let_go(self) -> None: ...  # of the launches, which nobody uses any more, and what they need on the device


class Backend(HasMemory, Protocol):
    """The ranks of a buffer that live in this process.

    Tensors are handed over as `RankTensors`, one per rank: addresses that stay valid until the launch is done.
    """

    @property
    def min_local_bytes(self) -> float:
        """The bytes of rows to copy or add inside a rank from which a separate launch saves time."""
        ...

    @property
    def min_stores(self) -> float:
        """The mean number of stores of a received row, to a ring and to output rows, from which dispatch leaves some to
        the intra-rank pass."""
        ...

    @property
    def host_knows_counts(self) -> bool:
        """Whether an exchange of counts returns when they have arrived, so that the host need not wait for them."""
        ...

    masks: bool  # whether calls may go on without ranks that have died
    launches_ahead: bool  # whether there is dispatch_ahead

    def exchange_counts(self, tensors: list[RankTensors], settings: CountSettings) -> Sequence[Totals]:
        """Exchanges counts and waits for them.

        Of a rank that gave up before it knew them all numbers are 0: ask `aborted`.
        """
        ...

    def dispatch_ahead(
        self,
        tensors: list[RankTensors],
        row: _C.RowFormat,
        nvl_batch: int,
        rdma_chunk: int,
        counts: CountSettings,
    ) -> tuple[Sequence[Totals], bool]:
        """`exchange_counts`, and a dispatch that is launched before they are known, into tensors of a guessed size.

        Returns whether the guess was right, too: if not nothing was dispatched, and `enqueue_dispatch` has to, `again`.
        """
        ...

    def new_counts(self, experts: int, *, wait: bool) -> torch.Tensor:
        """int64 [2, experts], uninitialised, for what notify writes: on the CPU if the host waits for it."""
        ...

    def enqueue_dispatch(
        self,
        tensors: list[RankTensors],
        row: _C.RowFormat,
        nvl_batch: int,
        rdma_chunk: int,
        counts: CountSettings | None,
        again: bool = False,
    ) -> None:
        """counts: of the exchange to run first; None if the host has waited for it or knows the counts.

        again: after a `dispatch_ahead` that dispatched nothing.
        """
        ...

    def enqueue_combine(
        self, tensors: list[RankTensors], row: _C.RowFormat, nvl_batch: int, rdma_chunk: int, dtype: int
    ) -> None: ...

    def new_output(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised tensor that is no view, because autograd allows no in-place changes of a view."""
        ...

    def keep_for_launch(self, tensors: Sequence[torch.Tensor], made_on: int) -> None:
        """Keeps the memory of tensors from being reused before the next launches are done.

        made_on: stream that was current when the tensors were created.
        """
        ...

    def may_wait_on_side_stream(self) -> bool:
        """Returns whether a launch may wait for another one of the same rank, because they run in parallel."""
        ...

    def is_capturing(self) -> bool:
        """Returns whether launches are being captured in a CUDA graph."""
        ...

    def current_stream(self) -> int:
        """Returns the stream for launches; 0 without streams."""
        ...

    def aborted(self) -> tuple[str, int] | None:
        """Returns outcome and rank of the first failure since the last reset, if this process knows of one."""
        ...

    def finished(self) -> bool:
        """Returns whether the last launch is known to have finished."""
        ...

    def incidents(self) -> list[dict[str, Any]]: ...

    def rank_statuses(self) -> list[RankStatus]:
        """Returns the status of all reachable ranks, including those of this process. Waits for none."""
        ...

    def ranks_that_left(self) -> list[int]:
        """Returns the ranks of other machines that have announced that they send nothing more."""
        ...

    def waited(self) -> list[tuple[list[int], list[int]]]:
        """Returns, for each rank of this process, the nanoseconds that it waited for each rank, in the last call and in
        all calls since the last reset."""
        ...

    def abort(self, *, interrupted: bool, failed: bool, reason: str = "") -> None:
        """Ends all waits of all reachable ranks, and publishes the reason, unless they have been ended before."""
        ...

    def tell_others(self) -> None:
        """Sends known failures to other machines, and waits briefly for that because this process may end."""
        ...

    def synchronize(self) -> None:
        """Waits until all launches are done."""
        ...

    def finish_launches(self) -> None:
        """Waits for all launches of this process, and for the current stream if a CUDA graph has captured launches.
        `aborted` then knows their failures, and all reachable ranks that have given up."""
        ...

    def drain(self) -> None:
        """Waits until all launches are done and all that they sent has arrived. Raises RuntimeError if that takes too
        long, and on the host if another thread is in a call."""
        ...

    def needs_memory(self) -> str:
        """Returns why memory cannot be freed even if all launches are done, or on the host because another thread is in
        a call; "" if it can."""
        ...

    def attach(self, part: Part) -> None:
        """Resets `part` with this backend, as long as `part` lives."""
        ...

    @property
    def parts(self) -> Collection[Part]: ...  # attached parts that live

    def reset(self) -> None: ...

    def put_off(self, work: Callable[[], None]) -> None:
        """Defers what a finalizer must not do to a later call, because on a GPU it could end a graph capture."""
        ...

    def close(self) -> None:
        """Closes the backend, after which nothing is launched. Waits only for launches of this process."""
        ...

    @staticmethod
    def give_back() -> None:
        """Frees memory of closed backends that nothing refers to."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds spent in finished launches: all of them on the host, on a GPU those since the first read of this."""
        ...

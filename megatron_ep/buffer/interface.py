"""What a backend does for a buffer: launches on the ranks of this process, and what became of them."""

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
        """Rows to copy or add inside a rank, in bytes, from which a launch of its own for them saves time."""
        ...

    @property
    def min_stores(self) -> float:
        """Stores of a row that arrives, in a ring and in its output rows: from so many on dispatch leaves some to the
        intra-rank pass."""
        ...

    @property
    def host_knows_counts(self) -> bool:
        """Whether the host knows counts without waiting for anyone: an exchange returns when they are there."""
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
        """Uninitialised, and no view, which autograd would not let be changed in place."""
        ...

    def keep_for_launch(self, tensors: Sequence[torch.Tensor], made_on: int) -> None:
        """The tensors' memory is not given to others before the launches issued next are done.

        made_on: the stream that was current when they were made.
        """
        ...

    def may_wait_on_side_stream(self) -> bool:
        """Whether a launch may wait for another one of the same rank that is to run beside it."""
        ...

    def is_capturing(self) -> bool:
        """Whether launches now become part of a CUDA graph."""
        ...

    def current_stream(self) -> int:
        """The stream that launches go to now; 0 without streams."""
        ...

    def aborted(self) -> tuple[str, int] | None:
        """Why and by which rank the first launch failed since the last reset, as far as this process has heard."""
        ...

    def finished(self) -> bool:
        """Whether the last launch is known to have done all its work."""
        ...

    def incidents(self) -> list[dict[str, Any]]: ...

    def rank_statuses(self) -> list[RankStatus]:
        """What can be seen of all ranks in reach, this process's own among them. Waits for none."""
        ...

    def ranks_that_left(self) -> list[int]:
        """Returns the ranks of other machines that have announced that they send nothing more."""
        ...

    def waited(self) -> list[tuple[list[int], list[int]]]:
        """For each rank of this process: ns that it waited for each rank, in the last call and in all since a reset."""
        ...

    def abort(self, *, interrupted: bool, failed: bool, reason: str = "") -> None:
        """Ends all waits of all ranks that this process can reach, unless they have ended; tells them why."""
        ...

    def tell_others(self) -> None:
        """Until other machines have what this process knows of failures, a moment at most: it may be about to end."""
        ...

    def synchronize(self) -> None:
        """Until all launches are done."""
        ...

    def finish_launches(self) -> None:
        """Until all launches are done that this process knows of, and what the current stream holds if a CUDA graph
        has captured any. `aborted` then knows of what failed in them, and of all ranks in reach that have given up."""
        ...

    def drain(self) -> None:
        """Until all launches are done and what they sent is there. Raises RuntimeError when that takes too long, and on
        the host where another thread is in a call."""
        ...

    def needs_memory(self) -> str:
        """Why its memory cannot be given back even when all launches are done, or on the host because of a call in
        another thread; "" if it can."""
        ...

    def attach(self, part: Part) -> None:
        """`part` is reset with this backend, as long as it lives."""
        ...

    @property
    def parts(self) -> Collection[Part]: ...  # that are

    def reset(self) -> None: ...

    def put_off(self, work: Callable[[], None]) -> None:
        """Runs in a later ordinary call what a finalizer must not do: on a GPU it could end a graph capture."""
        ...

    def close(self) -> None:
        """Nothing is launched any more. Waits for this rank's launches only."""
        ...

    @staticmethod
    def give_back() -> None:
        """Frees memory of closed backends that nothing refers to."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds spent in launches that have finished: all on the host, on a GPU those since it was first asked."""
        ...

"""The backend of a buffer: it launches on the buffer's ranks in this process. `cuda.py` and `host.py` implement it."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megatron_ep import _C
from megatron_ep.diagnosis.blame import RankStatus

# Numbers and addresses of one rank's part of a call, by member of the kernels' arguments in csrc/core/args.h and
# csrc/core/low_latency_args.h. Omitted members have the defaults there.
Members = dict[str, int]
Values = tuple[Any, ...]  # members that a call leaves open, rank by rank: numbers, tensors for their addresses, or None


class RowCounts(NamedTuple):
    """Rows of a rank's dispatch, or the rows that its tables and tensors have room for."""

    num_tokens: int  # T
    rows: int  # R, rows of the received tensors, including padding
    received: int  # tokens that arrive
    rail: int  # tokens that pass through this rank to others of its node


class Part(Protocol):
    """A part of a buffer in addition to its backend, such as the low-latency mode."""

    @property
    def memories(self) -> Sequence[Any]: ...  # mapped memory of all ranks

    @property
    def network_memory(self) -> Any: ...  # memory of this rank that a network's library owns, or None

    def reset(self) -> None: ...

    def release(self) -> None: ...  # frees the launches and their device memory after the last use


class Backend:
    """The ranks of a buffer that live in this process.

    The defaults are those of launches that run to their end on the calling thread, as on the host. Addresses passed to
    a launch must stay valid until it is done.

    launcher: launches the calls of these ranks (csrc/bindings/launcher.h).
    nic: sends failures to ranks of other machines; None: all ranks share memory.
    """

    memories: Sequence[Any]  # mapped memory of all ranks
    network_memory: Any = None  # memory of this rank that a network's library owns
    # Bytes of rows to copy or add inside a rank from which a separate launch saves time.
    min_local_bytes: float = math.inf
    # Mean stores of a received row, to a ring and output rows, from which dispatch leaves some to the intra-rank pass.
    min_stores: float = 0.0
    # Whether an exchange of counts returns after they have arrived, so that the host need not wait for them.
    host_knows_counts: bool = True
    masks = False  # whether calls may continue without dead ranks
    shares_gpu = False  # whether other processes of the buffer use the same GPU
    speculates = False  # whether a dispatch may be launched before its counts are known

    def __init__(self, launcher: _C.RankLauncher, nic: _C.SoftwareNic | None = None):
        self.launcher = launcher
        self._nic = nic
        self._parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._attached = itertools.count()

    # ---- launches

    @functools.cached_property
    def aborted(self) -> Callable[[], tuple[str, int] | None]:
        """The extension's own method, because each call asks twice: returns outcome and rank of the first failure since
        the last reset, if this process knows of one."""
        return self.launcher.aborted

    def launch(
        self, launcher: _C.Launcher, call: _C.Call, phase: int, stream: int, values: Values, part: Any = None
    ) -> Any:
        """Calls `launch` of a launcher, this one's or a part's (csrc/bindings/launcher.cpp). stream: the current one.

        The counts of a rank that gave up before it knew all of them are 0, see `aborted`.
        """
        raise NotImplementedError

    def new_counts(self, experts: int, *, wait: bool, index: int = 0) -> torch.Tensor:
        """Returns an uninitialised tensor int64 [2, experts] for the counts of a rank of this process, on the CPU if
        the host waits for them. index: number of the rank within this process."""
        return torch.empty(2, experts, dtype=torch.int64, device="cpu")

    def taken_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Returns counts for which the host has waited, as a tensor that the caller owns."""
        return counts

    def new_output(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised tensor that is no view, because autograd allows no in-place changes of a view."""
        raise NotImplementedError

    def keep_for_launch(self, tensors: Sequence[torch.Tensor], made_on: int) -> None:
        """Keeps the memory of tensors from being reused before the next launches are done.

        made_on: stream that was current when the tensors were created.
        """

    def may_wait_on_side_stream(self) -> bool:
        """Returns whether a launch may wait for another one of the same rank, because they run in parallel."""
        return True

    def is_capturing(self) -> bool:
        """Returns whether launches are being captured in a CUDA graph."""
        return False

    def current_stream(self) -> int:
        """Returns the stream for launches; 0 without streams."""
        return 0

    @property
    def seconds(self) -> float:
        """Seconds spent in finished launches: all of them on the host, on a GPU those since the first read of this."""
        raise NotImplementedError

    # ---- failures

    def finished(self) -> bool:
        """Returns whether the last launch is known to have finished."""
        return False

    def rank_statuses(self) -> list[RankStatus]:
        """Returns the status of all reachable ranks, including those of this process. Waits for none."""
        return [RankStatus(**status) for status in self.launcher.rank_statuses()]

    def ranks_that_left(self) -> list[int]:
        """Returns the ranks of other machines that have announced that they send nothing more."""
        return self._nic.ranks_that_left() if self._nic is not None else []

    def abort(self, *, interrupted: bool, failed: bool, reason: str = "") -> None:
        """Ends all waits of all reachable ranks, and publishes the reason, unless they have been ended before."""
        aborted = self.launcher.aborted()
        if aborted is not None and aborted[0] == "cut_off":
            return  # the other ranks have masked this one and do not need to know
        self.launcher.abort(interrupted=interrupted, failed=failed, reason=reason)
        self.tell_others()

    def refuse(self, reason: str) -> bool:
        """Publishes that this rank refuses a call before it enters it, and ends the waits of all ranks once another
        rank has entered that call. If all ranks refuse it, the buffer stays usable.

        Returns False if this backend does not do so, and the caller must end all waits.
        """
        return False

    def settle_refusal(self, gone: Collection[int] = (), wait: float | None = None) -> None:
        """Finds out whether the other ranks, some of which are gone, enter the call that this rank has refused, if any.
        wait: seconds to wait for that, after which the waits of all ranks end; None: does not wait."""

    def tell_others(self) -> None:
        """Sends known failures to other machines, and waits briefly for that because this process may end."""
        if self._nic is not None:
            self._nic.flush_reports()

    # ---- the end of launches

    def synchronize(self) -> None:
        """Waits until all launches are done."""

    def finish_launches(self) -> None:
        """Waits for all launches of this process, and for the current stream if a CUDA graph has captured launches.
        `aborted` then knows their failures, and all reachable ranks that have given up."""

    def drain(self) -> None:
        """Waits until all launches are done and all that they sent has arrived. Raises RuntimeError if that takes too
        long, and on the host if another thread is in a call."""
        raise NotImplementedError

    def needs_memory(self) -> str:
        """Returns why memory cannot be freed even if all launches are done, or on the host because another thread is in
        a call; "" if it can."""
        raise NotImplementedError

    def attach(self, part: Part) -> None:
        """Resets `part` with this backend, as long as `part` lives."""
        self._parts[next(self._attached)] = part

    @property
    def parts(self) -> Collection[Part]:
        """Attached parts that live."""
        return list(self._parts.values())

    def reset(self) -> None:
        self.launcher.reset()
        for part in self.parts:  # the order is equal on all ranks, because a reset may be collective
            part.reset()

    def defer(self, work: Callable[[], None]) -> None:
        """Defers what a finalizer must not do to a later call, because on a GPU it could end a graph capture."""
        work()

    def close(self) -> None:
        """Closes the backend, after which nothing is launched. Waits only for launches of this process."""

    @staticmethod
    def give_back() -> None:
        """Frees memory of closed backends that nothing refers to."""

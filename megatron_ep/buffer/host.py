"""The host backend: launches run to their end on the calling thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import Backend, Values
from megatron_ep.errors import BusyError

# A refused call is published as one word: the number of the rank's refusals by then, from 1, times this, plus the
# launches that it had entered.
MAX_LAUNCHES = 1 << 40
POOLED_BYTES = 1 << 20  # least size of outputs whose memory is pooled


def new_output(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """See `interface.Backend.new_output`."""
    size = math.prod(shape) * dtype.itemsize
    if size < POOLED_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        storage = torch.from_dlpack(_C.pooled_bytes(size)).untyped_storage()
    except MemoryError:
        what = f"{' x '.join(map(str, shape))} of {dtype}"
        raise MemoryError(f"{what} take {size / 2**30:.1f} GiB, more than this machine gives") from None
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)


class Schedule(NamedTuple):
    """How the roles of this process are run: see `megatron_ep.LocalCluster`."""

    threads: int = 1
    seed: int | None = None
    lost_signal: int = 0
    stalled: tuple[int, int] | None = None


class HostBackend(Backend):
    """The backend of ranks on the host. A separate intra-rank pass saves nothing: the same threads would run it."""

    def __init__(
        self,
        heap: _C.Heap,
        ranks: list[int],
        segments: Sequence[_C.Segment],
        *,
        timeout: float,
        schedule: Schedule | None = None,
        nic: _C.SoftwareNic | None = None,
    ):
        """nic: carries what goes to other nodes; None: all heaps are mapped here."""
        schedule = schedule or Schedule()
        self.is_seeded = schedule.seed is not None
        self._ranks = ranks
        self.memories = list(segments)
        launcher = _C.host_launcher(
            heap=heap,
            ranks=ranks,
            segments=self.memories,
            threads=schedule.threads,
            seed=schedule.seed,
            lost_signal=schedule.lost_signal,
            stalled=schedule.stalled or (0, 0),
            timeout=timeout,
            nic=nic,
        )
        super().__init__(launcher, nic)
        self._timeout = timeout
        self._refusal: tuple[int, str] | None = None  # as in RankStatus.refused, and its reason
        self._settling = threading.RLock()

    def launch(
        self, launcher: _C.Launcher, call: _C.Call, phase: int, stream: int, values: Values, part: Any = None
    ) -> Any:
        if self._refusal is not None:
            self.settle_refusal(wait=self._timeout)
        return launcher.launch(call, phase, 0, values)

    def new_output(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return new_output(shape, dtype)

    def finished(self) -> bool:
        return self.launcher.finished()

    def _is_in_call(self) -> bool:
        """Returns whether another thread is in a call, which runs to its end unless it has failed."""
        own = (status for status in self.rank_statuses() if status.rank in self._ranks)
        return any(status.inside is not None for status in own) and self.aborted() is None

    def refuse(self, reason: str) -> bool:
        if self.masks:
            return False
        if self._is_in_call():  # by another thread, so that this call would have been refused in any case
            return True
        with self._settling:
            [own] = (status for status in self.rank_statuses() if status.rank in self._ranks)
            number = 1 + max(own.refused) // MAX_LAUNCHES
            self._refusal = number * MAX_LAUNCHES + own.launches, reason
            self.launcher.note_refusal(number, self._refusal[0])
        self.settle_refusal()
        return True

    def settle_refusal(self, gone: Collection[int] = (), wait: float | None = None) -> None:
        deadline = None if wait is None else time.monotonic() + wait
        while self._refusal is not None:
            with self._settling:
                self._settle(gone, is_late=deadline is not None and time.monotonic() > deadline)
            if deadline is None:
                return
            time.sleep(1e-3)

    def _settle(self, gone: Collection[int], is_late: bool) -> None:
        if self._refusal is None:
            return
        word, reason = self._refusal
        number, launches = divmod(word, MAX_LAUNCHES)
        others = [status for status in self.rank_statuses() if word not in status.refused]
        if not others or self.aborted() is not None:
            self._refusal = None
        elif is_late or any(
            status.launches > launches or max(status.refused) // MAX_LAUNCHES >= number or status.rank in gone
            for status in others
        ):
            self._refusal = None
            self.abort(interrupted=False, failed=False, reason=reason)

    def reset(self) -> None:
        with self._settling:
            self._refusal = None
        super().reset()

    def drain(self) -> None:
        if self._is_in_call():
            raise BusyError

    def needs_memory(self) -> str:
        return "a call is under way in another thread" if self._is_in_call() else ""

    @property
    def seconds(self) -> float:
        return self.launcher.seconds

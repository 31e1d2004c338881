"""The host backend: launches run to their end on the calling thread."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.backends.interface import Resettable, Totals
from megatron_ep.blame import Standing

POOLED_BYTES = 1 << 20  # outputs from this size on live in memory that is kept for later ones


class HostBackend:
    """See `interface.Backend`."""

    def __init__(
        self,
        heap: _C.Heap,
        ranks: list[int],
        segments: Sequence[_C.Segment],
        *,
        timeout: float,
        threads: int = 1,
        seed: int | None = None,
        lost_signal: int = 0,
    ):
        self._parts: weakref.WeakSet[Resettable] = weakref.WeakSet()
        self.is_seeded = seed is not None
        self.group = _C.Group(
            heap=heap,
            ranks=ranks,
            segments=list(segments),
            threads=threads,
            seed=seed,
            lost_signal=lost_signal,
            timeout=timeout,
        )

    def notify(self, tensors: Sequence[_C.RankTensors], *, wait: bool, topk: int, **settings: int) -> Sequence[Totals]:
        return self.group.notify(list(tensors), topk=topk, **settings)

    def new_counts(self, size: int, *, wait: bool) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64)

    def dispatch(
        self, tensors: Sequence[_C.RankTensors], row: _C.RowFormat, *, nvl_batch: int, rdma_chunk: int
    ) -> None:
        self.group.dispatch(list(tensors), row, nvl_batch=nvl_batch, rdma_chunk=rdma_chunk)

    def combine(
        self, tensors: Sequence[_C.RankTensors], row: _C.RowFormat, *, nvl_batch: int, rdma_chunk: int, dtype: int
    ) -> None:
        self.group.combine(list(tensors), row, nvl_batch=nvl_batch, rdma_chunk=rdma_chunk, dtype=dtype)

    def new_output(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(0, dtype=dtype)
        size = rows * columns * out.element_size()
        if size < POOLED_BYTES:
            return torch.empty(rows, columns, dtype=dtype)
        storage = torch.from_dlpack(_C.pooled_bytes(size)).untyped_storage()
        return out.set_(storage, 0, (rows, columns), (columns, 1))

    def keep_for_launch(self, tensors: Sequence[torch.Tensor], made_on: int) -> None:
        pass

    def current_stream(self) -> int:
        return 0

    def aborted(self) -> tuple[str, int] | None:
        return self.group.aborted()

    def finished(self) -> bool:
        return self.group.finished()

    def incidents(self) -> list[dict[str, Any]]:
        return self.group.incidents()

    def standings(self) -> list[Standing]:
        return [Standing(**standing) for standing in self.group.standings()]

    def waited(self) -> list[tuple[list[int], list[int]]]:
        return self.group.waited()

    def abort(self, *, interrupted: bool, failed: bool, reason: str = "") -> None:
        self.group.abort(interrupted=interrupted, failed=failed, reason=reason)

    def synchronize(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def drain(self) -> None:
        pass

    def attach(self, part: Resettable) -> None:
        self._parts.add(part)

    def reset(self) -> None:
        self.group.reset()
        for part in self._parts:
            part.reset()

    def close(self) -> None:
        pass

    @property
    def seconds(self) -> float:
        return self.group.seconds

"""The state of masked ranks in the low-latency mode, in addition to its heap."""

from __future__ import annotations

import ctypes
import logging
import math
import struct
from collections.abc import Iterable, Sequence

import torch

from megatron_ep import _C
from megatron_ep.buffer.interface import Members

log = logging.getLogger(__name__)

# csrc/core/low_latency_args.h
STATE, WAITED_NS = range(2)
ASKED, WAITED = 1, 2

# Heartbeats that a waiting rank sends in a mask timeout, so that the others do not mask it.
BEATS = 4


class Masks:
    """Masks of the ranks of this process, in their order.

    active: int32 [W], on their device, read and written by the kernels and by the caller: 1, or 0 for a masked rank.
    shown: int64 [W, 2] in host memory, written only by the kernels: why a rank was masked (0: it was not), and the
        nanoseconds that it was waited for.
    dropped: int64 [2]: choices of this rank's tokens that dispatches did not send, and that combines lacked.
    """

    def __init__(
        self, ranks: Sequence[int], world_size: int, device: torch.device, *, mask_timeout: float, timeout: float
    ):
        on_gpu = device.type == "cuda"
        self._device = device
        self._ranks = ranks
        self.active = [torch.ones(world_size, dtype=torch.int32, device=device) for _ in ranks]
        self.shown = [torch.zeros(world_size, 2, dtype=torch.int64, device="cpu", pin_memory=on_gpu) for _ in ranks]
        self.dropped = [torch.zeros(2, dtype=torch.int64, device=device) for _ in ranks]
        self._logged = [_bytes(shown) for shown in self.shown]
        self._slice_ns = max(1, int(mask_timeout / BEATS * 1e9))
        self._max_slices = min(math.ceil(timeout * 1e9 / self._slice_ns), 2**31 - 1)  # an int of the kernels

    def masked(self, rank: int) -> list[int]:
        """Returns the ranks that calls have masked, as far as the host knows without waiting for them."""
        return self.shown[rank][:, STATE].nonzero()[:, 0].tolist()

    def log_news(self) -> None:
        """Logs a warning for each rank that was masked since the last call of this, as far as the host knows."""
        for i, rank in enumerate(self._ranks):
            before, now = self._logged[i], _bytes(self.shown[i])
            if now == before:
                continue
            self._logged[i] = now
            for other, (known, (state, waited_ns)) in enumerate(zip(_entries(before), _entries(now), strict=True)):
                if state == known[STATE]:
                    continue
                why = "the caller of one of the two wanted it so (active_ranks)"
                if state != ASKED:
                    why = f"it waited {waited_ns / 1e9:.3g} s for {_C.name_of_wait(state - WAITED)}"
                log.warning("rank %d has masked rank %d and goes on without it: %s", rank, other, why)

    def members(self, rank: int) -> Members:
        """Of each call. rank: of this process."""
        return {
            "active": self.active[rank].data_ptr(),
            "shown": self.shown[rank].data_ptr(),
            "dropped": self.dropped[rank].data_ptr(),
            "slice_ns": self._slice_ns,
            "silent_slices": BEATS,
            "max_slices": self._max_slices,
        }

    def reset(self) -> None:
        self.log_news()
        for tensor in self.active:
            tensor.fill_(1)
        for tensor in (*self.dropped, *self.shown):
            tensor.zero_()
        self._logged = [_bytes(shown) for shown in self.shown]
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes(tensor: torch.Tensor) -> bytes:
    """Copies a tensor's bytes without torch, because every call does this."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _entries(shown: bytes) -> Iterable[tuple[int, int]]:
    return struct.iter_unpack("=qq", shown)

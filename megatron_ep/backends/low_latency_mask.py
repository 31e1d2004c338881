"""What a low-latency mode that masks dead ranks keeps beside its heap."""

from __future__ import annotations

import math
from typing import Any

import torch

# A rank that waits tells the others so this often in a mask timeout: they must not take it for dead.
BEATS = 4


class Masks:
    """Of the ranks of this process, in their order.

    active: int32 [W], on their device, read and written by the kernels and by the caller: 1, or 0 for a masked rank.
    shown: the same in memory of the host, written by the kernels alone.
    dropped: int64 [2]: picks of this rank's tokens that dispatches did not send, and that combines went without.
    """

    def __init__(self, ranks: int, world_size: int, device: torch.device, *, mask_timeout: float, timeout: float):
        on_gpu = device.type == "cuda"
        self._device = device
        self.active = [torch.ones(world_size, dtype=torch.int32, device=device) for _ in range(ranks)]
        self.shown = [torch.ones(world_size, dtype=torch.int32, pin_memory=on_gpu) for _ in range(ranks)]
        self.dropped = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(ranks)]
        self._slice_ns = max(1, int(mask_timeout / BEATS * 1e9))
        self._most_slices = math.ceil(timeout * 1e9 / self._slice_ns)

    def masked(self, rank: int) -> list[int]:
        """The ranks that the calls so far have masked, as far as the host can tell without waiting for them."""
        return (self.shown[rank] == 0).nonzero()[:, 0].tolist()

    def fill(self, tensors: Any, rank: int) -> None:
        """tensors: `_C.LowLatencyTensors` of a rank of this process."""
        tensors.active, tensors.shown = self.active[rank].data_ptr(), self.shown[rank].data_ptr()
        tensors.dropped = self.dropped[rank].data_ptr()

    def fill_options(self, options: Any) -> None:
        options.slice_ns, options.silent_slices, options.most_slices = self._slice_ns, BEATS, self._most_slices

    def reset(self) -> None:
        for tensor in (*self.active, *self.shown):
            tensor.fill_(1)
        for tensor in self.dropped:
            tensor.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

"""The buffers behind a DeepEP buffer, made when the first call needs them: DeepEP's constructors do not say for how
many experts, nor on which device. All ranks make the same calls, so they make the same buffers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from megatron_ep.backends.processes import OfOneProcess
from megatron_ep.buffer import Buffer
from megatron_ep.config import MAX_EXPERTS, MAX_LOW_LATENCY_TOKENS, MAX_TOPK, Config, require_int
from megatron_ep.deep_ep.config import row_class
from megatron_ep.deep_ep.ranks import BufferRanks
from megatron_ep.low_latency.api import LowLatency
from megatron_ep.normal.row_limit import RowLimit
from megatron_ep.overlap import communication_stream

TOO_FEW_ROWS = (
    "more rows came than num_worst_tokens or num_max_tokens_per_rank makes room for; those behind are left out and the "
    "weights are NaN; raise it, on all ranks alike"
)


class Instances:
    """Buffers of one DeepEP buffer's ranks. Handles keep their buffer: it closes with the last of them.

    timeout: seconds that a wait may take; None: as of `megatron_ep.Config`.
    """

    def __init__(self, ranks: BufferRanks, timeout: float | None = None, masks: bool = False):
        self._ranks = ranks
        self._timeout = timeout
        self._masks = masks
        self._normal: dict[tuple[Any, ...], Buffer] = {}
        self._row_limits: dict[Buffer, RowLimit] = {}
        self._low_latency: dict[tuple[Any, ...], LowLatency] = {}

    def normal(self, device: torch.device, num_experts: int, num_sms: int | None, row_bytes: int) -> Buffer:
        """Collective the first time."""
        require_int("num_experts", num_experts, 1, MAX_EXPERTS)
        row_bytes = row_class(row_bytes) or 0
        if device.type == "cpu":
            num_sms = None
        key = (device, num_experts, num_sms, row_bytes)
        if key not in self._normal:
            config = Config(num_experts, num_sms=num_sms, row_bytes=row_bytes or None, timeout=self._timeout)
            buffer = self._normal[key] = self._ranks.buffer(config, device)
            self._row_limits[buffer] = RowLimit(TOO_FEW_ROWS)
        return self._normal[key]

    def row_limit(self, buffer: Buffer) -> RowLimit:
        """Returns the limit of the buffer's dispatches with a fixed R."""
        return self._row_limits[buffer]

    def low_latency(
        self, device: torch.device, num_experts: int, max_tokens: int, hidden: int, topk: int
    ) -> LowLatency:
        """Collective the first time."""
        require_int("num_max_dispatch_tokens_per_rank", max_tokens, 1, MAX_LOW_LATENCY_TOKENS)
        require_int("K of topk_idx", topk, 1, MAX_TOPK)
        key = (device, num_experts, max_tokens, hidden, topk)
        if key not in self._low_latency:
            if self._masks and self._low_latency:
                ours = next(iter(self._low_latency))
                raise ValueError(
                    f"(device, num_experts, num_max_dispatch_tokens_per_rank, hidden, K) are {key}, must be {ours} as "
                    "in earlier calls with enable_shrink: a rank may be gone that would have to take part in a set-up"
                )
            buffer = self.normal(device, num_experts, None, 2 * hidden)
            policy = "mask" if self._masks else "raise"
            self._low_latency[key] = LowLatency(
                buffer, max_tokens=max_tokens, hidden=hidden, topk=topk, on_dead_rank=policy
            )
        return self._low_latency[key]

    def all_low_latency(self) -> list[LowLatency]:
        return list(self._low_latency.values())

    def reset(self) -> None:
        """Collective: see `megatron_ep.Buffer.reset`."""
        for buffer in self._normal.values():
            buffer.reset()

    def close(self) -> None:
        """Does not wait for other ranks."""
        self._low_latency.clear()
        with contextlib.suppress(RuntimeError):  # of a GPU that no longer answers: others tell of it
            for limit in self._row_limits.values():
                limit.report_unseen()
        self._row_limits.clear()
        while self._normal:
            self._normal.popitem()[1].close()


class OverInstances(OfOneProcess):
    """What DeepEP's V1 and V2 buffers have alike. runtime: None once it is destroyed."""

    runtime: Instances | None

    def destroy(self) -> None:
        """Gives the memory back. Other ranks need not do so at the same time."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.close()

    def reset(self) -> None:
        """Makes the buffer usable again after an error, and takes masked ranks back that live. Collective. DeepEP has
        nothing like it."""
        self._instances().reset()

    def _instances(self) -> Instances:
        if self.runtime is None:
            raise ValueError("buffer is destroyed")
        return self.runtime

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Returns the stream of asynchronous calls on the current GPU."""
        return communication_stream(torch.device("cuda", torch.cuda.current_device()))

"""How the processes of a group agree while they set something up, with a bound on every wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_ep.errors import EPError

T = TypeVar("T")


class Meeting:
    """The ranks of a process group. Every method is collective.

    group: the process group.
    timeout: how long one rank waits for the others where torch can bound it (gloo).
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta):
        self.group = group
        self.timeout = timeout
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def gather(self, mine: Any) -> list[Any]:
        """What every rank gave, by rank."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def agree(self, step: Callable[[], T]) -> T:
        """Runs a step that may fail on some ranks only, and fails on all of them then. Returns this rank's result.

        Raises what the step raised here if that is a ValueError or an EPError, else EPError with the rank and reason.
        """
        error: Exception | None = None
        try:
            result = step()
        except Exception as caught:
            error = caught
        messages = self.gather(None if error is None else (type(error).__name__, str(error)))
        if isinstance(error, (ValueError, EPError)):
            raise error
        if error is not None:
            raise EPError(f"rank {self.rank} could not set up the buffer: {error}") from error
        for rank, failed in enumerate(messages):
            if failed is not None:
                raise EPError(f"rank {rank} could not set up the buffer: {failed[0]}: {failed[1]}")
        return result

    def barrier(self) -> None:
        if dist.get_backend(self.group) == "gloo":
            dist.monitored_barrier(self.group, timeout=self.timeout)
        else:
            dist.barrier(self.group)

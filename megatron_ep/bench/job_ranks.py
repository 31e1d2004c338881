"""Ranks that torchrun or Slurm has started, on any number of machines: what `LocalRanks` is on one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep.backends import nodes, processes
from megatron_ep.config import Topology


class JobRanks:
    """This process's rank of the job, in a gloo default group, one thread of computation each. A context manager.

    timeout: seconds that ranks wait for each other.

    Raises ValueError, as `nodes.topology_of` does, where the machines have different numbers of ranks.
    """

    def __init__(self, timeout: float) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.machines: list[str] = self._gather(processes.machine())
        self.topology: Topology = nodes.topology_of(self.machines, None)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(*args) on every rank at once and returns the W results in rank order, on every rank.

        Raises:
            RuntimeError: with what the first failing rank raised.
        """
        try:
            outcome = (True, function(*args))
        except Exception as error:
            outcome = (False, f"{type(error).__name__}: {error}")
        outcomes = self._gather(outcome)
        for rank, (done, result) in enumerate(outcomes):
            if not done:
                raise RuntimeError(f"rank {rank}: {result}")
        return [result for _, result in outcomes]

    def _gather(self, mine: Any) -> list[Any]:
        all_of_them: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_of_them, mine)
        return all_of_them

    def __enter__(self) -> JobRanks:
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

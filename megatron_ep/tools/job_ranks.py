"""Ranks that torchrun or Slurm has started, on any number of machines. `LocalRanks` is the same for one machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep.config import Config, Topology
from megatron_ep.errors import EPError
from megatron_ep.fabrics import gpu, rank_info
from megatron_ep.meeting import job
from megatron_ep.meeting.rendezvous import agreed_name


class JobRanks:
    """This process's rank of the job, with a gloo default group and one compute thread. A context manager.

    timeout: seconds that ranks wait for each other.
    device: "cpu", or "cuda" for ranks with the GPU of `own_gpu` each; None: "cuda" if every rank has one that this
        build can use, "cpu" if none has.

    Has the rank and world_size of the job, the device, the RankInfo of each rank as `infos`, and the default topology
    of a buffer of these ranks.

    Raises ValueError on all ranks: a rank has no GPU; or the ranks cannot form a group, see `Buffer`. Construction and
    `run` raise EPError if a rank does not come in time, or has ended.
    """

    def __init__(self, timeout: float, device: str | None = "cpu") -> None:
        torch.set_num_threads(1)
        try:
            limit = timedelta(seconds=timeout)
            store, rank, world_size = job.store_of_ranks(limit)
            agreed_name(dist.PrefixStore("megatron_ep", store), rank, world_size, limit)  # tells who is missing
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        except dist.DistError as error:
            raise EPError(f"the ranks of the job did not meet: {error}") from error
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device or self._found()
        self.infos: list[rank_info.RankInfo] = self.run(_introduce, self.world_size, self.device)
        self.machines = rank_info.machines(self.infos)
        self.topology: Topology = rank_info.agreed_topology(self.infos, Config(num_experts=self.world_size))

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(*args) on every rank and returns the W results in rank order, on every rank.

        Raises the error of the first failing rank: as ValueError if it is one, otherwise as RuntimeError.
        """
        kind: type[Exception] | None = None
        try:
            outcome = function(*args)
        except ValueError as error:
            kind, outcome = ValueError, str(error)
        except Exception as error:
            kind, outcome = RuntimeError, f"{type(error).__name__}: {error}"
        outcomes: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(outcomes, (kind, outcome))
        except RuntimeError as error:
            raise EPError(f"rank {self.rank} lost the others: {error}") from error
        for rank, (failed, text) in enumerate(outcomes):
            if failed is not None:
                raise failed(f"rank {rank}: {text}")
        return [result for _, result in outcomes]

    def _found(self) -> str:
        lacking = [rank for rank, found in enumerate(self.run(_has_gpu)) if not found]
        if 0 < len(lacking) < self.world_size:
            raise ValueError(
                f"rank {', '.join(map(str, lacking))} of {self.world_size} has no GPU, the others have one"
            )
        return "cpu" if lacking else "cuda"

    def __enter__(self) -> JobRanks:
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()


def own_gpu() -> int:
    """Returns the GPU of this rank: LOCAL_RANK modulo the number of visible GPUs, which may be 1."""
    return int(os.environ.get("LOCAL_RANK") or os.environ["RANK"]) % torch.cuda.device_count()


def _has_gpu() -> bool:
    try:
        gpu.check_device("cuda")
    except ValueError:
        return False
    return True


def _introduce(world_size: int, device: str) -> rank_info.RankInfo:
    found = gpu.check_device(device)
    if found.type == "cuda":
        found = torch.device("cuda", own_gpu())
        torch.cuda.set_device(found)
    return rank_info.introduce(Config(num_experts=world_size), None, found)

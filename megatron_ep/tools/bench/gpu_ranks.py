"""The ranks of a benchmark, each with a separate GPU: the ranks of a job, under torchrun or in a Slurm job step, on any
number of machines; without a job a process per GPU of this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ep.fabrics.rank_info import RankInfo
from megatron_ep.meeting import job
from megatron_ep.tools.bench.gpu_case import require_gpu
from megatron_ep.tools.job_ranks import JobRanks
from megatron_ep.tools.local_ranks import LocalRanks


def gpu_ranks(command: str, timeout: float) -> LocalRanks | JobRanks:
    """Returns the ranks of the job, or ranks of this machine, which are not started yet.

    command: name of the command, for messages.
    timeout: seconds that a run on this machine may take, or that the ranks of a job wait for each other.

    Raises ValueError on all ranks of a job if one shares its GPU or has none. Ends the program if this machine has no
    GPU.
    """
    if not job.adopt():
        require_gpu(command)
        return LocalRanks(torch.cuda.device_count(), timeout)
    ranks = JobRanks(timeout, "cuda")
    require_own_gpus(ranks.infos)
    return ranks


def require_own_gpus(infos: Sequence[RankInfo]) -> None:
    """Raises ValueError if two ranks have the same GPU, because they would take turns, and NCCL does not allow it."""
    ranks: dict[str | None, int] = {}
    for rank, info in enumerate(infos):
        first = ranks.setdefault(info.gpu, rank)
        if first != rank:
            raise ValueError(
                f"ranks {first} and {rank}, both on {info.host}, have the same GPU {info.gpu}: start as many ranks on "
                "each machine as it has GPUs (torchrun --nproc-per-node, Slurm --ntasks-per-node)"
            )

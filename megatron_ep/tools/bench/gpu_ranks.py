"""The ranks of a benchmark on GPUs, each with one of its own: those of a job, under torchrun or in a Slurm job step, on
any number of machines; without one as many processes as this machine has GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ep.fabrics.rank_info import RankInfo
from megatron_ep.meeting import job
from megatron_ep.tools.bench.gpu_case import require_gpu
from megatron_ep.tools.job_ranks import JobRanks
from megatron_ep.tools.local_ranks import LocalRanks


def gpu_ranks(command: str, timeout: float) -> LocalRanks | JobRanks:
    """Not started yet, or those of the job.

    Args:
        command: its name, for messages.
        timeout: seconds that a run on this machine may take, or that the ranks of a job wait for each other.

    Raises ValueError on all ranks of a job alike where one has no GPU for itself. Ends the program where this machine
    has none.
    """
    if not job.adopt():
        require_gpu(command)
        return LocalRanks(torch.cuda.device_count(), timeout)
    ranks = JobRanks(timeout, "cuda")
    require_own_gpus(ranks.infos)
    return ranks


def require_own_gpus(infos: Sequence[RankInfo]) -> None:
    """Raises ValueError where two ranks have the same GPU: they would take turns, and NCCL refuses them."""
    ranks: dict[str | None, int] = {}
    for rank, info in enumerate(infos):
        first = ranks.setdefault(info.gpu, rank)
        if first != rank:
            raise ValueError(
                f"ranks {first} and {rank}, both on {info.host}, have the same GPU {info.gpu}: start as many ranks on "
                "each machine as it has GPUs (torchrun --nproc-per-node, Slurm --ntasks-per-node)"
            )

"""Finds the rank of this process in a job of torchrun or Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping


def adopt(environment: MutableMapping[str, str] | None = None) -> bool:
    """Returns whether this process is a rank of a job: under torchrun, or in a Slurm step of several tasks.

    Translates Slurm's variables to torch.distributed's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) in
    `environment`, except those that are set already. Raises ValueError if Slurm gives no node list for MASTER_ADDR.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return True
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")  # only srun sets it; batch scripts have SLURM_NTASKS but are no tasks
    if "SLURM_PROCID" not in env or int(tasks) < 2:
        return False
    if "MASTER_ADDR" not in env:
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        if not nodes:
            raise ValueError("MASTER_ADDR: not set, and SLURM_NODELIST, to derive it from, is not set either")
        env["MASTER_ADDR"] = first_host(nodes)
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], tasks
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    return True


def is_restarted() -> bool:
    """Returns whether this rank replaces one that failed: torchrun --max-restarts, or a job that Slurm has requeued."""
    return any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list: "gpu007" for "gpu[007-009,12],login"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist.strip())
    if match is None:
        raise ValueError(f"SLURM_NODELIST: {nodelist!r} names no host")
    return "".join(part or "" for part in match.groups())

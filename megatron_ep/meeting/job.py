"""Which rank of a job this process is, as torchrun or Slurm have said."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping


def adopt(environment: MutableMapping[str, str] | None = None) -> bool:
    """Tells whether this process is a rank, and makes it one: True under torchrun or in a Slurm task of several.

    Slurm's variables are translated to torch.distributed's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) in
    `environment`; those that are set already win.

    Raises:
        ValueError: Slurm gives no node list to take MASTER_ADDR from.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return True
    tasks = env.get("SLURM_STEP_NUM_TASKS", "1")  # srun alone sets it, unlike SLURM_NTASKS: a batch script is no task
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


def is_restarted(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this rank runs in place of one that failed: torchrun --max-restarts, or a job that Slurm has requeued."""
    env = os.environ if environment is None else environment
    return any(int(env.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: "gpu[007-009,12],login" gives "gpu007"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist.strip())
    if match is None:
        raise ValueError(f"SLURM_NODELIST: {nodelist!r} names no host")
    return "".join(part or "" for part in match.groups())

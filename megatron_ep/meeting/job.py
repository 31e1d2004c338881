"""Finds the rank of this process in a job of torchrun or Slurm."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import MutableMapping
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger(__name__)


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


def store_of_ranks(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Connects to the store of the job at MASTER_ADDR and MASTER_PORT, which rank 0 opens unless torchrun has. Returns
    it with this rank and their number. Does not wait for other ranks, but for the store; logs a wait now and then.

    Raises ValueError for a variable that is missing or no number, EPError if the store does not answer in time.
    """
    import torch.distributed as dist

    from megatron_ep.errors import EPError
    from megatron_ep.meeting import stores

    rank, world_size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise ValueError("environment variable MASTER_ADDR is not set, must be the host of rank 0")
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    began, limit = time.monotonic(), timeout.total_seconds()
    opened = stores.in_thread(
        lambda: dist.TCPStore(
            host, port, world_size, rank == 0 and not is_torchruns, timeout, wait_for_workers=False, multi_tenant=True
        )
    )
    place, waited = f"{host}:{port}", 0.0
    while not futures.wait([opened], min(stores.next_warning(waited), limit) - waited).done:
        waited = time.monotonic() - began
        if waited >= limit:
            raise EPError(f"rank {rank} reached no store of torch.distributed at {place} within {limit:g} s")
        log.warning(
            "rank %d waits for the store of rank 0 at %s, for %.0f s of at most %g s", rank, place, waited, limit
        )
    try:
        store: dist.Store = opened.result()
    except dist.DistError as error:
        raise EPError(f"rank {rank} reached no store of torch.distributed at {place}: {error}") from error
    if is_torchruns:  # it outlives an attempt of the job
        store = dist.PrefixStore(f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    return store, rank, world_size


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"environment variable {name} is {text!r}, must be a number")
    return int(text)


def is_restarted() -> bool:
    """Returns whether this rank replaces one that failed: torchrun --max-restarts, or a job that Slurm has requeued."""
    return any(int(os.environ.get(name) or 0) > 0 for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def first_host(nodelist: str) -> str:
    """Returns the first host of a Slurm node list: "gpu007" for "gpu[007-009,12],login"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodelist.strip())
    if match is None:
        raise ValueError(f"SLURM_NODELIST: {nodelist!r} names no host")
    return "".join(part or "" for part in match.groups())

"""`deep_ep.utils.envs`: the set-up of tests."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist

_seeds = {"local": 0, "global": 0}


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Joins the job of MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes, not ranks) and RANK (the node); by default that is
    num_local_ranks processes of this machine. torch's default device becomes the GPU, if there is one, and its default
    dtype bfloat16. Returns rank, W and a group of all ranks.

    With fewer GPUs than processes, processes share GPUs, and the group's backend is gloo.
    """
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "8361"))
    nodes, node = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    gpus = torch.cuda.device_count()
    settings: dict[str, Any] = {"backend": "gloo"}
    if gpus:
        torch.cuda.set_device(local_rank % gpus)
        torch.set_default_device("cuda")
    if gpus >= num_local_ranks:
        settings = {"backend": "nccl", "device_id": torch.device("cuda", local_rank)}
    world_size = nodes * num_local_ranks
    dist.init_process_group(
        init_method=f"tcp://{address}:{port}",
        world_size=world_size,
        rank=node * num_local_ranks + local_rank,
        **settings,
    )
    torch.set_default_dtype(torch.bfloat16)
    init_seed(seed)
    return dist.get_rank(), dist.get_world_size(), dist.new_group(list(range(world_size)))


def init_seed(seed: int) -> None:
    """Seeds torch and random, differently on each rank."""
    _seeds.update(local=seed + dist.get_rank(), **{"global": seed})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_global_seed() -> int:
    return _seeds["global"]


def dist_print(text: str = "", once_in_node: bool = False) -> None:
    """Prints on every rank, or on the first one of each node, followed by a barrier of all ranks."""
    if not once_in_node:
        print(text, flush=True)
        return
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or dist.get_world_size() // int(
        os.environ.get("WORLD_SIZE", 1)
    )
    if dist.get_rank() % max(1, per_node) == 0:
        print(text, flush=True)
    dist.barrier()

"""What the ranks of a buffer tell each other first, and what must be equal among them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ep.backends import cuda, fabrics, nodes
from megatron_ep.backends.codec import Plain
from megatron_ep.config import Config, Topology
from megatron_ep.errors import EPError


@dataclass(frozen=True)
class Member:
    """One rank."""

    host: str
    place: str  # its host, or its NVLink domain
    pid: int
    device: str  # the type only
    settings: dict[str, Plain]  # the fields of Config, with the timeout in force
    topology: Topology | None  # as it was given
    num_sms: int | None  # on a GPU
    gpu: str | None  # its UUID
    fabric: str | None  # what the environment wants
    ranks_per_node: str | None  # likewise

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks, by what the user calls it."""
        return {
            "device": self.device,
            **{f"Config.{name}": value for name, value in self.settings.items()},
            "topology": self.topology,
            "num_sms (by the GPU's SMs; Config.num_sms sets it)": self.num_sms,
            f"environment variable {nodes.VARIABLE}": self.ranks_per_node,
        }


def introduce(config: Config, topology: Topology | None, device: torch.device) -> Member:
    """This process's rank. Raises ValueError for a timeout in the environment that is none."""
    host = socket.gethostname()
    domain, sms, gpu = None, None, None
    if device.type == "cuda":
        sms = cuda.num_sms(config, device, 1)
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        domain = nodes.nvlink_domain(gpu)
    return Member(
        host=host,
        place=domain or host,
        pid=os.getpid(),
        device=device.type,
        settings=asdict(config) | {"timeout": config.timeout_seconds},
        topology=topology,
        num_sms=sms,
        gpu=gpu,
        fabric=os.environ.get(fabrics.VARIABLE) or None,
        ranks_per_node=os.environ.get(nodes.VARIABLE) or None,
    )


def process_fate(pid: int) -> str | None:
    """What has become of a process of this host: "has ended", "is stopped"; None while it runs."""
    return _fate(Path(f"/proc/{pid}"))


def has_ended(pid: int) -> bool:
    """Whether nothing of a process of this host runs any more: one that was killed may be a zombie before the last of
    its threads is."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    return all(_fate(thread) == "has ended" for thread in threads)


def _fate(task: Path) -> str | None:
    try:
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "has ended"
    return {"Z": "has ended", "X": "has ended", "T": "is stopped", "t": "is stopped"}.get(state)


def agreed_topology(members: Sequence[Member], config: Config) -> Topology:
    """How the ranks lie on nodes. Raises, on all ranks alike, ValueError where they differ in what must be equal or are
    not those of the topology, EPError where the host backend would need a network."""
    first, host = members[0].shared(), members[0].host
    for rank, member in enumerate(members):
        for name, value in member.shared().items():
            if value != first[name]:
                raise ValueError(f"{name} is {first[name]!r} on rank 0 and {value!r} on rank {rank}, must be equal")
        if member.device == "cpu" and member.host != host:
            raise EPError(
                f"rank 0 runs on {host} and rank {rank} on {member.host}: "
                "the host backend connects the processes of one machine only"
            )
    topology = members[0].topology
    if topology is None:
        topology = nodes.topology_of([member.place for member in members], members[0].ranks_per_node)
    if topology.world_size != len(members):
        raise ValueError(f"topology is {topology}, must have the {len(members)} ranks of the group")
    config.check_ranks(topology)
    return topology

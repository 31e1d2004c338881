"""What the ranks of a buffer tell each other first, and what must be equal among them."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_ep.config import Config, Topology
from megatron_ep.fabrics import choice, gpu, near_cards
from megatron_ep.meeting import nodes, processes
from megatron_ep.meeting.codec import Plain


@dataclass(frozen=True)
class RankInfo:
    """One rank."""

    host: str  # its name
    machine: str  # `processes.machine`
    domain: str | None  # of NVLink, where it spans machines
    pid: int
    device: str  # the type only
    settings: dict[str, Plain]  # of Config and Tuning, with the timeout in force
    topology: Topology | None  # as it was given
    num_sms: int | None  # on a GPU
    gpu: str | None  # its UUID
    pci: str | None  # its address there, if torch knows it
    near_cards: list[str] | None  # of the NUMA node that its process is bound to, of a rank on the host
    fabric: str | None  # what the environment wants
    ranks_per_node: str | None  # likewise

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks, by what the user calls it."""
        return {
            "device": self.device,
            **self.settings,
            "topology": self.topology,
            "num_sms (by the GPU's SMs; Config.num_sms sets it)": self.num_sms,
            f"environment variable {nodes.VARIABLE}": self.ranks_per_node,
        }


def introduce(config: Config, topology: Topology | None, device: torch.device) -> RankInfo:
    """This process's rank. Raises ValueError for a timeout in the environment that is none."""
    domain, sms, uuid, pci = None, None, None, None
    if device.type == "cuda":
        sms = gpu.num_sms(config, device, 1)
        uuid, pci = gpu.uuid(device), gpu.pci_address(device)
        domain = nodes.nvlink_domain(uuid)
    return RankInfo(
        host=socket.gethostname(),
        machine=processes.machine(),
        domain=domain,
        pid=os.getpid(),
        device=device.type,
        settings=_settings_of(config),
        topology=topology,
        num_sms=sms,
        gpu=uuid,
        pci=pci,
        near_cards=None if device.type == "cuda" else near_cards.of_process(),
        fabric=os.environ.get(choice.VARIABLE) or None,
        ranks_per_node=os.environ.get(nodes.VARIABLE) or None,
    )


def _settings_of(config: Config) -> dict[str, Plain]:
    own = asdict(config) | {"timeout": config.timeout_seconds}
    tuning = own.pop("tuning")
    return {f"Config.{name}": value for name, value in own.items()} | {
        f"Tuning.{name}": value for name, value in tuning.items()
    }


def machines(infos: Sequence[RankInfo]) -> list[str]:
    """The machine of each rank, as a user may read it: the host's name, and more where several machines have it."""
    named: dict[str, set[str]] = {}
    for info in infos:
        named.setdefault(info.host, set()).add(info.machine)
    return [info.host if len(named[info.host]) == 1 else info.machine for info in infos]


def agreed_topology(infos: Sequence[RankInfo], config: Config) -> Topology:
    """How the ranks lie on nodes. Raises, on all ranks alike, ValueError where they differ in what must be equal or are
    not those of the topology, or where a node of host ranks would lie on several machines."""
    first, places = infos[0].shared(), machines(infos)
    for rank, info in enumerate(infos):
        for name, value in info.shared().items():
            if value != first[name]:
                raise ValueError(f"{name} is {first[name]!r} on rank 0 and {value!r} on rank {rank}, must be equal")
    topology = infos[0].topology
    if topology is None:
        nvlink = [info.domain or place for info, place in zip(infos, places, strict=True)]
        topology = nodes.topology_of(nvlink, infos[0].ranks_per_node)
    if topology.world_size != len(infos):
        raise ValueError(f"topology is {topology}, must have the {len(infos)} ranks of the group")
    if infos[0].device == "cpu":
        for rank in range(0, len(infos), topology.ranks_per_node):
            node = places[rank : rank + topology.ranks_per_node]
            if len(set(node)) > 1:
                raise ValueError(
                    f"topology is {topology}, but ranks {rank} to {rank + len(node) - 1} run on "
                    f"{' and '.join(dict.fromkeys(node))}: a node must be on one machine; {_what_fits(places)}"
                )
    config.check_ranks(topology)
    return topology


def _what_fits(places: Sequence[str]) -> str:
    """The largest nodes of which no machine has a part."""
    size = math.gcd(*(len(list(ranks)) for _, ranks in itertools.groupby(places)))
    nodes = len(places) // size
    settings = f"--set topology.nodes={nodes} --set topology.ranks_per_node={size}"
    return f"Topology({nodes}, {size}) fits (megatron-ep train: {settings})"

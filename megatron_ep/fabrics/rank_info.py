"""What ranks exchange about themselves before they connect, and which of it must be equal on all of them."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_ep.config import Config, Topology, require_equal
from megatron_ep.fabrics import choice, gpu, near_cards, peer_memory
from megatron_ep.meeting import nodes, processes
from megatron_ep.meeting.codec import Plain


@dataclass(frozen=True)
class RankInfo:
    """What one rank sends to the others."""

    host: str  # host name
    machine: str  # result of `processes.machine`
    domain: str | None  # NVLink domain, if it spans machines
    pid: int
    device: str  # device type
    settings: dict[str, Plain]  # fields of Config and Tuning, with the timeout in force
    topology: Topology | None  # the user's, if any
    num_sms: int | None  # SMs of a launch, on a GPU
    gpu: str | None  # UUID of the GPU
    pci: str | None  # PCI address of the GPU, if torch provides it
    near_cards: list[str] | None  # on the host: cards of the NUMA node that the process is bound to
    fabric: str | None  # value of MEGATRON_EP_FABRIC
    ranks_per_node: str | None  # value of MEGATRON_EP_RANKS_PER_NODE
    memory: str | None = None  # value of MEGATRON_EP_PEER_MEMORY
    memory_in_use: str | None = None  # how the rank maps the memory of others, once it is connected over p2p
    owner: processes.Owner | None = None  # of a buffer

    def shared(self) -> dict[str, Any]:
        """Returns what must be equal on all ranks, by the name that the user knows."""
        return {
            "device": self.device,
            **self.settings,
            "topology": self.topology,
            "num_sms (by the GPU's SMs; Config.num_sms sets it)": self.num_sms,
            f"environment variable {nodes.VARIABLE}": self.ranks_per_node,
            f"environment variable {peer_memory.VARIABLE}": self.memory,
        }


def introduce(config: Config, topology: Topology | None, device: torch.device) -> RankInfo:
    """Returns the description of this process. Raises ValueError for an invalid timeout in the environment."""
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
        memory=os.environ.get(peer_memory.VARIABLE) or None,
    )


def _settings_of(config: Config) -> dict[str, Plain]:
    own = asdict(config) | {"timeout": config.timeout_seconds}
    tuning = own.pop("tuning")
    return {f"Config.{name}": value for name, value in own.items()} | {
        f"Tuning.{name}": value for name, value in tuning.items()
    }


def machines(infos: Sequence[RankInfo]) -> list[str]:
    """Returns the machine of each rank as shown to users: the host name, or the full identity if names collide."""
    named: dict[str, set[str]] = {}
    for info in infos:
        named.setdefault(info.host, set()).add(info.machine)
    return [info.host if len(named[info.host]) == 1 else info.machine for info in infos]


def agreed_topology(infos: Sequence[RankInfo], config: Config) -> Topology:
    """Returns the topology of the ranks. Raises ValueError on all ranks if settings differ between ranks, if the
    topology has another number of ranks, or if a node of ranks on the host would span machines."""
    places, topology = machines(infos), infos[0].topology
    require_equal([info.shared() for info in infos])
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
    """Describes the topology with the largest nodes that do not span machines."""
    size = math.gcd(*(len(list(ranks)) for _, ranks in itertools.groupby(places)))
    nodes = len(places) // size
    settings = f"--set topology.nodes={nodes} --set topology.ranks_per_node={size}"
    return f"Topology({nodes}, {size}) fits (megatron-ep train: {settings})"

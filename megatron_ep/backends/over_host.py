"""GPUs of several machines whose network is a thread of the host: over TCP (fabric "tcp"), or by a network card that
writes to memory of the host (fabric "verbs"); or whose kernels hand what they send to the card by themselves (fabric
"ibgda"), while the thread watches it.

The ranks of a node map each other's heaps through CUDA IPC. What goes to other nodes, and what comes from there, lies
in pinned memory of the host, with the send queues that the kernels post in; the thread reads and writes it, and calls
no CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ep import _C
from megatron_ep.backends import cuda, fabrics, tcp, verbs
from megatron_ep.backends.cuda import CudaBackend
from megatron_ep.backends.peer_memory import peer_memories
from megatron_ep.backends.rank_info import RankInfo, machines
from megatron_ep.backends.rendezvous import StoreRendezvous
from megatron_ep.config import Config


class OverHostBackend(CudaBackend):
    """See `interface.Backend`."""

    def __init__(self, group: Any, heap: _C.Heap, device: torch.device, sms: int, report: Any, network: tcp.Network):
        super().__init__(group, heap, device, sms)
        self.report = report
        self.network: tcp.Network = network
        self._nic = network.nic


def connect(
    rendezvous: StoreRendezvous,
    begin: Callable[[], None],
    config: Config,
    heap: _C.Heap,
    device: torch.device,
    sms: int,
    infos: Sequence[RankInfo],
    *,
    fabric: str = fabrics.TCP,
) -> tuple[CudaBackend, str]:
    """See `connect.processes`. Raises ValueError where a node's ranks are on several machines.

    fabric: of `fabrics.OF_HOST`. Over ibgda the kernels post in the card's queues.
    """
    direct = fabric == fabrics.IBGDA
    size = heap.ranks_per_node
    nodes = _nodes(machines(infos), size)
    node = range(rendezvous.rank // size * size, rendezvous.rank // size * size + size)
    group = " ".join(str(info.pid) for info in infos)
    memories = peer_memories(rendezvous, begin, device, heap.bytes_without_network, group, node)

    def make() -> OverHostBackend:
        report = _C.PinnedReport(device.index)
        mirrors = [_C.Segment.anonymous(_C.SoftwareNic.mirror_bytes) for _ in infos]
        gpus = [info.pci for info in infos]
        cards = verbs.cards_for(fabric, rendezvous.rank, machines(infos), gpus=gpus)
        nic = _C.nic_of_gpu(rank=rendezvous.rank, report=report, mirrors=mirrors, cards=cards)
        ranks = _C.QueueGroup(
            heap=heap,
            rank=rendezvous.rank,
            network=_C.QueueHeap(nic=nic, report=report, heap=heap, rank=rendezvous.rank, device=device.index),
            memories=[memories[rank] for rank in node],
            device=device.index,
            num_sms=sms,
            timeout=config.timeout_seconds,
        )
        network = tcp.Network(rendezvous.rank, nodes, nic, cards=cards, places=machines(infos))
        backend = OverHostBackend(ranks, heap, device, sms, report, network)
        backend.memories = memories
        return backend

    backend = rendezvous.agree(make)
    backend.network.connect(rendezvous)
    who = "GPUs hand" if direct else "a thread of the host carries"
    to = " to their network cards" if direct else ""
    return backend, "; ".join([f"{who} what goes to other nodes{to}", *backend.network.cards()])


def _nodes(places: Sequence[str], size: int) -> list[str]:
    """A name for the node of each rank. places: the machine of each rank. size: ranks of a node."""
    names = []
    for first in range(0, len(places), size):
        node = places[first : first + size]
        if len(set(node)) > 1:
            raise ValueError(
                f"ranks {first} to {first + size - 1} are one node, but run on {' and '.join(dict.fromkeys(node))}: "
                "over the tcp, verbs and ibgda fabrics a node must be on one machine"
            )
        names += [f"node {first // size} on {node[0]}"] * size
    return names


def low_latency(
    rendezvous: StoreRendezvous, config: Config, backend: CudaBackend, heap: Any, device: torch.device, blocks: int
) -> tuple[Any, list[Any], Any]:
    """See `connect.low_latency`."""
    assert isinstance(backend, OverHostBackend)
    pids = rendezvous.gather(os.getpid())
    node = [rank for rank, memory in enumerate(backend.memories) if memory is not None]
    mapped = range(node[0], node[-1] + 1)
    memories = peer_memories(rendezvous, cuda.prepare_to_allocate, device, heap.bytes, " ".join(map(str, pids)), mapped)

    def make() -> Any:
        network = _C.QueueHeap(
            nic=backend.network.nic, report=backend.report, heap=heap, rank=rendezvous.rank, device=device.index
        )
        return _C.QueueLowLatency(
            group=backend.group, heap=heap, network=network, memories=[memories[rank] for rank in node], blocks=blocks
        )

    return rendezvous.agree(make), memories, None

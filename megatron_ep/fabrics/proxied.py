"""Fabrics of GPUs with a network thread on the host. It sends over TCP (fabric "tcp") or through a network card that
writes to host memory (fabric "verbs"); with fabric "mlx5" kernels post to the card, and the thread only monitors it.

The ranks of a node map each other's heaps through CUDA IPC. What is sent to and received from other nodes is in pinned
host memory, with the send queues that the kernels post to. The thread reads and writes that memory, without CUDA calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_ep import _C
from megatron_ep.fabrics import choice, gpu
from megatron_ep.fabrics.connection import Connection, GpuRank, LowLatencyConnection
from megatron_ep.fabrics.peer_memory import peer_memories
from megatron_ep.fabrics.tcp import Network


def connect(rank: GpuRank, heap: _C.Heap, begin: Callable[[], None], *, fabric: str) -> Connection:
    """Connects the ranks. Raises ValueError if the ranks of a node are on several machines.

    fabric: one of `choice.OF_HOST`.
    """
    direct = fabric == choice.MLX5
    machines = rank.machines
    nodes = _nodes(machines, heap.ranks_per_node)
    node = _node_of(rank, heap)
    memories = peer_memories(rank.rendezvous, begin, rank.device, heap.bytes_without_network, rank.processes, node)

    def make() -> Connection:
        index = rank.device.index
        report = _C.PinnedReport(index)
        mirrors = [_C.Segment.anonymous(_C.SoftwareNic.mirror_bytes) for _ in machines]
        cards = choice.cards_for(fabric, rank.rank, machines, gpus=[info.pci for info in rank.infos])
        nic = _C.nic_of_gpu(rank=rank.rank, report=report, mirrors=mirrors, cards=cards)
        launcher = _C.queue_launcher(
            heap=heap,
            rank=rank.rank,
            network=_C.QueueHeap(nic=nic, report=report, heap=heap, rank=rank.rank, device=index),
            memories=[memories[peer] for peer in node],
            device=index,
            num_sms=rank.blocks,
            timeout=rank.config.timeout_seconds,
        )
        network = Network(rank.rank, nodes, nic, cards=cards, places=machines)
        return Connection(launcher, memories, network=network, report=report)

    connection = rank.rendezvous.agree(make)
    network = connection.network
    assert network is not None
    network.connect(rank.rendezvous)
    who = "GPUs hand" if direct else "a thread of the host carries"
    to = " to their network cards" if direct else ""
    connection.reason = "; ".join([f"{who} what goes to other nodes{to}", *network.cards()])
    return connection


def low_latency(rank: GpuRank, heap: Any, connection: Connection) -> LowLatencyConnection:
    network = connection.network
    assert network is not None
    node = [peer for peer, memory in enumerate(connection.memories) if memory is not None]
    mapped = range(node[0], node[-1] + 1)
    memories = peer_memories(rank.rendezvous, gpu.prepare_to_allocate, rank.device, heap.bytes, rank.processes, mapped)

    def make() -> LowLatencyConnection:
        queues = _C.QueueHeap(
            nic=network.nic, report=connection.report, heap=heap, rank=rank.rank, device=rank.device.index
        )
        own_node = [memories[peer] for peer in node]
        launcher = _C.queue_low_latency(
            launcher=connection.launcher, heap=heap, network=queues, memories=own_node, blocks=rank.blocks
        )
        return LowLatencyConnection(launcher, memories)

    return rank.rendezvous.agree(make)


def _node_of(rank: GpuRank, heap: _C.Heap) -> range:
    first = rank.rank // heap.ranks_per_node * heap.ranks_per_node
    return range(first, first + heap.ranks_per_node)


def _nodes(machines: Sequence[str], size: int) -> list[str]:
    """Returns a name for the node of each rank. machines: machine of each rank. size: ranks per node."""
    names = []
    for first in range(0, len(machines), size):
        node = machines[first : first + size]
        if len(set(node)) > 1:
            raise ValueError(
                f"ranks {first} to {first + size - 1} are one node, but run on {' and '.join(dict.fromkeys(node))}: "
                "over the tcp, verbs and mlx5 fabrics a node must be on one machine"
            )
        names += [f"node {first // size} on {node[0]}"] * size
    return names

"""Finds the network cards near a GPU or a process. The distance to a GPU is the number of PCI bridges between them, by
the tree in /sys; among cards under another root, those of the GPU's NUMA node are nearer. The cards near a process are
those of the NUMA node that it is bound to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from megatron_ep.fabrics import cards as rdma

DEVICES, NUMA_NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
FAR = 1000  # more bridges than lie between any two devices


def nearest(gpu: str | None, cards: Sequence[str]) -> list[str]:
    """Returns the cards ("mlx5_0") nearest to a GPU, in their order; all of them if nothing is known about the GPU.

    gpu: PCI address, "0000:1b:00.0".
    """
    own = _place(DEVICES / gpu) if gpu else None
    if own is None:
        return list(cards)
    distances = [_distance(own, _place(rdma.FOLDER / card / "device")) for card in cards]
    return [card for card, distance in zip(cards, distances, strict=True) if distance == min(distances)]


def of_process() -> list[str] | None:
    """Returns the cards of the NUMA node that this process is bound to; None if it is not bound to a single one."""
    cpus = os.sched_getaffinity(0)
    for node in NUMA_NODES.glob("node*"):
        if cpus <= _cpus(node):
            number = node.name.removeprefix("node")
            return sorted(card.name for card in rdma.FOLDER.glob("*") if _numa_node(card / "device") == number)
    return None


def _cpus(node: Path) -> set[int]:
    try:
        return {cpu for numbers in _ranges((node / "cpulist").read_text()) for cpu in numbers}
    except (OSError, ValueError):  # an unusual /sys must not keep a buffer from being made
        return set()


def _ranges(text: str) -> Iterator[range]:
    """Parses ranges such as "0-3,8"."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield range(int(first), int(last or first) + 1)


def turn(place: int, near: Sequence[Sequence[str]]) -> int:
    """Returns the index of the card that a rank takes among its nearest ones; ranks near the same cards take turns.

    place: index of the rank among those of its machine.
    near: nearest cards of each of these.
    """
    return near[:place].count(near[place]) % len(near[place])


def _place(device: Path) -> Path | None:
    """Returns the path of a device from the root of the PCI tree; None if it does not exist."""
    return device.resolve() if device.exists() else None


def _distance(one: Path, other: Path | None) -> int:
    """Returns the number of bridges and devices between two devices."""
    if other is None:
        return 3 * FAR
    shared = list(takewhile(lambda pair: pair[0] == pair[1], zip(one.parts, other.parts, strict=False)))
    if any(name.startswith("pci") for name, _ in shared):  # both are under one PCI root
        return len(one.parts) + len(other.parts) - 2 * len(shared)
    return FAR if _numa_node(one) == _numa_node(other) else 2 * FAR


def _numa_node(device: Path) -> str:
    try:
        return (device / "numa_node").read_text().strip()
    except OSError:
        return ""

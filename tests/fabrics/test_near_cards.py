"""Which network card is near which GPU, or which process, over trees of PCI bridges as Linux shows them."""

import os
from pathlib import Path

import pytest

from megatron_ep.fabrics import cards as rdma
from megatron_ep.fabrics import near_cards


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Call it with the places of GPUs and of cards, below /sys/devices, and the NUMA node of each root."""

    def build(gpus: list[str], cards: dict[str, str], nodes: dict[str, int] | None = None) -> list[str]:
        """The GPUs' addresses."""
        addresses, infiniband = tmp_path / "bus", tmp_path / "infiniband"
        addresses.mkdir(), infiniband.mkdir()
        for place in [*gpus, *cards.values()]:
            device = tmp_path / "devices" / place
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{(nodes or {}).get(place.split('/')[0], -1)}\n")
        for place in gpus:
            (addresses / Path(place).name).symlink_to(tmp_path / "devices" / place)
        for name, place in cards.items():
            (infiniband / name).mkdir()
            (infiniband / name / "device").symlink_to(tmp_path / "devices" / place)
        for node, cpus in enumerate(("0-1,4", "2-3,5-6", "")):  # the last is one of memory alone
            (tmp_path / "numa" / f"node{node}").mkdir(parents=True)
            (tmp_path / "numa" / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
        monkeypatch.setattr(near_cards, "NUMA_NODES", tmp_path / "numa")
        monkeypatch.setattr(near_cards, "DEVICES", addresses)
        monkeypatch.setattr(rdma, "FOLDER", infiniband)
        return [Path(place).name for place in gpus]

    return build


def near(gpus: list[str | None], cards: list[str]) -> list[list[str]]:
    return [near_cards.nearest(gpu, cards) for gpu in gpus]


def taken(nearest: list[list[str]]) -> list[str]:
    return [cards[near_cards.turn(place, nearest)] for place, cards in enumerate(nearest)]


def test_a_card_below_the_same_switch(machine) -> None:
    """As in an HGX: a switch for each pair of a GPU and a card, two of them below a root, one root a processor's."""
    roots = ["pci0000:0a", "pci0000:0a", "pci0000:80", "pci0000:80"]
    gpus = machine(
        [f"{root}/0000:{i}0:01.0/0000:{i}1:00.0/0000:{i}2:00.0/0000:{i}3:00.0" for i, root in enumerate(roots)],
        {
            f"mlx5_{3 - i}": f"{root}/0000:{i}0:01.0/0000:{i}1:00.0/0000:{i}2:01.0/0000:{i}4:00.0"
            for i, root in enumerate(roots)
        },
    )
    cards = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert near(gpus, cards) == [["mlx5_3"], ["mlx5_2"], ["mlx5_1"], ["mlx5_0"]]
    assert near_cards.nearest(gpus[0], ["mlx5_1", "mlx5_2"]) == ["mlx5_2"]  # below the same root


def test_gpus_near_the_same_cards_take_them_in_turn(machine) -> None:
    gpus = machine(
        [f"pci0000:{root}/0000:{root}:0{i}.0/0000:{root}{i}:00.0" for root in ("0a", "80") for i in (1, 2)],
        {
            f"mlx5_{number}": f"pci0000:{root}/0000:{root}:0{i}.0/0000:{root}{i}:00.0"
            for number, (root, i) in enumerate([("0a", 3), ("0a", 4), ("80", 5)])
        },
    )
    nearest = near(gpus, ["mlx5_0", "mlx5_1", "mlx5_2"])
    assert nearest == [["mlx5_0", "mlx5_1"], ["mlx5_0", "mlx5_1"], ["mlx5_2"], ["mlx5_2"]]
    assert taken(nearest) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_2"]


def test_another_root_of_the_same_processor_is_nearer_than_another_processor(machine) -> None:
    gpus = machine(
        ["pci0000:10/0000:10:01.0/0000:11:00.0", "pci0000:20/0000:20:01.0/0000:21:00.0"],
        {"mlx5_0": "pci0000:30/0000:30:01.0/0000:31:00.0", "mlx5_1": "pci0000:40/0000:40:01.0/0000:41:00.0"},
        {"pci0000:10": 1, "pci0000:20": 0, "pci0000:30": 0, "pci0000:40": 1},
    )
    assert near(gpus, ["mlx5_0", "mlx5_1"]) == [["mlx5_1"], ["mlx5_0"]]


def test_of_what_is_not_known_all_are_as_near(machine) -> None:
    [gpu] = machine(["pci0000:10/0000:10:01.0/0000:11:00.0"], {"mlx5_1": "pci0000:40/0000:40:01.0/0000:41:00.0"})
    cards = ["mlx5_0", "mlx5_1"]
    assert near([None, "0000:99:00.0", gpu], cards) == [cards, cards, ["mlx5_1"]]  # mlx5_0 is no PCI device
    assert taken([cards] * 3) == ["mlx5_0", "mlx5_1", "mlx5_0"]


def test_cards_near_a_process(machine, monkeypatch) -> None:
    machine(
        [],
        {f"mlx5_{root}": f"pci0000:{root}0/0000:{root}0:01.0/0000:{root}1:00.0" for root in (1, 2, 3)},
        {"pci0000:10": 1, "pci0000:20": 0, "pci0000:30": 1},
    )

    def near(*cpus: int) -> list[str] | None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(cpus))
        return near_cards.of_process()

    assert near(0) == near(1, 4) == ["mlx5_2"]
    assert near(2, 3, 5, 6) == near(6) == ["mlx5_1", "mlx5_3"]
    assert near(1, 2) is None and near(7) is None
    cpulist = near_cards.NUMA_NODES / "node0" / "cpulist"
    cpulist.write_bytes(b"\xff")
    assert near(0) is None and near(6) == ["mlx5_1", "mlx5_3"]
    cpulist.unlink()
    assert near(0) is None and near(6) == ["mlx5_1", "mlx5_3"], "a preference, which no buffer fails for"

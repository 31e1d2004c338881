"""Host ranks of several machines that post in a network card's own queues (IBGDA), as GPUs do. The machines are this
one, under several names, and the cards are those of a libmlx5 of the tests' own (tests/csrc/fake_mlx5.h), which reads
what the ranks have written into its rings: no real one has been seen."""

from unittest import mock

import pytest
import test_verbs
import torch
import torch.distributed as dist
from cards import cards_with, library, use_library
from forced_machines import machines_of
from over_networks import W, run_cases
from test_verbs import buffer_of

import megatron_ep as ep
from megatron_ep.errors import EPError
from megatron_ep.fabrics import choice, nvshmem_env, tcp, verbs
from megatron_ep.tools.local_ranks import LocalRanks


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 120) as ranks:
        ranks.run(use_library, library(), "ibgda")
        yield ranks


def run_carried() -> bool:
    """Whether a thread of the host carries rows: over TCP, or by telling a card."""
    sent = []
    whole = tcp.Network.segments_sent
    with machines_of(1, "ibgda"), buffer_of(timeout=20) as buffer:
        network = buffer._group._network
        ids = torch.arange(16).repeat(64, 1)[:, :4].contiguous()
        for _ in range(2):
            dist.barrier()
            before = sum(count for count, _ in whole(network).values())
            for _ in range(10):
                ep.dispatch(torch.ones(64, 7168), ids, buffer=buffer)
            sent.append(sum(count for count, _ in whole(network).values()) - before)
            dist.barrier()
    return max(sent) > 500


def test_no_row_goes_over_tcp(ranks):
    assert not any(ranks.run(run_carried))


# ---- which fabric


def run_without(name: str) -> str:
    with (
        machines_of(1, "ibgda"),
        mock.patch.object(verbs, "MLX5_LIBRARY", name if dist.get_rank() == 1 else verbs.MLX5_LIBRARY),
        pytest.raises(EPError) as caught,
    ):
        buffer_of(timeout=20)
    return str(caught.value)


def test_what_is_missing_of_libmlx5_is_said(ranks):
    needs = "the ibgda fabric needs"
    for text in ranks.run(run_without, "libnone.so.1"):
        assert text.startswith(needs) and "libnone.so.1: cannot open" in text and text.endswith("on rank 1")
    for text in ranks.run(run_without, "libm.so.6"):
        assert text.startswith(needs) and "libm.so.6 has no mlx5dv_is_supported: it needs rdma-core" in text


def test_the_cards_own_queues_come_first(ranks):
    assert set(ranks.run(test_verbs.run_choice, {}, "")) == {"ibgda"}
    assert set(ranks.run(test_verbs.run_choice, dict(mlx5=0), "")) == {"verbs"}
    assert set(ranks.run(test_verbs.run_choice, dict(down=1), "")) == {"tcp"}
    assert set(ranks.run(test_verbs.run_choice, {}, "verbs")) == {"verbs"}


@pytest.mark.usefixtures("own_library")
def test_report(monkeypatch):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(nvshmem_env, "has_cards", lambda: True)
    with cards_with(devices=2):
        facts = choice.report()
    assert facts["ibgda"] == "fake_0 port 1 (RoCE): up, 10.99.0.1; fake_1 port 1 (RoCE): up, 10.99.0.1"
    assert facts["card of each rank"] == "on the host in turn fake_0:1, fake_1:1"
    assert facts["chosen on the host"] == "shared memory on one machine, ibgda on several"
    monkeypatch.setattr(verbs.near_cards, "of_process", lambda: ["fake_1", "fake_2"])
    with cards_with(devices=2):
        assert verbs.report_of_ranks([]).endswith(
            "fake_0:1, fake_1:1; bound to a NUMA node as this process is, fake_1:1"
        )
    with cards_with(mlx5=0):
        facts = choice.report()
    assert facts["ibgda"] == "fake_0 port 1 (RoCE): it is no card of the driver mlx5"
    assert facts["verbs"] == "fake_0 port 1 (RoCE): up, 10.99.0.1"
    assert facts["chosen on the host"] == "shared memory on one machine, verbs on several"
    with cards_with(down=1):
        facts = choice.report()
    assert facts["verbs"] == "fake_0 port 1 (RoCE): it is down"
    assert facts["chosen on the host"].endswith("tcp (fake_0 port 1 (RoCE): it is down) on several")
    monkeypatch.setattr(nvshmem_env, "has_cards", lambda: False)
    assert choice.report()["verbs"].startswith("no network card for RDMA in ")


def run_several_cards(seed: int) -> list[str]:
    """Each rank has two cards."""
    with cards_with(devices=2, seed=seed + dist.get_rank()):
        run_cases("ibgda", 1, 1, range(1))
        with machines_of(1, "ibgda"), buffer_of(timeout=20) as buffer:
            return buffer._group._network.cards()


def test_the_bits_over_several_cards_a_rank(ranks):
    for rank, [text] in enumerate(ranks.run(run_several_cards, 7)):
        assert text == f"rank {rank} has fake_0 port 1 and fake_1 port 1"


@pytest.mark.usefixtures("own_library")
def test_ranks_of_a_machine_share_its_cards():
    machines = ["a", "b", "a"]
    with cards_with(devices=5):
        taken = [verbs.cards_for("ibgda", rank, machines) for rank in range(3)]
        names = [[card.port_name.split()[0] for card in cards] for cards in taken]
        assert names == [["fake_0", "fake_2", "fake_4"], [f"fake_{i}" for i in range(5)], ["fake_1", "fake_3"]]
        near = [["fake_4"], ["fake_4"], ["fake_0", "fake_1"]]
        assert len(verbs.cards_for("ibgda", 0, machines, near=near)) == 3  # on b there is one rank
        near, machines = near[::2] * 2, ["a", "a", "b", "b"]
        taken = [verbs.cards_for("ibgda", rank, machines, near=near) for rank in range(2)]
        assert [[card.port_name.split()[0] for card in cards] for cards in taken] == [["fake_4"], ["fake_0", "fake_1"]]
        assert [card.port_name for card in verbs.cards_for("verbs", 1, machines)] == ["fake_1 port 1"]
    assert not verbs.cards_for("tcp", 0, machines)


def test_rails_that_differ_are_named():
    machines = ["a", "a", "b", "b"]
    assert not verbs.rails_that_differ(machines, [["x"], ["y"], ["x"], ["y"]])
    assert verbs.rails_that_differ(machines, [["x"], ["y"], ["x"], ["x"]]).startswith(
        "rank 1 has y, rank 3 has x: if a"
    )


@pytest.mark.usefixtures("own_library")
def test_which_card_the_rank_of_a_gpu_takes(monkeypatch):
    near = {"a": ["fake_2"], "b": ["fake_0", "fake_1"], "c": ["fake_0", "fake_1"]}
    monkeypatch.setattr(nvshmem_env, "has_cards", lambda: True)
    monkeypatch.setattr(verbs.near_cards, "nearest", lambda gpu, cards: near.get(gpu, cards))
    with cards_with(devices=3):
        assert verbs.report_of_ranks(["a", "b", "c"]) == "GPU 0 fake_2:1, GPU 1 fake_0:1, GPU 2 fake_1:1"
        assert verbs.report_of_ranks(["a", "b"]) == "GPU 0 fake_2:1, GPU 1 fake_0:1 (ibgda: fake_1:1 too)"

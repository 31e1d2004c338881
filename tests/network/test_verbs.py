"""Host ranks of several machines over network cards that write to each other's memory: over verbs, and over mlx5,
where ranks post in a card's own queues as GPUs do. The machines are this one, under several names, and the cards are
those of a libibverbs and a libmlx5 of the tests' own (tests/csrc/fake_ibverbs.cpp, fake_mlx5.h): no real one has been
seen."""

import errno
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cards import cards_with, library, use_library
from forced_machines import machines_of
from over_networks import IDS, W, X, buffer_of, run_cases
from run_on import run_on

import megatron_ep as ep
from megatron_ep.errors import EPError
from megatron_ep.fabrics import cards as rdma
from megatron_ep.fabrics import choice, near_cards, tcp, verbs
from megatron_ep.tools.local_ranks import LocalRanks


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 120) as ranks:
        ranks.run(use_library, library(), "mlx5")
        yield ranks


# ---- what a network wants of connections

WANTED = dict(zip(verbs.SETTINGS, (106, 3, 2, 19, 5), strict=True))


@run_on("ranks")
def test_connections_are_as_the_environment_says():
    """Or an error on all ranks, if the last one wants something else."""
    own = {name: str(value) for name, value in WANTED.items()}
    facts = {verbs.SETTINGS[name][0]: value for name, value in WANTED.items()}
    with machines_of(1, "verbs"), cards_with(**facts), mock.patch.dict("os.environ", own):
        with buffer_of() as buffer:
            ep.dispatch(X, IDS, buffer=buffer)
        for name, value in WANTED.items():
            says = f"^environment variable {name} is {value} on rank 0 and 1 on rank 3, must be equal$"
            other = mock.patch.dict("os.environ", {name: "1"} if dist.get_rank() == W - 1 else {})
            with other, pytest.raises(ValueError, match=says):
                buffer_of()


@pytest.mark.parametrize(("name", "value", "range_"), [("TC", "256", "[0, 255]"), ("TIMEOUT", "0", "[1, 31]")])
def test_a_setting_out_of_range(name, value, range_, monkeypatch):
    monkeypatch.setenv(f"MEGATRON_EP_IB_{name}", value)
    with pytest.raises(ValueError, match=rf"_IB_{name} is '{value}', must be a whole number in {re.escape(range_)}"):
        verbs.settings()


def test_a_library_that_cannot_provide_for_forks(own_library):
    """It aborts where it is used before it was asked to."""
    with cards_with(unforkable=errno.EINVAL, copies=1):
        verbs.ports()
    with cards_with(unforkable=errno.EINVAL), pytest.warns(RuntimeWarning, match="ibv_fork_init: Invalid argument"):
        verbs.ports()


@run_on("ranks")
def test_no_row_goes_over_tcp():
    """No thread of the host carries rows over mlx5: over TCP, or by telling a card."""
    sent = []
    whole = tcp.Network.segments_sent
    with machines_of(1, "mlx5"), buffer_of() as buffer:
        network = buffer._group._network
        ids = torch.arange(16).repeat(64, 1)[:, :4].contiguous()
        for _ in range(2):
            dist.barrier()
            before = sum(count for count, _ in whole(network).values())
            for _ in range(10):
                ep.dispatch(torch.ones(64, 7168), ids, buffer=buffer)
            sent.append(sum(count for count, _ in whole(network).values()) - before)
            dist.barrier()
    assert max(sent) <= 500


@run_on("ranks")
def test_the_bits_over_several_cards_a_rank():
    rank = dist.get_rank()
    with cards_with(devices=2, seed=7 + rank):
        run_cases("mlx5", 1, 1, range(1))
        with machines_of(1, "mlx5"), buffer_of() as buffer:
            assert buffer._group._network.cards() == [f"rank {rank} has fake_0 port 1 and fake_1 port 1"]


# ---- which fabric, which card


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("libnone.so.1", r"libnone\.so\.1: cannot open .* on rank 1$"),
        ("libm.so.6", r"libm\.so\.6 has no mlx5dv_is_supported: it needs rdma-core"),
    ],
)
@run_on("ranks")
def test_what_is_missing_of_libmlx5_is_said(name, says):
    """It is missing on rank 1."""
    with (
        machines_of(1, "mlx5"),
        mock.patch.object(verbs, "MLX5_LIBRARY", name if dist.get_rank() == 1 else verbs.MLX5_LIBRARY),
        pytest.raises(EPError, match=f"^the mlx5 fabric needs.*{says}"),
    ):
        buffer_of()


@pytest.mark.parametrize("size", [1, W])
@run_on("ranks")
def test_the_former_name_of_mlx5_is_refused(size):
    says = r"is 'ibgda', must be one of .*: ibgda is called mlx5 now; for IBGDA of NVSHMEM it is nvshmem$"
    with machines_of(size, "ibgda"), pytest.raises(ValueError, match=says):
        buffer_of()


@pytest.mark.parametrize(
    ("facts", "wanted", "taken"),
    [
        ({}, "", "verbs"),
        (dict(down=1), "", "tcp"),
        ({}, "mlx5", "mlx5"),
        ({}, "verbs", "verbs"),
        ({}, "tcp", "tcp"),
        ({}, "nccl", "verbs"),  # what is wanted of GPUs
    ],
)
@run_on("ranks")
def test_the_best_that_all_ranks_have_is_taken(facts, wanted, taken):
    """facts: of the card of the last rank."""
    with (
        machines_of(2, wanted),
        mock.patch.object(rdma, "has_cards", lambda: True),
        cards_with(**facts if dist.get_rank() == 3 else {}),
        ep.Buffer(None, ep.Config(num_experts=16, timeout=20), ep.Topology(2, 2)) as buffer,
    ):
        assert buffer.fabric == taken


def test_report(own_library, monkeypatch):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(rdma, "has_cards", lambda: True)
    with cards_with(devices=2):
        facts = choice.report()
    assert facts["mlx5"] == "fake_0 port 1 (RoCE): up, 10.99.0.1; fake_1 port 1 (RoCE): up, 10.99.0.1"
    assert facts["card of each rank"] == "on the host in turn fake_0:1, fake_1:1"
    assert facts["chosen on the host"] == "shared memory on one machine, verbs on several"
    monkeypatch.setattr(verbs.near_cards, "of_process", lambda: ["fake_1", "fake_2"])
    with cards_with(devices=2):
        assert verbs.report_of_ranks([]).endswith(
            "fake_0:1, fake_1:1; bound to a NUMA node as this process is, fake_1:1"
        )
    monkeypatch.setenv(choice.VARIABLE, "mlx5")
    with cards_with():
        assert choice.report()["chosen on the host"] == "shared memory on one machine, mlx5 on several"
    monkeypatch.setenv(choice.VARIABLE, "ibgda")
    with cards_with():
        assert choice.report()["chosen on the host"].endswith("for IBGDA of NVSHMEM it is nvshmem")
    monkeypatch.delenv(choice.VARIABLE)
    with cards_with(mlx5=0):
        facts = choice.report()
    assert facts["mlx5"] == "fake_0 port 1 (RoCE): it is no card of the driver mlx5"
    assert facts["verbs"] == "fake_0 port 1 (RoCE): up, 10.99.0.1"
    assert facts["chosen on the host"] == "shared memory on one machine, verbs on several"
    with cards_with(down=1):
        facts = choice.report()
    assert facts["verbs"] == "fake_0 port 1 (RoCE): it is down"
    assert facts["chosen on the host"].endswith("tcp (fake_0 port 1 (RoCE): it is down) on several")
    monkeypatch.setattr(rdma, "has_cards", lambda: False)
    assert choice.report()["verbs"].startswith("no network card for RDMA in ")


def test_the_reason_names_what_a_port_lacks(own_library, monkeypatch):
    monkeypatch.setattr(rdma, "has_cards", lambda: True)
    with cards_with(down=1):
        chosen = choice.choose_for_host(2, [None, None], lambda mine: [mine, mine])
    assert chosen == choice.Choice("tcp", "host backend on 2 machines; fake_0 port 1 (RoCE): it is down")


def names_of(machines: list[str], fabric: str = "verbs", **near) -> list[list[str]]:
    """The cards that each rank takes."""
    taken = [verbs.cards_for(fabric, rank, machines, **near) for rank in range(len(machines))]
    return [[card.port_name.split()[0] for card in cards] for cards in taken]


def names_of_ones(machines: list[str], **near) -> list[str]:
    """The card that each rank takes over verbs."""
    return [name for [name] in names_of(machines, **near)]


def test_cards_of_the_numa_node_that_a_rank_is_bound_to(own_library, monkeypatch):
    machines = ["a", "b", "a", "b", "a", "b"]
    first, second = ["fake_2", "fake_3"], ["fake_0", "fake_1", "fake_9"]

    def taken(*near: list[str] | None) -> list[str]:
        return names_of_ones(machines, near=near)

    in_turn = ["fake_0", "fake_0", "fake_1", "fake_1", "fake_2", "fake_2"]
    with cards_with(devices=4):
        assert taken(first, first, second, second, first, first) == [*2 * ["fake_2"], *2 * ["fake_0"], *2 * ["fake_3"]]
        assert taken([], [], second, second, [], []) == in_turn[:1] * 4 + in_turn[2:4]  # none at the first node
        assert taken(first, second, second, first, first, second) == in_turn  # ranks that meet are bound otherwise
        assert taken(first, first, second, second, None, None) == in_turn  # some are bound to none
        monkeypatch.setenv(verbs.VARIABLE, "fake_0,fake_1,fake_2")
        assert taken(first, first, second, second, first, first) == in_turn


def test_the_card_near_its_gpu(own_library, monkeypatch):
    near = {"near the last": ["fake_2"], "near two": ["fake_0", "fake_1"]}
    monkeypatch.setattr(near_cards, "nearest", lambda gpu, cards: near.get(gpu, cards))
    machines = ["a", "b", "a", "a", "a"]
    gpus = ["near the last", "near the last", "near two", "near two", None]

    def taken():
        return names_of_ones(machines, gpus=gpus)

    with cards_with(devices=3):
        assert taken() == ["fake_2", "fake_2", "fake_0", "fake_1", "fake_0"]
        monkeypatch.setenv(verbs.VARIABLE, "fake_0,fake_1")
        assert taken() == ["fake_0", "fake_0", "fake_1", "fake_0", "fake_1"]


def test_cards_by_name(own_library, monkeypatch):
    with cards_with(devices=3):
        assert [port.device for port in verbs.usable()] == ["fake_0", "fake_1", "fake_2"]
        machines = ["a", "b", "a", "a", "a"]  # a rank's place on its machine says which card
        assert names_of_ones(machines) == [f"fake_{card}" for card in (0, 0, 1, 2, 0)]
        monkeypatch.setenv(verbs.VARIABLE, "fake_2, fake_0:1")
        assert [port.device for port in verbs.usable()] == ["fake_0", "fake_2"]
        for name in ("fake_3", "fake_0:2", ""):
            monkeypatch.setenv(verbs.VARIABLE, f"fake_0,{name}")
            with pytest.raises(ValueError, match=f"names '{name}', must be cards of this machine: fake_0, fake_1"):
                verbs.usable()


def test_without_the_library():
    with mock.patch.object(verbs, "LIBRARY", "libnone.so.1"), pytest.raises(EPError, match="needs libnone"):
        verbs.usable()


def test_ranks_of_a_machine_share_its_cards(own_library):
    machines = ["a", "b", "a"]
    with cards_with(devices=5):
        shared = [["fake_0", "fake_2", "fake_4"], [f"fake_{i}" for i in range(5)], ["fake_1", "fake_3"]]
        assert names_of(machines, "mlx5") == shared
        near = [["fake_4"], ["fake_4"], ["fake_0", "fake_1"]]
        assert len(names_of(machines, "mlx5", near=near)[0]) == 3  # on b there is one rank
        taken = names_of(["a", "a", "b", "b"], "mlx5", near=near[::2] * 2)
        assert taken == [["fake_4"], ["fake_0", "fake_1"]] * 2
    assert names_of(machines, "tcp") == [[]] * 3


def test_rails_that_differ_are_named():
    machines = ["a", "a", "b", "b"]
    assert not verbs.rails_that_differ(machines, [["x"], ["y"], ["x"], ["y"]])
    assert verbs.rails_that_differ(machines, [["x"], ["y"], ["x"], ["x"]]).startswith(
        "rank 1 has y, rank 3 has x: if a"
    )


def test_which_card_the_rank_of_a_gpu_takes(own_library, monkeypatch):
    near = {"a": ["fake_2"], "b": ["fake_0", "fake_1"], "c": ["fake_0", "fake_1"]}
    monkeypatch.setattr(rdma, "has_cards", lambda: True)
    monkeypatch.setattr(verbs.near_cards, "nearest", lambda gpu, cards: near.get(gpu, cards))
    with cards_with(devices=3):
        assert verbs.report_of_ranks(["a", "b", "c"]) == "GPU 0 fake_2:1, GPU 1 fake_0:1, GPU 2 fake_1:1"
        assert verbs.report_of_ranks(["a", "b"]) == "GPU 0 fake_2:1, GPU 1 fake_0:1 (mlx5: fake_1:1 too)"

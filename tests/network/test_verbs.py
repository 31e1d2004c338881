"""Host ranks of several machines over network cards that write to each other's memory. The machines are this one, under
several names, and the cards are those of a libibverbs of the tests' own (tests/csrc/fake_ibverbs.cpp): no real one has
been seen."""

import errno
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cards import cards_with, library, use_library
from forced_machines import machines_of
from over_networks import W

import megatron_ep as ep
from megatron_ep.errors import EPError
from megatron_ep.fabrics import choice, near_cards, nvshmem_env, verbs
from megatron_ep.tools.local_ranks import LocalRanks


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(W, 120) as ranks:
        ranks.run(use_library, library(), "verbs")
        yield ranks


def buffer_of(**settings) -> ep.Buffer:
    return ep.Buffer(None, ep.Config(num_experts=16, **settings), ep.Topology(W, 1))


# ---- what a network wants of connections

WANTED = dict(zip(verbs.SETTINGS, (106, 3, 2, 19, 5), strict=True))


def run_with_service(wanted: dict[str, int]) -> str:
    """Of the last rank something else."""
    own = {name: str(value) for name, value in (wanted if dist.get_rank() == W - 1 else WANTED).items()}
    facts = {verbs.SETTINGS[name][0]: value for name, value in WANTED.items()}
    with machines_of(1, "verbs"), cards_with(**facts), mock.patch.dict("os.environ", own):
        try:
            with buffer_of(timeout=20) as buffer:
                ep.dispatch(torch.ones(8, 16), torch.arange(16).view(8, 2), buffer=buffer)
        except ValueError as error:
            return str(error)
    return ""


def test_connections_are_as_the_environment_says(ranks):
    assert ranks.run(run_with_service, WANTED) == [""] * W


def test_ranks_that_want_other_connections_are_told(ranks):
    for name in WANTED:
        for text in ranks.run(run_with_service, WANTED | {name: 1}):
            assert text == f"environment variable {name} is {WANTED[name]} on rank 0 and 1 on rank 3, must be equal"


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


# ---- which fabric, which card


def run_choice(facts: dict[str, int], wanted: str) -> str:
    with (
        machines_of(2, wanted),
        mock.patch.object(nvshmem_env, "has_cards", lambda: True),
        cards_with(**facts if dist.get_rank() == 3 else {}),
        ep.Buffer(None, ep.Config(num_experts=16, timeout=20), ep.Topology(2, 2)) as buffer,
    ):
        return buffer.fabric


def test_cards_are_taken_where_all_ranks_have_one(ranks):
    assert set(ranks.run(run_choice, {}, "")) == {"verbs"}
    assert set(ranks.run(run_choice, dict(down=1), "")) == {"tcp"}
    assert set(ranks.run(run_choice, {}, "tcp")) == {"tcp"}
    assert set(ranks.run(run_choice, {}, "nccl")) == {"verbs"}  # what is wanted of GPUs


def test_the_reason_names_what_a_port_lacks(own_library, monkeypatch):
    monkeypatch.setattr(nvshmem_env, "has_cards", lambda: True)
    with cards_with(down=1):
        chosen = choice.choose_for_host(2, [None, None], lambda mine: [mine, mine])
    assert chosen == choice.Choice("tcp", "host backend on 2 machines; fake_0 port 1 (RoCE): it is down")


def names_of(machines: list[str], **near) -> list[str]:
    """The card that each rank takes."""
    ranks = range(len(machines))
    return [card.port_name.split()[0] for rank in ranks for card in verbs.cards_for("verbs", rank, machines, **near)]


def test_cards_of_the_numa_node_that_a_rank_is_bound_to(own_library, monkeypatch):
    machines = ["a", "b", "a", "b", "a", "b"]
    first, second = ["fake_2", "fake_3"], ["fake_0", "fake_1", "fake_9"]

    def taken(*near: list[str] | None) -> list[str]:
        return names_of(machines, near=near)

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
        return names_of(machines, gpus=gpus)

    with cards_with(devices=3):
        assert taken() == ["fake_2", "fake_2", "fake_0", "fake_1", "fake_0"]
        monkeypatch.setenv(verbs.VARIABLE, "fake_0,fake_1")
        assert taken() == ["fake_0", "fake_0", "fake_1", "fake_0", "fake_1"]


def test_cards_by_name(own_library, monkeypatch):
    with cards_with(devices=3):
        assert [port.device for port in verbs.usable()] == ["fake_0", "fake_1", "fake_2"]
        machines = ["a", "b", "a", "a", "a"]  # a rank's place on its machine says which card
        assert names_of(machines) == [f"fake_{card}" for card in (0, 0, 1, 2, 0)]
        monkeypatch.setenv(verbs.VARIABLE, "fake_2, fake_0:1")
        assert [port.device for port in verbs.usable()] == ["fake_0", "fake_2"]
        for name in ("fake_3", "fake_0:2", ""):
            monkeypatch.setenv(verbs.VARIABLE, f"fake_0,{name}")
            with pytest.raises(ValueError, match=f"names '{name}', must be cards of this machine: fake_0, fake_1"):
                verbs.usable()


def test_without_the_library():
    with mock.patch.object(verbs, "LIBRARY", "libnone.so.1"), pytest.raises(EPError, match="needs libnone"):
        verbs.usable()

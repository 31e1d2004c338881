"""The low-latency mode in virtual time: nothing is lost, costs add up by hand. What holds in both modes is in
test_virtual_time.py."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ideal_machine import ideal

from megatron_ep.config import Config, Topology
from megatron_ep.tools.simulate import Case, Machine, predict


def case(nodes=2, ranks=2, tokens=16, experts=64, num_sms=4, **settings):
    config = Config(num_experts=experts, num_sms=num_sms)
    return Case(Topology(nodes, ranks), config, mode="low-latency", num_tokens=tokens, **settings)


@pytest.fixture(scope="module")
def h200():
    return Machine.load("h200_cx7")


def far_rows(one, each_expert):
    """Rows that leave their node: one for each rank that a token goes to, or one for each of its experts."""
    world, per_node = one.topology.world_size, one.topology.ranks_per_node
    rows = 0
    for rank, ids in enumerate(one.choices()):
        ranks = ids.long() // (one.config.num_experts // world)
        far = ranks // per_node != rank // per_node
        if each_expert:
            rows += int(far.sum())
        else:
            goes = torch.zeros(one.num_tokens, world, dtype=torch.bool).scatter_(1, ranks, True)
            rows += int(goes.sum()) - int(goes[:, rank // per_node * per_node :][:, :per_node].sum())
    return rows


@given(
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 3),
    tokens=st.integers(1, 40),
    hidden=st.integers(1, 300).map(lambda value: 8 * value),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_every_row_comes_once(h200, nodes, ranks, tokens, hidden, data):
    world = nodes * ranks
    experts = world * data.draw(st.integers(1, 40), "L")
    maps_rail = data.draw(st.booleans(), "maps_rail")
    one = case(
        nodes,
        ranks,
        tokens,
        experts,
        hidden=hidden,
        topk=data.draw(st.integers(1, min(8, experts)), "K"),
        dtype=data.draw(st.sampled_from(["bf16", "fp8"]), "dtype"),
        sum_at=data.draw(st.sampled_from(["token", "expert"]), "sum_at"),
        maps_rail=maps_rail,
        images=None if maps_rail else data.draw(st.sampled_from([m for m in range(1, nodes + 1) if nodes % m == 0])),
    )
    found = predict(one, h200)
    for name, phase in found.phases.items():
        rows = far_rows(one, each_expert=name == "combine" and one.sum_at == "token")
        assert phase.rail_rows + phase.peer_rows >= rows
        assert phase.rail_rows == (rows if one.uses_network else 0)
        slot = one.row_format(*one.row_bytes if name == "dispatch" else (one.combine_bytes, 0)).slot_bytes
        if name == "combine" or not one.uses_network:
            assert phase.row_bytes == phase.rail_rows * slot
        else:
            assert phase.row_bytes > phase.rail_rows * slot  # and choices


def test_one_row_takes_the_sum_of_its_way():
    """A token that goes to the other node: its choices, then its row and a signal, follow each other on the card."""
    costs = {"card_doorbell": 1500, "card_way": 2500, "card_signal": 900, "card_turn": 1 << 20}
    one = case(2, 1, tokens=1, experts=2, topk=1, num_sms=1)
    there = [torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)]
    for phase in predict(one, ideal(**costs), choices=there).phases.values():
        assert phase.us == pytest.approx(1.5 + 2.5 + 0.9)
    us = predict(one, ideal(**costs, card=0.1), choices=there).phases["combine"].us
    slot, flag = one.row_format(one.combine_bytes, 0).slot_bytes / 100, 0.64
    assert us == pytest.approx(4.9 + slot + flag)


def test_what_each_half_did(h200):
    one = case()
    found = predict(one, h200)
    for name, phase in found.phases.items():
        halves = [role for role in phase.roles if role.startswith("low_latency")]
        assert len(halves) == 2 and all(("combine" in half) == (name == "combine") for half in halves)
        assert all(phase.roles[half].warps == 16 * one.num_sms * 4 for half in halves)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 1025}, "num_tokens is 1025, must be"),
        ({"sum_at": "rank"}, "sum_at is 'rank', must be token or expert"),
    ],
)
def test_what_is_no_case(settings, message):
    with pytest.raises(ValueError, match=message):
        case(**settings)

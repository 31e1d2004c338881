"""The protocol in virtual time: nothing is lost, one cost alone adds up by hand, and better machines are not slower."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ideal_machine import ideal

from megatron_ep.config import Config, Topology, Tuning
from megatron_ep.tools.simulate import Case, Machine, predict

MODES = ["normal", "low-latency"]
ROW, SLOT = 14336, 14592  # of 7168 values of bf16 with K = 8: alone, and on the wire


def case(nodes=1, ranks=2, tokens=64, experts=64, **settings):
    num_sms = settings.pop("num_sms", None)
    tuning = {each.name: settings.pop(each.name) for each in dataclasses.fields(Tuning) if each.name in settings}
    config = Config(experts, num_sms=num_sms, tuning=Tuning(**{"local_pass": False} | tuning))
    return Case(Topology(nodes, ranks), config, num_tokens=tokens, **settings)


def low_latency(nodes=2, ranks=2, tokens=16, experts=64, num_sms=4, **settings):
    config = Config(num_experts=experts, num_sms=num_sms)
    return Case(Topology(nodes, ranks), config, mode="low-latency", num_tokens=tokens, **settings)


@pytest.fixture(scope="module")
def h200():
    return Machine.load("h200_cx7")


def far_rows(one, experts):
    """Rows that leave their node: of each token one for each so many experts, those of a node, of a rank, or one."""
    of_node, rows = one.config.num_experts // one.topology.nodes // experts, 0
    for rank, ids in enumerate(one.choices()):
        goes = torch.zeros(one.num_tokens, one.config.num_experts // experts, dtype=torch.bool)
        goes.scatter_(1, ids.long() // experts, True)
        own = rank // one.topology.ranks_per_node * of_node
        rows += int(goes.sum()) - int(goes[:, own : own + of_node].sum())
    return rows


def rail_rows(one):
    """Rows that cross the network: of each token one to each other node."""
    return far_rows(one, one.config.num_experts // one.topology.nodes)


def numbers_of_images(nodes):
    return st.sampled_from([m for m in range(1, nodes + 1) if nodes % m == 0])


@pytest.mark.parametrize(
    ("nodes", "ranks", "settings"),
    [
        (2, 1, {}),
        (2, 2, {"tokens": 1}),
        (4, 2, {"topk": 1}),
        (3, 1, {"experts": 6, "topk": 6}),
        (4, 1, {"routing": "zipf:1", "local_pass": True}),
        (4, 4, {"routing": "nodes:2", "images": 2}),
    ],
)
def test_every_row_crosses_the_network_once(h200, nodes, ranks, settings):
    one = case(nodes, ranks, **settings)
    found = predict(one, h200)
    assert found.phases["dispatch"].rail_rows == rail_rows(one)
    topk = settings.get("topk", 8)
    header = SLOT - ROW if topk == 8 else None
    for phase in found.phases.values():
        slot = phase.row_bytes / phase.rail_rows
        assert slot == SLOT if header else slot % 128 == 0 and ROW < slot <= SLOT


@pytest.mark.parametrize("one", [case(2, 2, tokens=1), low_latency()], ids=MODES)
def test_a_launch_alone(one):
    found = predict(one, ideal(launch=5000))
    assert all(phase.ends == pytest.approx([5] * 4) for phase in found.phases.values())


def test_one_row_takes_the_sum_of_its_way():
    """From one rank to another over cards: each step has the row wait for the step before."""
    costs = {"card_post": 700, "card_doorbell": 1500, "card_way": 2500, "card_signal": 900, "card_turn": 1 << 20}
    one = case(2, 1, tokens=1, experts=2, topk=2, channels=1)
    us = predict(one, ideal(**costs)).phases["dispatch"].us
    assert us == pytest.approx(0.7 + 1.5 + 2.5 + 0.9 + 0.7)  # and the receiver posts a credit at the end
    us = predict(one, ideal(**costs, card=50)).phases["dispatch"].us
    slot, flag = (bytes / 50e3 for bytes in (ROW + 128, 64))
    assert us == pytest.approx(6.3 + slot + flag, abs=flag)


@pytest.mark.parametrize("name", ["link", "card"])
def test_a_saturated_link(name):
    """No more than its rows take, but for the first and the last of them."""
    nodes, ranks = (1, 2) if name == "link" else (2, 1)
    one, rate, size = case(nodes, ranks, tokens=512, experts=2, topk=1), 50.0, ROW if name == "link" else SLOT
    found = predict(one, ideal(**{name: rate}))
    for phase in found.phases.values():
        choices = [(ids // 1 != rank).sum().item() for rank, ids in enumerate(one.choices())]
        floor = max(choices) * (size if name == "link" else ROW) / rate / 1e3
        assert floor * 0.99 <= phase.us <= floor * 1.05, phase.us / floor


LINKS = {"link": 1.5, "peer_flag": 0.5, "step": 0.7}
BETTER = {"card": 1.5, "sm_store": 1.3, "card_way": 0.5, "poll": 0.7}


@pytest.mark.parametrize(
    ("one", "better", "fewer"),
    [
        *((case(*shape), BETTER | LINKS, 128) for shape in ((1, 4, 512), (2, 2, 512), (4, 2, 256))),
        (low_latency(2, 2, 64), BETTER | {"card_post": 0.5}, 8),
    ],
    ids=["1x4", "2x2", "4x2", "low-latency"],
)
def test_a_better_machine_is_not_slower(h200, one, better, fewer):
    def us(machine, of=one):
        return [phase.us for phase in predict(of, machine).phases.values()]

    before = us(h200)
    for name, factor in better.items():
        after = us(h200.with_constants(**{name: factor * h200.constants[name]}))
        assert all(b <= a * 1.02 for a, b in zip(before, after, strict=True)), name
    assert all(b < a for a, b in zip(before, us(h200, dataclasses.replace(one, num_tokens=fewer)), strict=True))


def test_more_sms_and_deeper_rings_are_not_slower(h200):
    times = [predict(case(1, 4, 1024, num_sms=sms), h200).phases for sms in (4, 8, 16)]
    for few, many in itertools.pairwise(times):
        assert all(many[name].us <= few[name].us * 1.01 for name in few)
    rings = [{"rdma_ring_bytes": rows * (16 << 10), "rdma_chunk_tokens": 1} for rows in (2, 4, 8)]
    times = [predict(case(4, 2, 512, **ring), h200).phases for ring in rings]
    for shallow, deep in itertools.pairwise(times):
        assert all(deep[name].us <= shallow[name].us * 1.02 for name in shallow)


@pytest.mark.parametrize("one", [case(2, 2, 256), low_latency(2, 2, 64)], ids=MODES)
def test_the_same_bits_twice(h200, one):
    assert predict(one, h200) == predict(one, h200)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("one", [case(2, 2, 512), low_latency(2, 2, 64)], ids=MODES)
def test_the_order_of_what_happens_at_once(h200, one, seed):
    shuffled = dataclasses.replace(one, order_seed=seed)
    for name, phase in predict(one, h200).phases.items():
        assert predict(shuffled, h200).phases[name].us == pytest.approx(phase.us, rel=0.02)


def test_images_stand_for_nodes(h200):
    """The rows of two nodes, and of one, for all eight: a different draw of the same choices."""
    all_nodes = predict(case(8, 2, 512), h200)
    for images in (1, 2, 4):
        found = predict(case(8, 2, 512, images=images), h200)
        for name, phase in all_nodes.phases.items():
            assert found.phases[name].rail_rows / images == pytest.approx(phase.rail_rows / 8, rel=0.02)
            assert found.phases[name].us == pytest.approx(phase.us, rel=0.05)


@pytest.mark.parametrize(
    ("whole", "near"),
    [(case(4, 2, 128, channels=8, rdma_chunk_tokens=16), 0.01), (low_latency(4, 2, 32), 0.02)],
    ids=MODES,
)
def test_images_of_equal_nodes_change_nothing(h200, whole, near):
    """Nodes that do the same with all nodes shifted are images of each other: then they are exact. Channels divide T,
    so that all ranks cut their tokens alike. A put has all rows of a ring: coordinators serve nodes by number, which is
    another order on each node."""
    folded = dataclasses.replace(whole, images=1)
    experts, first = whole.config.num_experts, folded.choices()
    shifted = [
        ((ids + node * experts // 4) % experts).to(torch.int32).contiguous() for node in range(4) for ids in first
    ]
    a, b = predict(whole, h200, choices=shifted), predict(folded, h200, choices=first)
    for name, phase in b.phases.items():
        assert a.phases[name].rail_rows == 4 * phase.rail_rows and a.phases[name].peer_rows == 4 * phase.peer_rows
        assert a.phases[name].row_bytes == 4 * phase.row_bytes
        assert whole.mode == "normal" or a.phases[name].messages == 4 * phase.messages
        assert a.phases[name].us == pytest.approx(phase.us, rel=near)


@pytest.mark.nightly
def test_rings_are_deep_enough_for_either_order_of_a_card(h200):
    """First come, first served the puts of one source follow each other, and rings have to hold its rows meanwhile.
    Two of the nodes for all eight: with all of them it takes a minute, and combine takes 1.07 times as long."""
    one = Case(Topology(8, 8), Config(256), num_tokens=2048, images=2)
    in_turns, first_come = (predict(one, h200.with_constants(card_turn=turn)).phases for turn in (16384, 0))
    assert first_come["combine"].us != in_turns["combine"].us
    for name, phase in first_come.items():
        assert phase.us <= 1.15 * in_turns[name].us, name


@given(
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 4),
    tokens=st.integers(1, 40),
    hidden=st.integers(1, 300).map(lambda value: 8 * value),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_ends_and_moves_its_rows(h200, nodes, ranks, tokens, hidden, data):
    experts = nodes * ranks * data.draw(st.integers(1, 4), "experts of a rank")
    maps_rail = data.draw(st.booleans(), "maps_rail")
    one = case(
        nodes,
        ranks,
        tokens,
        experts,
        hidden=hidden,
        topk=data.draw(st.integers(1, min(32, experts)), "K"),
        dtype=data.draw(st.sampled_from(["bf16", "fp8"]), "dtype"),
        images=nodes if maps_rail else data.draw(numbers_of_images(nodes), "M"),
        maps_rail=maps_rail,
        local_pass=data.draw(st.booleans(), "local_pass"),
        num_sms=data.draw(st.sampled_from([4, 24, 100]), "SMs"),
    )
    found = predict(one, h200)
    for phase in found.phases.values():
        assert phase.rail_rows == rail_rows(one)
        assert (phase.row_bytes > 0) == (one.uses_network and phase.rail_rows > 0)


@given(
    nodes=st.integers(1, 4),
    ranks=st.integers(1, 3),
    tokens=st.integers(1, 40),
    hidden=st.integers(1, 300).map(lambda value: 8 * value),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_every_row_of_few_tokens_comes_once(h200, nodes, ranks, tokens, hidden, data):
    world = nodes * ranks
    experts = world * data.draw(st.integers(1, 40), "L")
    maps_rail = data.draw(st.booleans(), "maps_rail")
    one = low_latency(
        nodes,
        ranks,
        tokens,
        experts,
        hidden=hidden,
        topk=data.draw(st.integers(1, min(8, experts)), "K"),
        dtype=data.draw(st.sampled_from(["bf16", "fp8"]), "dtype"),
        sum_at=data.draw(st.sampled_from(["token", "expert"]), "sum_at"),
        maps_rail=maps_rail,
        images=None if maps_rail else data.draw(numbers_of_images(nodes)),
    )
    found = predict(one, h200)
    for name, phase in found.phases.items():
        rows = far_rows(one, 1 if name == "combine" and one.sum_at == "token" else experts // world)
        assert phase.rail_rows + phase.peer_rows >= rows
        assert phase.rail_rows == (rows if one.uses_network else 0)
        slot = one.row_format(*one.row_bytes if name == "dispatch" else (one.combine_bytes, 0)).slot_bytes
        if name == "combine" or not one.uses_network:
            assert phase.row_bytes == phase.rail_rows * slot
        else:
            assert phase.row_bytes > phase.rail_rows * slot  # and choices


def test_one_row_of_few_takes_the_sum_of_its_way():
    """A token that goes to the other node: its choices, then its row and a signal, follow each other on the card."""
    costs = {"card_doorbell": 1500, "card_way": 2500, "card_signal": 900, "card_turn": 1 << 20}
    one = low_latency(2, 1, tokens=1, experts=2, topk=1, num_sms=1)
    there = [torch.ones(1, 1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)]
    for phase in predict(one, ideal(**costs), choices=there).phases.values():
        assert phase.us == pytest.approx(1.5 + 2.5 + 0.9)
    us = predict(one, ideal(**costs, card=0.1), choices=there).phases["combine"].us
    slot, flag = one.row_format(one.combine_bytes, 0).slot_bytes / 100, 0.64
    assert us == pytest.approx(4.9 + slot + flag)


def test_what_each_half_did(h200):
    one = low_latency()
    found = predict(one, h200)
    for name, phase in found.phases.items():
        halves = [role for role in phase.roles if role.startswith("low_latency")]
        assert len(halves) == 2 and all(("combine" in half) == (name == "combine") for half in halves)
        assert all(phase.roles[half].warps == 16 * one.num_sms * 4 for half in halves)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"topk": 65}, "topk is 65"),
        ({"images": 3, "nodes": 4}, "images is 3, must divide the 4 nodes"),
        (
            {"images": 1, "nodes": 2, "maps_rail": True},
            "images is 1, must be None where nodes reach each other's memory",
        ),
        ({"dtype": "fp4"}, "dtype is 'fp4', must be bf16 or fp8"),
        ({"routing": "zipf"}, "routing is 'zipf', must be uniform, zipf:S"),
        ({"routing": "nodes:9", "nodes": 4}, "M of routing nodes:M is 9"),
        ({"hidden": 12}, "hidden is 12, must be a multiple of 8"),
        ({"tokens": 0}, "num_tokens is 0"),
        ({"tokens": 1025, "sum_at": "token"}, "num_tokens is 1025, must be"),
        ({"sum_at": "rank"}, "sum_at is 'rank', must be token or expert"),
    ],
)
def test_what_is_no_case(settings, message):
    make = low_latency if "sum_at" in settings else case
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_too_few_sms_are_refused(h200):
    with pytest.raises(ValueError, match="num_sms is 1, too few for 64 channels"):
        predict(case(1, 2, num_sms=1, channels=64), h200)


def test_nodes_need_a_network_card():
    with pytest.raises(ValueError, match="machine is h200_nvlink, which has no network card"):
        predict(case(2, 1), Machine.load("h200_nvlink"))

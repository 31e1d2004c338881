"""Attention's rows by a plan in virtual time: all of them move, a saturated link alone adds up by hand, and what was
measured is predicted."""

import pytest
from ideal_machine import ideal
from sequence_case import draw_documents

from megatron_ep.config import Topology
from megatron_ep.sequences.plan import SequencePlan, Shard
from megatron_ep.sequences.planner import RowBytes, balance, cut_evenly
from megatron_ep.tools.simulate import Machine
from megatron_ep.tools.simulate.sequences import K_AND_V, K_GRADIENT, OUT, WAYS, Q, predict_ways, times_of

ROWS = RowBytes(q=64 * 128 * 2, kv=2 * 8 * 128 * 2, out=64 * 128 * 2)
LENGTHS = [700, 20, 300, 64, 1000, 5, 90, 500]


@pytest.fixture(scope="module")
def h200():
    return Machine.load("h200_cx7")


def plan_of(world, lengths=LENGTHS):
    return SequencePlan.build(balance(cut_evenly(lengths, world), world, block=16, row_bytes=ROWS), world)


def crossings(moves, ranks_per_node):
    """Rows that come to another rank, and rows that cross the network: of a row one to each other node."""
    peers, rails = 0, set()
    for source, first, length, rank in zip(
        moves.src_rank.tolist(), moves.src_row.tolist(), moves.length.tolist(), moves.dst_rank.tolist(), strict=True
    ):
        peers += length * (rank != source)
        node = rank // ranks_per_node
        if node != source // ranks_per_node:
            rails.update((source, row, node) for row in range(first, first + length))
    return peers, len(rails)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_every_row_moves(h200, nodes, ranks):
    plan = plan_of(nodes * ranks)
    found = predict_ways(plan, Topology(nodes, ranks), h200, row_bytes=ROWS, num_sms=8)
    assert tuple(found) == WAYS
    expected = {Q: crossings(plan.q_moves(), ranks), K_AND_V: crossings(plan.kv_moves(), ranks)}
    expected |= {OUT: expected[Q], K_GRADIENT: expected[K_AND_V]}
    assert {way: (phase.peer_rows, phase.rail_rows) for way, phase in found.items()} == expected
    assert all(not phase.is_calibrated and min(phase.ends) > 0 for phase in found.values())


def test_more_copies_than_a_token_has_destinations(h200):
    """A document of 40 ranks, whose first rows all of them need."""
    world = 40
    plan = SequencePlan.build([Shard(0, i, i, i, 4) for i in range(world)], world)
    found = predict_ways(plan, Topology(1, world), h200, row_bytes=ROWS, num_sms=16)
    assert found[K_AND_V].peer_rows == 4 * world * (world - 1) // 2
    assert found[Q].peer_rows == found[OUT].peer_rows == 0


def test_a_saturated_link():
    """No more than its rows take, but for the first and the last of them."""
    shards = [Shard(0, 0, 0, 1, 4096), Shard(1, 0, 1, 1, 64)]  # rank 1 computes all
    found = predict_ways(SequencePlan.build(shards, 2), Topology(1, 2), ideal(link=50.0), row_bytes=ROWS, num_sms=66)
    for way, size in ((Q, ROWS.q), (K_AND_V, ROWS.kv), (OUT, ROWS.out), (K_GRADIENT, ROWS.kv // 2)):
        floor = 4096 * size / 50e3
        assert floor * 0.99 <= found[way].us <= floor * 1.05, way


def test_what_two_gpus_took():
    """`tests/bench/run.py sequences`, two H100, 64 SMs (tests/gpu/RESULTS.md). No constant was fitted to it."""
    documents = draw_documents(1 << 16, 1 << 10, 1 << 16, 2, seed=0)
    at_home, document = [], 0
    for rank, lengths in enumerate(documents):
        for length in lengths:
            at_home.append(Shard(document, 0, rank, rank, length))
            document += 1
    plan = SequencePlan.build(balance(at_home, 2, row_bytes=ROWS), 2)
    found = predict_ways(plan, Topology(1, 2), Machine.load("h200_nvlink"), row_bytes=ROWS, num_sms=64)
    ms = times_of(found)
    assert ms[Q] + ms[K_AND_V] == pytest.approx(1.74, rel=0.15)
    assert ms[OUT] == pytest.approx(0.87, rel=0.15)
    assert ms["there and back"] == pytest.approx(2.61, rel=0.1)
    assert ms["with gradients"] == pytest.approx(5.43, rel=0.1)


def test_predictions_have_not_moved(h200):
    found = predict_ways(plan_of(4), Topology(2, 2), h200, row_bytes=ROWS, num_sms=16)
    assert [phase.us for phase in found.values()] == pytest.approx([191.9, 122.0, 171.1, 150.3], rel=0.05)
    again = predict_ways(plan_of(4), Topology(2, 2), h200, row_bytes=ROWS, num_sms=16)
    assert again == found


def test_wrong_arguments(h200):
    plan = plan_of(2)
    with pytest.raises(ValueError, match="plan is for 2 ranks, must be for the 4"):
        predict_ways(plan, Topology(2, 2), h200, row_bytes=ROWS, num_sms=8)
    with pytest.raises(ValueError, match="no network card, but the topology has 2 nodes"):
        predict_ways(plan, Topology(2, 1), Machine.load("h200_nvlink"), row_bytes=ROWS, num_sms=8)
    with pytest.raises(ValueError, match="must be even"):
        predict_ways(plan, Topology(1, 2), h200, row_bytes=RowBytes(q=256, kv=255, out=256), num_sms=8)

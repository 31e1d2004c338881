"""How many rows a put has by itself: few enough for calls of 4096 tokens, many enough for a card that is slow with
messages."""

import pytest

from megatron_ep.config import Config, Topology, Tuning
from megatron_ep.tools.simulate import Case, Machine, predict

pytestmark = pytest.mark.nightly


def both_ways(nodes, chunk, **card):
    config = Config(num_experts=256, num_sms=24, tuning=Tuning(rdma_chunk_tokens=chunk))
    found = predict(Case(Topology(nodes, 8), config, images=1), Machine.load("h200_cx7").with_constants(**card))
    return sum(phase.us for phase in found.phases.values())


def test_larger_puts_are_slower_between_two_nodes():
    assert both_ways(2, Tuning.rdma_chunk_tokens) < 0.9 * both_ways(2, 2 * Tuning.rdma_chunk_tokens)


@pytest.mark.parametrize("turn", [0, 16384])
def test_puts_are_large_enough_where_a_message_costs_much(turn):
    """At the far end of what is guessed of a card."""
    card = {"card_message": 60, "card_turn": turn}
    default = both_ways(8, Tuning.rdma_chunk_tokens, **card)
    assert default < 0.98 * both_ways(8, Tuning.rdma_chunk_tokens // 2, **card)
    assert default < 1.01 * both_ways(8, 2 * Tuning.rdma_chunk_tokens, **card)

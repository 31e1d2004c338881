"""What a buffer takes by itself: SMs, fewer where many nodes wait for the network card, and rows of a put, few enough
for calls of 4096 tokens, many enough for a card that is slow with messages."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ep.buffer import sizes
from megatron_ep.config import Config, Topology, Tuning
from megatron_ep.fabrics import gpu
from megatron_ep.tools.simulate import Case, Machine, predict

AS_GOOD, DEFAULT_PUT = 1.03, Tuning.rdma_chunk_tokens


def both_ways(nodes, card=None, **settings):
    """us, by constants whose network card nobody has measured. card: others of these."""
    case = Case(Topology(nodes, 8), Config(num_experts=256, **settings), images=1)
    found = predict(case, Machine.load("h200_cx7").with_constants(**(card or {})))
    return sum(phase.us for phase in found.phases.values())


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [8, 32])
def test_more_sms_are_hardly_faster(nodes):
    """Of 8 to 24 SMs 24 are the fastest."""
    sms = sizes.default_sms(Topology(nodes, 8))
    assert sms < sizes.DEFAULT_SMS
    assert both_ways(nodes, num_sms=sms) <= AS_GOOD * both_ways(nodes, num_sms=sizes.DEFAULT_SMS)


def with_puts_of(chunk, nodes, card=None):
    return both_ways(nodes, card, num_sms=24, tuning=Tuning(rdma_chunk_tokens=chunk))


@pytest.mark.nightly
def test_larger_puts_are_slower_between_two_nodes():
    assert with_puts_of(DEFAULT_PUT, 2) < 0.9 * with_puts_of(2 * DEFAULT_PUT, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("turn", [0, 16384])
def test_puts_are_large_enough_where_a_message_costs_much(turn):
    """At the far end of what is guessed of a card."""
    card = {"card_message": 60, "card_turn": turn}
    default = with_puts_of(DEFAULT_PUT, 8, card)
    assert default < 0.98 * with_puts_of(DEFAULT_PUT // 2, 8, card)
    assert default < 1.01 * with_puts_of(2 * DEFAULT_PUT, 8, card)


@pytest.mark.parametrize(("nodes", "sms"), [(1, 24), (2, 24), (7, 24), (8, 16), (256, 16)])
def test_the_number_goes_with_the_nodes(monkeypatch, nodes, sms):
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    topology, config, device = Topology(nodes, 8), Config(num_experts=8 * nodes), torch.device("cuda", 0)
    assert gpu.num_sms(config, device, 1, sizes.default_sms(topology)) == sizes.default_sms(topology) == sms
    assert Case(topology, config, topk=8, images=1).num_sms == sms
    assert gpu.num_sms(config, device, 12, sizes.default_sms(topology)) == 11  # a share of the GPU
    assert gpu.num_sms(Config(num_experts=8 * nodes, num_sms=5), device, 1, 64) == 5


def test_the_low_latency_mode_keeps_its_own(monkeypatch):
    h200 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    config = Config(num_experts=256)
    assert gpu.num_sms(config, torch.device("cuda", 0), 1) == sizes.DEFAULT_SMS
    case = Case(Topology(32, 8), config, mode="low-latency", num_tokens=8, images=1)
    assert case.num_sms == sizes.DEFAULT_SMS
    in_a_node = Case(Topology(1, 8), config, mode="low-latency", num_tokens=8)
    assert in_a_node.num_sms == sizes.LINES_SMS

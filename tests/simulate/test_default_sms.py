"""How many SMs a buffer takes by itself: where many nodes wait for the network card, fewer."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ep.buffer import sizes
from megatron_ep.config import Config, Topology
from megatron_ep.fabrics import gpu
from megatron_ep.tools.simulate import Case, Machine, predict

AS_GOOD = 1.03


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [8, 32])
def test_more_sms_are_hardly_faster(nodes):
    """Of 8 to 24 SMs 24 are the fastest by these constants, whose network card nobody has measured."""
    topology, machine = Topology(nodes, 8), Machine.load("h200_cx7")
    sms = sizes.default_sms(topology)
    assert sms < sizes.DEFAULT_SMS

    def both_ways(sms):
        case = Case(topology, Config(num_experts=256, num_sms=sms), images=1)
        return sum(phase.us for phase in predict(case, machine).phases.values())

    assert both_ways(sms) <= AS_GOOD * both_ways(sizes.DEFAULT_SMS)


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

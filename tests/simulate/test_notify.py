"""The exchange of counts with many nodes, in virtual time: how it grows, and that it gets everybody's counts."""

import pytest

from megatron_ep import _simulate
from megatron_ep.config import Config, Topology
from megatron_ep.tools.arguments import default_experts
from megatron_ep.tools.simulate import Case, Machine

MOST_US = 300


def notify(case):
    """It alone, on constants whose network card nobody has measured."""
    ids = case.choices()
    machine = Machine.load("h200_cx7").compiled()
    mode = _simulate.Transfers(machine, topk_idx=[each.data_ptr() for each in ids], settings=case.compiled_settings())
    found = mode.notify(lambda *_: None)
    return max(found["ends"]) / 1e3, mode


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [64, 128, 256])
def test_many_nodes_take_a_fraction_of_a_dispatch(nodes):
    topology = Topology(nodes, 8)
    us, _ = notify(Case(topology, Config(num_experts=default_experts(topology)), images=1))
    assert us <= MOST_US


def test_few_sms_are_enough():
    topology = Topology(64, 8)
    us, _ = notify(Case(topology, Config(num_experts=512, num_sms=8), images=1))
    assert us <= MOST_US


@pytest.mark.parametrize(("nodes", "ranks"), [(31, 2), (32, 1), (33, 2), (65, 1)])
def test_all_groups_of_nodes_are_relayed(nodes, ranks):
    """All rows of all ranks are announced, those of the last node of a group, too."""
    topology = Topology(nodes, ranks)
    case = Case(topology, Config(num_experts=topology.world_size), num_tokens=16, topk=4)
    _, mode = notify(case)
    node_of = [(ids.long() // ranks).tolist() for ids in case.choices()]
    others = sum(len({*row} - {rank // ranks}) for rank, rows in enumerate(node_of) for row in rows)
    assert mode.rail_rows == others > 0
    assert mode.peer_rows == sum((ids != rank).sum().item() for rank, ids in enumerate(case.choices()))

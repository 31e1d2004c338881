"""Whether rows of the low-latency mode are lines between GPUs, of which here are none."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import megatron_ep as ep
from megatron_ep.buffer import low_latency
from megatron_ep.fabrics import gpu
from megatron_ep.fabrics.connection import Connection, LowLatencyConnection
from megatron_ep.normal.one_hop import row_format


class Launches:
    warps = 16


class Group(SimpleNamespace):
    """One rank of two, each with a process and a GPU."""

    ranks = (0,)
    topology = ep.Topology(1, 2)
    device = torch.device("cpu")
    config = ep.Config(num_experts=4, timeout=10)

    network_memory = None

    def live_backend(self):
        connection = Connection(Launches(), network_memory=self.network_memory)
        return SimpleNamespace(group=Launches(), connection=connection, attach=lambda ranks: None)

    def open_on_network(self, tolerates_loss):
        assert not tolerates_loss

    def keeps_lines(self):
        self.times_asked += 1
        return self.nvlink

    def low_latency_connection(self, heap, blocks):
        return LowLatencyConnection(Launches(), [heap.bytes, heap.bytes])


def connected(group, mask_timeout):
    with mock.patch.object(gpu, "num_sms", lambda *_: 1):
        return low_latency.LowLatencyRanks(group, 8, row_format(2, 512, torch.bfloat16, None), mask_timeout).heap


def test_lines_take_links_that_all_ranks_know():
    asked = Group(nvlink=True, times_asked=0)
    by_lines = connected(asked, None)
    by_flags = connected(Group(nvlink=False, times_asked=0), None)
    assert asked.times_asked == 1 and by_lines.bytes != by_flags.bytes


@pytest.mark.parametrize("nvlink", [False, True])
def test_a_rank_that_comes_back_asks_nobody(nvlink):
    """The others take part in what maps its memory, and in nothing else."""
    group = Group(nvlink=nvlink, times_asked=0)
    connected(group, 1.0)
    assert group.times_asked == 0


LIBRARY = "memory of a library"


@pytest.mark.parametrize("nvlink", [False, True])
@pytest.mark.parametrize(
    ("nodes", "network_memory", "sms", "row_bytes", "most"),
    [
        (1, None, 5, None, 40),
        (1, None, 99, None, 128),
        (1, LIBRARY, 5, None, 40),
        (2, None, 5, None, 40),
        (2, LIBRARY, 5, None, 32),
        (2, LIBRARY, 5, 4096, 112),
    ],
)
def test_one_hop_is_for_as_few_tokens_as_it_is_faster_for(nodes, network_memory, sms, row_bytes, most, nvlink):
    topology = ep.Topology(nodes, 2)
    config = ep.Config(num_experts=4, timeout=10, max_tokens=128, row_bytes=row_bytes)
    group = Group(nvlink=nvlink, times_asked=0, topology=topology, config=config, network_memory=network_memory)
    with mock.patch.object(gpu, "num_sms", lambda *_: sms):
        assert low_latency.connect_one_hop(group).max_tokens == most

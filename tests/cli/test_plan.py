"""`megatron-ep env --plan`: figures of real buffers, which stay within bounds where there are many nodes."""

from pathlib import Path

import pytest
import torch

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep import config as limits
from megatron_ep.buffer import sizes
from megatron_ep.cli import env
from megatron_ep.cli.main import main
from megatron_ep.cli.plan import make_plan
from megatron_ep.config import Config, Topology, Tuning


def gpu_heap(nodes: int, ranks: int, **settings) -> _C.Heap:
    world = nodes * ranks
    return sizes.gpu_heap(Topology(nodes, ranks), Config(num_experts=-(-256 // world) * world, **settings), 24)


@pytest.mark.parametrize(
    ("nodes", "most"), [(1, 100e6), (2, 200e6), (8, 300e6), (32, 500e6), (64, 1e9), (128, 2e9), (256, 2e9)]
)
def test_memory_where_there_are_many_nodes(nodes, most):
    heap = gpu_heap(nodes, 8)
    assert heap.bytes <= most
    assert sum(heap.parts.values()) == heap.bytes


@pytest.mark.parametrize("hidden", [512, 2048, 7168, 8192, 16384, 20000])
@pytest.mark.parametrize("nodes", [1, 2, 32])
def test_rings_are_sized_in_rows(nodes, hidden):
    heap = gpu_heap(nodes, 8, row_bytes=2 * hidden)
    for topk, weight_bytes in ((1, 0), (8, 4), (32, 8)):
        row = _C.RowFormat(
            payload_bytes=2 * hidden, scale_bytes=0, weight_bytes=weight_bytes, topk=topk, payload_type=0
        )
        assert row.slots(heap.nvl_ring_bytes) >= 4
        assert row.slots(heap.rdma_ring_bytes) >= 8


def test_there_is_no_ring_for_the_own_node():
    heap = gpu_heap(4, 2, tuning=Tuning(channels=3, rdma_ring_bytes=1024))
    assert heap.parts["network rings, to send"] == heap.parts["network rings, to receive"] == 3 * 3 * 1024
    assert gpu_heap(1, 8).parts["network rings, to send"] == 0


def test_what_is_allocated(monkeypatch):
    """On the host every rank takes what its heap says, and no more."""
    allocated = []
    anonymous = _C.Segment.anonymous
    monkeypatch.setattr(_C.Segment, "anonymous", lambda size: allocated.append(size) or anonymous(size))
    topology, config = Topology(2, 2), Config(num_experts=4, row_bytes=1 << 20, tuning=Tuning(channels=3))
    with ep.LocalCluster(2, 2, config) as cluster:
        received = ep.dispatch(
            [torch.ones(5, 8)] * 4, [torch.tensor([[0], [1], [2], [3], [0]])] * 4, buffer=cluster, max_recv_tokens=9
        )
        [layout_size] = {len(rank.layout) for rank in received.handle.ranks}
    heap = sizes.host_heap(topology, config)
    assert allocated == [heap.bytes] * 4
    assert layout_size == heap.layout(5, 1)["size"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_allocated_on_a_gpu():
    config = Config(num_experts=8, num_sms=8)
    with ep.LocalCluster(2, 2, config, device="cuda") as cluster:
        assert cluster._group.heap.bytes == sizes.gpu_heap(Topology(2, 2), config, 8, local_ranks=4).bytes


def test_a_plan(capsys):
    assert env.main(["--plan", "32", "8"]) == 0
    text = capsys.readouterr().out
    topology = Topology(32, 8)
    sms = sizes.default_sms(topology)
    heap = sizes.gpu_heap(topology, Config(num_experts=256, row_bytes=14336), sms)
    for part in (
        "32 x 8 ranks, 256 experts, H = 7168 bf16:",
        f"SMs              {sms}",
        f"channels         {heap.channels}",
        "6 senders of 6 nodes, 6 forwarders of 6 nodes",
        f"{heap.channels * 256} of 4 rows",
        f"{heap.channels * 31} of 16 rows",
        f"{256 * min(heap.channels, sms)}",
        f"{heap.bytes / 1e6:.1f} MB",
        f"{4 * heap.layout(4096, 8)['size'] / 1e6:.1f} MB",
    ):
        assert part in text
    assert env.main(["--plan", "1", "8", "--hidden", "20000"]) == 0
    assert "1024 of 4 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("between_nodes", "receivers"), [(None, "2 receivers, 3 senders"), (2 * 16384, "1 receiver, 4 senders")]
)
def test_receivers_of_combine_have_room_in_the_smallest_ring(between_nodes, receivers):
    config = Config(num_experts=256, tuning=Tuning(rdma_ring_bytes=between_nodes))  # inside a node rings of 4 rows
    plan = make_plan(Topology(2, 8), config, hidden=7168, topk=8, num_tokens=4096)
    [facts] = [facts for facts in plan.values() if "warps, combine" in facts]
    assert receivers in facts["warps, combine"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["0", "8"], "Topology.nodes"),
        (["2", "8", "--experts", "3"], "Config.num_experts"),
        (["2", "8", "--hidden", "0"], "hidden"),
        (["2", "8", "--topk", "33"], "topk"),
        (["32", "8", "--num-sms", "1", "--channels", "16"], "num_sms"),
        (["1", "73"], "RANKS (of a node) is 73, must be an int in [1, 72]"),
    ],
)
def test_what_a_buffer_would_refuse(arguments, name, capsys):
    assert main(["env", "--plan", *arguments]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "limit"),
    [
        ("topology.h", f"kMaxNodeRanks = {limits.MAX_NODE_RANKS};"),
        ("row.h", f"kMaxTopk = {limits.MAX_TOPK};"),
        ("low_latency_heap.h", f"int max_tokens;  // per rank, at most {limits.MAX_LOW_LATENCY_TOKENS}:"),
    ],
)
def test_limits_are_what_the_kernels_take(header, limit):
    assert limit in (Path(__file__).parents[2] / "csrc/core" / header).read_text()


def test_tokens_that_pass_through_take_no_memory_for_all_of_them():
    plan = make_plan(Topology(256, 8), Config(num_experts=2048), hidden=7168, topk=8, num_tokens=4096)
    [memory] = [facts for title, facts in plan.items() if title.startswith("memory of a handle")]
    assert float(memory["handle"].split()[0]) < 50

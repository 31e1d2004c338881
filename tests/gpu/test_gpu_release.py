"""Buffer.release by the GPU's own figures: between processes that share one GPU through CUDA IPC, and, where there are
several, over each fabric."""

import gc

import pytest
import torch
import torch.distributed as dist
from modes import GPU, Normal
from run_on import run_on
from test_gpu_fabrics import run_over

import megatron_ep as ep
from megatron_ep.fabrics import choice

W = 4
HIDDEN, TOPK, MAX = 2048, 3, 64


def make_low_latency(buffer):
    return ep.LowLatency(buffer, max_tokens=MAX, hidden=HIDDEN, topk=TOPK)


def use_low_latency(low_latency):
    generator = torch.Generator().manual_seed(low_latency.buffer.rank)
    ids = torch.rand(MAX, 8, generator=generator).topk(TOPK, dim=1).indices.cuda()
    x = torch.randint(-8, 9, (MAX, HIDDEN), generator=generator).bfloat16().cuda()
    received = low_latency.dispatch(x, ids)
    assert torch.equal(low_latency.combine(received.x, received.handle), TOPK * x)


def used_bytes() -> int:
    """Of the GPU, by all processes, while all ranks look."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    free, total = torch.cuda.mem_get_info()
    dist.barrier()
    return total - free


def make_use_release(nodes: int) -> tuple[int, object]:
    """Bytes that the ranks' GPU had more while the buffer lived, and what was made on it."""
    before = used_bytes()
    calls = Normal(GPU, nodes, 10.0)
    low_latency, dropped = make_low_latency(calls.buffer), make_low_latency(calls.buffer)
    calls.round_trips()
    use_low_latency(low_latency)
    use_low_latency(dropped)
    del dropped
    during = used_bytes() - before
    calls.buffer.release()
    return during, low_latency


def run_twenty(nodes: int) -> tuple[int, int, int]:
    used, kept = [], []
    for _ in range(20):
        during, low_latency = make_use_release(nodes)
        kept.append(low_latency)  # to keep it keeps none of its memory
        used.append(used_bytes())
    heaps = 3 * W * low_latency.memory_bytes
    assert during > heaps // 2
    return used[1], used[-1], during


@pytest.mark.parametrize("nodes", [1, 2])
def test_twenty_buffers_leave_nothing(ranks, nodes, gpu_alone):
    for early, late, during in ranks.run(run_twenty, nodes):
        assert late - early < 1 << 20, (early, late)
        assert during > 1 << 20


@run_on("ranks")
def test_two_engines_take_turns() -> None:
    """Two engines take turns; a captured graph must be gone before."""
    buffer = Normal(GPU, 1, 10.0).buffer
    low_latency = make_low_latency(buffer)
    use_low_latency(low_latency)
    x = torch.ones(MAX, HIDDEN, dtype=torch.bfloat16, device="cuda")
    ids = torch.arange(TOPK, device="cuda").repeat(MAX, 1)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        received = low_latency.dispatch(x, ids)
        y = low_latency.combine(received.x, received.handle)
    dist.barrier()
    graph.replay()
    buffer.synchronize()
    assert torch.equal(y, TOPK * x)
    if buffer.rank != 1:
        graph.reset()
    with pytest.raises(ValueError, match="rank 1 cannot release the buffer: 1 CUDA graphs may replay"):
        buffer.release()
    use_low_latency(low_latency)
    if buffer.rank == 1:
        graph.reset()
    buffer.release()
    with pytest.raises(ValueError, match="buffer is closed"):
        low_latency.dispatch(x, ids)
    other = Normal(GPU, 2, 10.0)
    with other.buffer:
        other.round_trips()


def run_closed_before() -> tuple[int, int, int]:
    """What a closed buffer has left goes with the next one of these ranks."""
    for nodes in (1, 2):
        make_use_release(nodes)
    before = used_bytes()
    with Normal(GPU, 1, 10.0).buffer as buffer:
        low_latency = make_low_latency(buffer)
        use_low_latency(low_latency)
    del buffer, low_latency
    closed = used_bytes()
    make_use_release(2)
    return before, closed, used_bytes()


def test_what_closed_buffers_left_goes_too(ranks, gpu_alone):
    for before, closed, after in ranks.run(run_closed_before):
        assert closed - before > 1 << 20 > after - before, (before, closed, after)


def run_over_fabric(nodes: int) -> None:
    used = []
    for _ in range(8):
        make_use_release(nodes)
        used.append(used_bytes())
    assert used[-1] - used[1] < 1 << 20, used


@pytest.mark.parametrize("fabric", ["p2p", *choice.NETWORKS])
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 1)])
def test_a_released_buffer_leaves_nothing_over(fabric, nodes, ranks_per_node, gpu_alone):
    run_over(fabric, nodes * ranks_per_node, 240, run_over_fabric, nodes)

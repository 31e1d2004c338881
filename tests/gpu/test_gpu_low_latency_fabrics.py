"""The low-latency mode over each fabric between the GPUs of one machine, a process for each."""

import time

import pytest
import torch
import torch.distributed as dist
from cases import summed_on_gpus
from test_gpu_fabrics import CASES, choose, need, run_or_skip
from test_gpu_processes import make_buffer, round_trips

import megatron_ep as ep
from megatron_ep.fabrics import choice
from megatron_ep.tools.local_ranks import LocalRanks

E, TOPK, MAX = 8, 3, 70
TOKENS = (33, MAX, 0, 5)
# Rows of several chunks of the copy engine, and rows that it does not copy.
ROWS = summed_on_gpus((7168, torch.bfloat16), (520, torch.float32), (65, torch.float64))


def inputs(seed, world, hidden, dtype):
    """x, ids and weights of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [TOKENS[(rank + seed) % len(TOKENS)] for rank in range(world)]
    ids = [torch.rand(t, E, generator=generator).topk(TOPK, dim=1).indices for t in tokens]
    for idx in ids:
        idx[torch.rand(idx.shape, generator=generator) < 0.1] = -1
    x = [torch.randn(t, hidden, generator=generator).to(dtype) for t in tokens]
    return x, ids, [torch.rand(t, TOPK, generator=generator).to(wide(dtype)) for t in tokens]


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def mode_of(buffer, hidden, dtype, **options):
    return ep.LowLatency(buffer, max_tokens=MAX, hidden=hidden, topk=TOPK, dtype=dtype, **options)


def results(mode, x, ids, weights, layout, fp8):
    """Of a dispatch and of all forms of combine, a list each with a tensor a rank; of rows those that hold a token."""

    def listed(tensors):
        return tensors if isinstance(tensors, list) else [tensors]

    received = mode.dispatch(x, ids, weights, layout=layout, fp8=fp8)
    handle = received.handle
    kept = [handle.is_row(part) for part in handle.ranks]

    def rows(tensors):
        ends = 2 if handle.masked else 1
        flat = [t.flatten(0, ends - 1) for t in listed(tensors)]
        flat = [t.view(torch.uint8) if t.itemsize == 1 else t for t in flat]  # torch does not index all kinds of fp8
        return [t[keep] for t, keep in zip(flat, kept, strict=True)]

    yield rows(received.x)
    yield rows(received.probs)
    yield listed(received.recv_counts)
    if fp8:
        yield rows(received.scales)
        return
    yield listed(mode.combine(received.x, handle))
    yield listed(mode.combine(received.x, handle, sum_at="expert"))
    yield listed(mode.combine(received.x, handle, weights))


def run_same_bits(fabric, nodes):
    """All that arrives and comes back, beside calls of the normal mode. Returns why the fabric refused these ranks."""
    world = choose(fabric)
    try:
        buffer = make_buffer(nodes, 30.0, world)
    except ep.EPError as error:
        return str(error)
    mine = buffer.rank
    with buffer, ep.LocalCluster(nodes, world // nodes, ep.Config(num_experts=E)) as host:
        modes = {row: (mode_of(buffer, *row), mode_of(host, *row)) for row in ROWS}
        for seed in range(6):
            for (hidden, dtype), (ours, theirs) in modes.items():
                all_ranks = inputs(seed, world, hidden, dtype)
                own = [part[mine].cuda() for part in all_ranks]
                for fp8 in (None, "pow2") if dtype == torch.bfloat16 else (None,):
                    settings = (("masked", "grouped")[seed % 2], fp8)
                    here = results(ours, *own, *settings)
                    there = results(theirs, *all_ranks, *settings)
                    for a, b in zip(here, there, strict=True):
                        same = torch.equal(a[0].cpu().view(torch.uint8), b[mine].contiguous().view(torch.uint8))
                        assert same, (seed, hidden, dtype, settings)
            if seed % 3 == 1:
                round_trips(buffer)
            if seed == 3:
                buffer.reset()
        buffer.synchronize()
    return None


@pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), CASES)
def test_same_bits_as_on_the_host(fabric, nodes, ranks_per_node):
    run_or_skip(run_same_bits, fabric, nodes, ranks_per_node, 120)


def run_in_flight(fabric, nodes):
    """Two calls of a kind under way, received in any order, eagerly and in a graph that is replayed with other rows.

    Returns why the fabric refused these ranks."""
    world = choose(fabric)
    try:
        buffer = make_buffer(nodes, 30.0, world)
    except ep.EPError as error:
        return str(error)
    with buffer:
        mode, mine = mode_of(buffer, 520, torch.float32), buffer.rank
        batches = [inputs(seed, world, 520, torch.float32) for seed in range(2)]
        xs = [batch[0][mine].round().cuda() for batch in batches]
        ids = [batch[1][mine].cuda() for batch in batches]

        def step():
            received = [mode.dispatch(x, idx, return_recv_hook=True) for x, idx in zip(xs, ids, strict=True)]
            for _, hook in reversed(received):
                hook()
            back = [mode.combine(part.x, part.handle, return_recv_hook=True) for part, _ in received]
            for _, hook in back:
                hook()
            return [y for y, _ in back]

        def check(sums):
            for y, x, idx in zip(sums, xs, ids, strict=True):
                assert torch.equal(y, (idx >= 0).sum(dim=1, keepdim=True) * x)

        with torch.no_grad():
            for _ in range(3):
                check(step())
            graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            buffer.synchronize()
            with torch.cuda.graph(graph, stream=side):
                sums = step()
            for replay in range(4):
                for x in xs:
                    x.add_(replay)
                graph.replay()
                torch.cuda.synchronize()
                check(sums)
                if replay == 1:
                    check(step())
                    buffer.synchronize()
        buffer.raise_if_failed()
    return None


@pytest.mark.parametrize(("fabric", "nodes", "ranks_per_node"), [case for case in CASES if case[0] != "p2p"])
def test_two_calls_under_way(fabric, nodes, ranks_per_node):
    run_or_skip(run_in_flight, fabric, nodes, ranks_per_node, 120)


def whole_trip(mode, active):
    """A dispatch and its combine, without the choices of ranks that are not active."""
    world, mine = mode.buffer.topology.world_size, mode.buffer.rank
    x, ids, _ = (part[mine].cuda() for part in inputs(1, world, 520, torch.float32))
    received = mode.dispatch(x, ids)
    y = mode.combine(received.x, received.handle)
    choices = (ids >= 0) & torch.tensor(active).cuda()[ids.clamp_min(0) // (E // world)]
    mode.buffer.synchronize()
    assert torch.allclose(y, choices.sum(dim=1, keepdim=True) * x)


def run_one_absent(fabric, nodes):
    """The last rank is late: an error that names it, or the others go on without it until a reset, and it
    ends.

    Returns why the fabric refused these ranks."""
    world = choose(fabric)
    try:
        buffer = make_buffer(nodes, 3.0, world)
    except ep.EPError as error:
        return str(error)
    last = world - 1
    is_last = buffer.rank == last
    mode = mode_of(buffer, 520, torch.float32)
    whole_trip(mode, [True] * world)
    dist.barrier()
    if is_last:
        time.sleep(7)
    else:
        with pytest.raises(ep.EPTimeoutError, match=rf"rank {last}\b"):
            whole_trip(mode, [True] * world)
    buffer.reset()
    whole_trip(mode, [True] * world)
    masking = mode_of(buffer, 520, torch.float32, on_dead_rank="mask", mask_timeout=0.5)
    for _ in range(2):
        dist.barrier()  # kernels are loaded in the first round
        whole_trip(masking, [True] * world)
    dist.barrier()
    if is_last:
        time.sleep(1.5)
        for _ in range(2):
            with pytest.raises(ep.EPMaskedError, match=f"rank {last} came too late"):
                whole_trip(masking, [True] * world)
    else:
        for _ in range(3):
            whole_trip(masking, [True] * last + [False])
    assert masking.masked_ranks() == ([] if is_last else [last])
    buffer.reset()
    whole_trip(masking, [True] * world)
    with pytest.raises(ep.EPError, match=f"this buffer's fabric, {fabric}"):
        masking.readmit(last, dist.HashStore())
    buffer.close()
    return None


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("fabric", choice.NETWORKS)
def test_an_absent_rank(fabric, nodes, ranks_per_node):
    run_or_skip(run_one_absent, fabric, nodes, ranks_per_node, 120)


def run_modes_of_buffers(fabric):
    """Buffers one after the other: a later one takes the memory that an earlier one has left."""
    world = choose(fabric)
    for _ in range(3):
        with make_buffer(1, world=world) as buffer:
            modes = [mode_of(buffer, hidden, torch.float32) for hidden in (520, 8, 520)]
            for mode in (modes[0], modes[2]):
                whole_trip(mode, [True] * world)
            buffer.reset()
            whole_trip(modes[2], [True] * world)
        del modes, mode


@pytest.mark.parametrize("fabric", choice.NETWORKS)
def test_memory_serves_later_buffers(fabric):
    need(fabric, 2)
    with LocalRanks(2, 120) as ranks:
        ranks.run(run_modes_of_buffers, fabric)

"""GPU ranks whose nodes are joined by the host: a thread and TCP carry what goes between them. One GPU is enough, which
the processes then share; nodes are machines by name."""

import os
import signal
import time
from itertools import product

import pytest
import survivors
import torch
import torch.distributed as dist
from cases import slot_bytes, summed_on_gpus
from process_cases import SIZES, check_cases
from test_gpu_low_latency_fabrics import ROWS, E, mode_of, results, whole_trip
from test_gpu_low_latency_fabrics import inputs as low_latency_inputs
from test_gpu_processes import inputs, make_buffer, round_trips

import megatron_ep as ep
from megatron_ep.fabrics import choice
from megatron_ep.tools.local_ranks import LocalRanks

SHAPES = [(2, 1), (2, 2), (4, 1)]


def choose():
    os.environ[choice.VARIABLE] = "tcp"
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return dist.get_world_size()


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def shape(request):
    nodes, per_node = request.param
    with LocalRanks(nodes * per_node, 120) as ranks:
        yield nodes, ranks


@pytest.fixture
def two():
    with LocalRanks(2, 120) as ranks:
        yield ranks


def run_round_trips(nodes):
    world = choose()
    for _ in range(2):
        with make_buffer(nodes, 30.0, world) as buffer:
            assert buffer.fabric == "tcp"
            round_trips(buffer)
            buffer.reset()
            round_trips(buffer, rounds=3)
            if world == 2:
                buffer.release()


def test_round_trips(shape):
    nodes, ranks = shape
    ranks.run(run_round_trips, nodes)


TOKENS, TOPK = (64, 129, 0, 70), 3


def run_host_bits(nodes):
    """Through rings of one or two rows, and of many: the host's bits, there and back, with the handle, too."""
    world = choose()
    generator = torch.Generator().manual_seed(nodes)
    ids = [torch.rand(t, 8, generator=generator).topk(TOPK, dim=1).indices for t in TOKENS[:world]]
    weights = [torch.rand(t, TOPK, generator=generator) for t in TOKENS[:world]]
    for (hidden, dtype), rows_of_ring in product(
        summed_on_gpus((7168, torch.bfloat16), (65, torch.float64)), (1, 2, 32)
    ):
        ring_bytes = rows_of_ring * slot_bytes(hidden, dtype, TOPK)
        tuning = ep.Tuning(channels=2, nvl_ring_bytes=ring_bytes, rdma_ring_bytes=ring_bytes)
        with (
            make_buffer(nodes, 60.0, world, tuning=tuning) as buffer,
            ep.LocalCluster(nodes, world // nodes, ep.Config(num_experts=8)) as host,
        ):
            mine = buffer.rank
            x = [torch.randn(t, hidden, generator=generator).to(dtype) for t in TOKENS[:world]]
            expected = ep.dispatch(x, ids, weights, buffer=host)
            rows = ep.dispatch(x[mine].cuda(), ids[mine].cuda(), weights[mine].cuda(), buffer=buffer)
            assert torch.equal(rows.probs.cpu(), expected.probs[mine])
            for _ in range(2):
                assert torch.equal(rows.x.cpu(), expected.x[mine]), (hidden, dtype)
                y = ep.combine(rows.x, rows.handle)
                assert torch.equal(y.cpu(), ep.combine(expected.x, expected.handle)[mine]), (hidden, dtype)
                rows = ep.dispatch(x[mine].cuda(), handle=rows.handle)
            buffer.synchronize()


def test_the_host_s_bits(shape):
    nodes, ranks = shape
    ranks.run(run_host_bits, nodes)


CASES = 24  # times the shapes and SIZES: 216


def run_cases(nodes, name):
    world, sizes = choose(), SIZES[name]
    with ep.Buffer(None, sizes.config(), ep.Topology(nodes, world // nodes), device="cuda") as buffer:
        assert buffer.fabric == "tcp"
        check_cases(buffer, sizes, range(100 * world, 100 * world + CASES))


@pytest.mark.parametrize("name", SIZES)
def test_random_cases(shape, name):
    nodes, ranks = shape
    ranks.run(run_cases, nodes, name)


def run_low_latency(nodes):
    """Beside calls of the normal mode, around a reset."""
    world = choose()
    with (
        make_buffer(nodes, 30.0, world) as buffer,
        ep.LocalCluster(nodes, world // nodes, ep.Config(num_experts=E)) as host,
    ):
        modes = {row: (mode_of(buffer, *row), mode_of(host, *row)) for row in ROWS}
        for seed in range(3):
            for (hidden, dtype), (ours, theirs) in modes.items():
                everyone = low_latency_inputs(seed, world, hidden, dtype)
                own = [part[buffer.rank].cuda() for part in everyone]
                for fp8 in (None, "pow2") if dtype == torch.bfloat16 else (None,):
                    settings = (("masked", "grouped")[seed % 2], fp8)
                    here, there = results(ours, *own, *settings), results(theirs, *everyone, *settings)
                    for a, b in zip(here, there, strict=True):
                        theirs_of_rank = b[buffer.rank].contiguous().view(torch.uint8)
                        assert torch.equal(a[0].cpu().view(torch.uint8), theirs_of_rank), (seed, hidden, settings)
            round_trips(buffer, rounds=1)
            if seed == 1:
                buffer.reset()
        buffer.synchronize()


def test_the_low_latency_mode(shape):
    nodes, ranks = shape
    ranks.run(run_low_latency, nodes)


def run_graph():
    """Of both modes, replayed with other rows."""
    world = choose()
    with make_buffer(2, 30.0, world) as buffer, torch.no_grad():
        mine = buffer.rank
        x, ids, weights = (part[mine].cuda() for part in inputs(3, world=world))
        handle = ep.dispatch(x, ids, weights, buffer=buffer).handle
        mode = mode_of(buffer, 520, torch.float32)
        few, few_ids, _ = (part[mine].cuda() for part in low_latency_inputs(0, world, 520, torch.float32))
        few.round_()

        def step():
            rows = ep.dispatch(x, topk_weights=weights, handle=handle)
            received = mode.dispatch(few, few_ids)
            return ep.combine(rows.x, rows.handle), mode.combine(received.x, received.handle)

        step()
        buffer.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sums = step()
        for _ in range(20):
            x.add_(1)
            few.add_(1)
            graph.replay()
            buffer.synchronize()
            assert torch.equal(sums[0], 3 * x)
            assert torch.equal(sums[1], (few_ids >= 0).sum(dim=1, keepdim=True) * few)
        buffer.raise_if_failed()


def test_a_graph(two):
    two.run(run_graph)


def run_one_absent():
    world = choose()
    buffer = make_buffer(2, 2.0, world)
    round_trips(buffer)
    if buffer.rank == 1:
        time.sleep(4)
    else:
        x, ids, weights = (part[buffer.rank].cuda() for part in inputs(2, world=world))
        with pytest.raises(ep.EPTimeoutError, match="from rank 1: seen"):
            ep.dispatch(x, ids, weights, buffer=buffer)
    with pytest.raises(ep.EPTimeoutError):
        round_trips(buffer)  # the rank that was late hears of it
    buffer.reset()
    round_trips(buffer)
    buffer.close()


def test_an_absent_rank_is_named(two):
    two.run(run_one_absent)


def run_masked():
    """The last rank stays away: the others go on without it until a reset."""
    world = choose()
    buffer = make_buffer(world, 10.0, world)
    last = world - 1
    mode = mode_of(buffer, 520, torch.float32, on_dead_rank="mask", mask_timeout=0.5)
    for _ in range(2):
        dist.barrier()
        whole_trip(mode, [True] * world)
    dist.barrier()
    if buffer.rank == last:
        time.sleep(1.5)
        with pytest.raises(ep.EPMaskedError, match=f"rank {last} came too late"):
            whole_trip(mode, [True] * world)
    else:
        for _ in range(3):
            whole_trip(mode, [True] * last + [False])
    buffer.reset()
    whole_trip(mode, [True] * world)
    buffer.close()


def test_a_late_rank_is_masked():
    with LocalRanks(4, 120) as ranks:
        ranks.run(run_masked)


def test_survivors(tmp_path, monkeypatch):
    monkeypatch.setenv(choice.VARIABLE, "tcp")
    survivors.check_killed(tmp_path, "cuda", "the connection to rank 1 broke")


def test_a_stopped_process_is_named(tmp_path, monkeypatch):
    """Nothing comes from it, and its connections stay."""
    monkeypatch.setenv(choice.VARIABLE, "tcp")
    monkeypatch.setattr(survivors, "SURVIVOR", survivors.SURVIVOR.replace("timeout=30", "timeout=3"))
    processes = survivors.start_survivors(tmp_path, "cuda")
    processes[1].send_signal(signal.SIGSTOP)
    try:
        outputs = [processes[rank].communicate(timeout=30)[0] for rank in (0, 2, 3)]
    finally:
        for process in processes:
            process.kill()
    assert all("timed out first, after 3 s" in output for output in outputs), outputs
    assert any("rank 1" in output for output in outputs), outputs  # the others tell of the first

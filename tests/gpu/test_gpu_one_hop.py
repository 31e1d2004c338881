"""Dispatches with few tokens in one hop on GPUs: the bits of the rings between processes and in CUDA graphs.

What ranks of one process do is tested with the other dispatches (tests/normal).
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from process_cases import SIZES, check_cases
from run_on import run_on

import megatron_ep as ep

W, T, K, H, E, ROWS = 2, 16, 3, 520, 8, 80


def set_device():
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())


@pytest.mark.parametrize("sizes", SIZES)
@run_on("ranks")
def test_processes_have_the_bits_of_the_rings(sizes):
    set_device()
    config = replace(SIZES[sizes].config(), max_tokens=SIZES[sizes].max_tokens, num_sms=8)
    with ep.Buffer(None, config, ep.Topology(1, W), device="cuda") as buffer:
        assert buffer._group.one_hop.max_tokens == config.max_tokens
        check_cases(buffer, SIZES[sizes], range(12))


def inputs(seed):
    generator = torch.Generator("cuda").manual_seed(10 * seed + dist.get_rank())
    ids = torch.rand(T, E, generator=generator, device="cuda").topk(K, dim=1).indices
    x = torch.randn(T, H, generator=generator, device="cuda").bfloat16()
    return x, ids, torch.rand(T, K, generator=generator, device="cuda")


def layer(buffer, layout, x, ids, weights):
    """Rows, their weights and counts, sums, gradients of x and weights."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    received = ep.dispatch(x, ids, weights, buffer=buffer, layout=layout, max_recv_tokens=ROWS)
    assert (received.handle.one_hop is not None) == (buffer._group.one_hop is not None)
    probs = received.probs if layout == "grouped" else received.probs.sum(dim=1)
    y = ep.combine(received.x * 2, received.handle, probs)
    grads = torch.autograd.grad(y, (x, weights), torch.ones_like(y))
    return received.x.detach(), received.probs.detach(), received.tokens_per_expert, y.detach(), *grads


@pytest.mark.parametrize("layout", ["grouped", "flat"])
@run_on("ranks")
def test_in_a_graph(layout):
    set_device()
    config = ep.Config(E, timeout=20)
    with (
        ep.Buffer(None, replace(config, max_tokens=T), ep.Topology(1, W), device="cuda") as in_one_hop,
        ep.Buffer(None, config, ep.Topology(1, W), device="cuda") as through_rings,
    ):
        static = inputs(0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(in_one_hop, layout, *static)
        side.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(in_one_hop, layout, *static)
        for seed in range(1, 5):
            for tensor, new in zip(static, inputs(seed), strict=True):
                tensor.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            expected = layer(through_rings, layout, *static)
            for number, (ours, theirs) in enumerate(zip(captured, expected, strict=True)):
                assert torch.equal(ours, theirs), (seed, number)
        in_one_hop.synchronize()
        del graph, captured
        torch.cuda.synchronize()


@pytest.mark.parametrize("promise", [64, 4096], ids=["in one hop", "through rings"])
@run_on("ranks")
def test_a_handle_from_before_a_reset_in_a_graph(promise):
    """It may be captured without a call before, and does not let the host wait."""
    set_device()
    with ep.Buffer(None, ep.Config(E, max_tokens=64, timeout=20), ep.Topology(1, W), device="cuda") as buffer:
        x, ids, _ = inputs(0)
        received = ep.dispatch(x, ids, buffer=buffer, max_tokens=promise)
        expected = ep.combine(received.x, received.handle)
        buffer.synchronize()
        buffer.reset()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ep.combine(received.x, received.handle)
            again = ep.dispatch(x, handle=received.handle)
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected) and torch.equal(again.x, received.x)
        dist.barrier()
        del graph, y, again
        torch.cuda.synchronize()


@run_on("ranks")
def test_invalid_ids_are_refused():
    """Those of the last of many tokens, by the next call at the latest: the host may hear of the rows first."""
    set_device()
    with ep.Buffer(None, ep.Config(E, max_tokens=512, timeout=20), ep.Topology(1, W), device="cuda") as buffer:
        for i in range(20):
            x = torch.ones(512, 2048, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(512, E, device="cuda").topk(K).indices
            if buffer.rank == 0:
                ids[-1, -1] = E if i % 2 else ids[-1, 0]
            with pytest.raises(ValueError if buffer.rank == 0 else ep.EPAbortError):
                ep.dispatch(x, ids, buffer=buffer)
                buffer.synchronize()
                ep.dispatch(x, ids, buffer=buffer)
            dist.barrier()
            buffer.reset()

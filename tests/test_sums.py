"""The sums of combine, bit by bit: every 16-bit pattern, and rows of any length."""

import pytest
import torch

import megatron_ep as ep


def sum_of_two(a, b):
    """combine of one token per row of a and b, each row for an expert of its own."""
    ids = [torch.tensor([[0, 1]]).repeat(len(a), 1)]
    with ep.LocalCluster(1, 1, ep.Config(num_experts=2, nvl_ring_bytes=1 << 20)) as cluster:
        handle = ep.dispatch([torch.zeros_like(a)], ids, buffer=cluster).handle
        return ep.combine([torch.cat([a, b])], handle)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(64, 1024)
    generator = torch.Generator().manual_seed(0)
    others = [torch.zeros_like(patterns), patterns.flatten()[torch.randperm(2**16, generator=generator)].view(64, 1024)]
    for other in others:
        expected = (patterns.float() + other.float()).to(dtype)
        ours = sum_of_two(patterns, other)
        assert torch.equal(ours.isnan(), expected.isnan())
        finite = ~expected.isnan()
        assert torch.equal(ours[finite].view(torch.int16), expected[finite].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_row_length(dtype):
    generator = torch.Generator().manual_seed(0)
    for hidden in [*range(1, 70), 1023, 1024, 1025, 2100]:
        a, b = (torch.randn(3, hidden, generator=generator).to(dtype) for _ in range(2))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert torch.equal(sum_of_two(a, b), (a.to(wide) + b.to(wide)).to(dtype))

"""The sums of combine, bit by bit: every 16-bit pattern, and rows of any length."""

import pytest
import torch

import megatron_ep as ep

pytestmark = pytest.mark.numerical


def combined(terms, weights=None):
    """combine of one token per row of the terms, each term for an expert of its own."""
    ids = [torch.arange(len(terms)).repeat(len(terms[0]), 1)]
    with ep.LocalCluster(1, 1, ep.Config(num_experts=len(terms), tuning=ep.Tuning(nvl_ring_bytes=1 << 20))) as cluster:
        handle = ep.dispatch([torch.zeros_like(terms[0])], ids, buffer=cluster).handle
        return ep.combine([torch.cat(terms)], handle, None if weights is None else [torch.cat(weights)])[0]


def assert_same_numbers(ours, expected):
    """Bit by bit, but for the bits of a NaN."""
    assert torch.equal(ours.isnan(), expected.isnan())
    finite = ~expected.isnan()
    assert torch.equal(ours[finite].view(torch.int16), expected[finite].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_pattern(dtype):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(64, 1024)
    generator = torch.Generator().manual_seed(0)
    others = [torch.zeros_like(patterns), patterns.flatten()[torch.randperm(2**16, generator=generator)].view(64, 1024)]
    for other in others:
        expected = (patterns.float() + other.float()).to(dtype)
        assert_same_numbers(combined([patterns, other]), expected)
        weights = [torch.randn(64, generator=generator) for _ in range(2)]
        terms = [row.float() * weight.unsqueeze(1) for row, weight in zip((patterns, other), weights, strict=True)]
        assert_same_numbers(combined([patterns, other], weights), (terms[0] + terms[1]).to(dtype))
        assert_same_numbers(combined([patterns], weights[:1]), terms[0].to(dtype))


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_row_length(dtype, is_weighted):
    """A product is rounded before it is added: with one fused operation some of these would differ."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    differs = False
    for hidden in [*range(1, 70), 1023, 1024, 1025, 2100]:
        for num_terms in (1, 2, 3, 5) if is_weighted else (2,):
            terms = [torch.randn(3, hidden, generator=generator, dtype=wide).to(dtype) for _ in range(num_terms)]
            weights = [torch.ones(3, dtype=wide)] * num_terms
            if is_weighted:
                weights = [torch.randn(3, generator=generator, dtype=wide) for _ in terms]
            products = [term.to(wide) * weight.unsqueeze(1) for term, weight in zip(terms, weights, strict=True)]
            expected = sum(products[1:], products[0]).to(dtype)
            assert torch.equal(combined(terms, weights if is_weighted else None), expected)
            if wide == torch.float32:
                fused = products[0]
                for term, weight in zip(terms[1:], weights[1:], strict=True):
                    fused = (fused.double() + term.double() * weight.double().unsqueeze(1)).float()
                differs |= not torch.equal(fused.to(dtype), expected)
    assert differs == (is_weighted and wide == torch.float32)

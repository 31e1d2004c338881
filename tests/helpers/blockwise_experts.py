"""Experts that round as Transformer Engine's do with the blockwise recipe, on the host.

The rule is that of Float8BlockScaling in Transformer Engine 2.20: rows, and columns for the gradients of weights, in
blocks of 128 along the sum, weights in blocks of 128 x 128, each with the largest power of two that keeps a block
within the format. Weights and rows are e4m3, gradients e4m3 or, with fp8 = "hybrid", e5m2.
"""

import torch
from torch.nn.functional import pad

BLOCK = 128


def te_scales(largest, value_dtype):
    """Factors of blocks whose largest magnitudes, float32, are these."""
    quotient = torch.full_like(largest, torch.finfo(value_dtype).max) / largest  # a number / a tensor is a product
    quotient = torch.where(quotient.isinf(), torch.finfo(torch.bfloat16).max, quotient)
    factor = (quotient.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((largest == 0) | ~largest.isfinite(), torch.ones_like(factor), factor)


def te_rounded(x, value_dtype, block=(1, BLOCK)):
    """The numbers that Transformer Engine's products read in place of x [R, H], in float64."""
    rows, columns = (-(-size // by) for size, by in zip(x.shape, block, strict=True))
    padded = pad(x.float(), (0, columns * block[1] - x.shape[1], 0, rows * block[0] - x.shape[0]))
    blocks = padded.view(rows, block[0], columns, block[1])
    factors = te_scales(blocks.abs().amax(dim=(1, 3), keepdim=True), value_dtype)
    most = torch.finfo(value_dtype).max
    values = (blocks * factors).clamp(-most, most).to(value_dtype)
    return (values.double() / factors.double()).view(padded.shape)[: x.shape[0], : x.shape[1]]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, gradient_dtype):
        ctx.save_for_backward(x, weight)
        ctx.gradient_dtype = gradient_dtype
        rounded = te_rounded(weight, torch.float8_e4m3fn, (BLOCK, BLOCK))
        return (te_rounded(x, torch.float8_e4m3fn) @ rounded.T).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        columns = (BLOCK, 1)
        rounded = te_rounded(weight, torch.float8_e4m3fn, (BLOCK, BLOCK))
        of_x = te_rounded(grad, ctx.gradient_dtype) @ rounded
        of_weight = te_rounded(grad, ctx.gradient_dtype, columns).T @ te_rounded(x, torch.float8_e4m3fn, columns)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class GroupedLinear(torch.nn.Module):
    """Stands for transformer_engine's module of this name."""

    __module__ = "transformer_engine.pytorch.module.grouped_linear"

    def __init__(self, weight, gradient_dtype):
        super().__init__()
        self.weight, self.gradient_dtype = torch.nn.Parameter(weight), gradient_dtype

    def forward(self, rows, counts):
        parts = zip(rows.split(counts), self.weight, strict=True)
        return torch.cat([_Product.apply(part, weight, self.gradient_dtype) for part, weight in parts])


class BlockwiseExperts(torch.nn.Module):
    """Two products for each expert, with the probability between them, where Megatron's experts apply it."""

    def __init__(self, num_local_experts, config, pg_collection=None, **_):
        super().__init__()
        generator = torch.Generator().manual_seed(pg_collection.ep.rank())
        shape = (num_local_experts, config.moe_ffn_hidden_size, config.hidden_size)
        first, second = torch.randn(2, *shape, generator=generator) / shape[2] ** 0.5
        gradient_dtype = torch.float8_e5m2 if config.fp8 == "hybrid" else torch.float8_e4m3fn
        self.linear_fc1 = GroupedLinear(first.to(config.params_dtype), gradient_dtype)
        self.linear_fc2 = GroupedLinear(second.mT.contiguous().to(config.params_dtype), gradient_dtype)

    def forward(self, rows, tokens_per_expert, probs):
        counts = tokens_per_expert.tolist()
        behind = rows.shape[0] - sum(counts)  # rows of no expert
        rows, probs = rows[: sum(counts)], probs[: sum(counts)]
        hidden = torch.tanh(self.linear_fc1(rows, counts)) * probs.unsqueeze(1)
        return pad(self.linear_fc2(hidden.to(rows.dtype), counts), (0, 0, 0, behind)), None

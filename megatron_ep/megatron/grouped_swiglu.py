"""Megatron's swiglu of experts, weighted by probabilities, of the rows that belong to an expert alone.

With a fixed number of rows (moe_expert_rank_capacity_factor) most may be nobody's, and Megatron's function reads all.
The formula and its roundings are those of `weighted_bias_swiglu_impl` (megatron.core.fusions.fused_bias_swiglu) as
torch compiles it: fp32 from the rows to the result. On an H200 both passes take 0.2 to 0.5 of its time.

R rows, F the width of an expert. Import it only where Triton is installed. With TRITON_INTERPRET=1 it runs on the host.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from triton.language.extra import libdevice

COLUMNS = 1024  # of a row that a program has at once
NUM_WARPS = 4
_HAS_LIBDEVICE = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


def weighted_swiglu(hidden: torch.Tensor, probs: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up * probs: [R, F], in the type of hidden.

    hidden: [R, 2 F], gate and up, contiguous.
    probs: [R, 1].
    offsets: int32 [L], ends of the experts' rows. Rows behind the last are not read; their results, gradients included,
        are undefined.
    """
    return _WeightedSwiglu.apply(hidden, probs, offsets)


class _WeightedSwiglu(Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, probs: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, probs, offsets)
        rows, width = hidden.shape[0], hidden.shape[1] // 2
        out = hidden.new_empty(rows, width)
        if rows:
            grid = (rows, triton.cdiv(width, COLUMNS))
            _forward[grid](out, hidden, probs, offsets[-1:], width, COLUMNS, num_warps=NUM_WARPS)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, probs, offsets = ctx.saved_tensors
        of_hidden, of_probs = torch.empty_like(hidden), torch.empty_like(probs)
        rows, width = hidden.shape[0], hidden.shape[1] // 2
        if rows:
            tensors = (of_hidden, of_probs, grad.contiguous(), hidden, probs, offsets[-1:])
            _backward[(rows,)](*tensors, width, COLUMNS, num_warps=NUM_WARPS)
        return of_hidden, of_probs, None


@triton.jit
def _silu(gate):
    """With the exponential function that torch's compiled silu has."""
    return gate / (1 + (libdevice.exp(-gate) if _HAS_LIBDEVICE else tl.exp(-gate)))


@triton.jit
def _forward(out, hidden, probs, end, F, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(end):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_inside = column < F
        gate = tl.load(hidden + row * 2 * F + column, mask=is_inside).to(tl.float32)
        up = tl.load(hidden + row * 2 * F + F + column, mask=is_inside).to(tl.float32)
        weighted = _silu(gate) * up * tl.load(probs + row)
        tl.store(out + row * F + column, weighted.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _backward(of_hidden, of_probs, grad, hidden, probs, end, F, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(end):
        prob = tl.load(probs + row)
        sums = tl.zeros((COLUMNS,), dtype=tl.float32)
        for first in range(0, F, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            is_inside = column < F
            gate = tl.load(hidden + row * 2 * F + column, mask=is_inside, other=0.0).to(tl.float32)
            up = tl.load(hidden + row * 2 * F + F + column, mask=is_inside, other=0.0).to(tl.float32)
            of_out = tl.load(grad + row * F + column, mask=is_inside, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = _silu(gate)
            weighted = of_out * prob
            of_gate = weighted * sigmoid * (1 + gate * (1 - sigmoid)) * up
            of_up = weighted * silu
            tl.store(of_hidden + row * 2 * F + column, of_gate.to(of_hidden.dtype.element_ty), mask=is_inside)
            tl.store(of_hidden + row * 2 * F + F + column, of_up.to(of_hidden.dtype.element_ty), mask=is_inside)
            sums += silu * up * of_out
        tl.store(of_probs + row, tl.sum(sums).to(of_probs.dtype.element_ty))

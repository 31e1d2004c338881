"""Gradients of grouped weights, added in place to fp32 by one Triton kernel that reads the experts' rows on the device.

Each element of the sum belongs to one program, which adds its rows in their order: the same bits in each run, no
atomics, and no gradient in bf16 beside the sum. Rows behind the last expert's are not read.

Import it only where Triton is installed. With TRITON_INTERPRET=1 it runs on the host, in fp32.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]

BLOCK = (128, 128, 64)  # columns of grad, columns of x, rows
NUM_WARPS, NUM_STAGES = 8, 3


@triton.jit
def _add_kernel(  # type: ignore[no-untyped-def]
    main_grad, grad, x, offsets, N, K, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr
):
    expert = tl.program_id(1)
    tiles = tl.cdiv(K, BK)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    k = tl.program_id(0) % tiles * BK + tl.arange(0, BK)
    end = tl.load(offsets + expert)
    begin = 0
    if expert > 0:
        begin = tl.load(offsets + expert - 1)
    if begin < end:
        total = tl.zeros((BN, BK), dtype=tl.float32)
        for first in range(begin, end, BR):
            rows = first + tl.arange(0, BR)
            at, is_own = rows.to(tl.int64)[:, None], rows[:, None] < end
            g = tl.load(grad + at * N + n[None, :], mask=is_own & (n[None, :] < N), other=0.0)
            a = tl.load(x + at * K + k[None, :], mask=is_own & (k[None, :] < K), other=0.0)
            total += tl.dot(tl.trans(g), a)
        place = main_grad + expert.to(tl.int64) * N * K + n[:, None].to(tl.int64) * K + k[None, :]
        is_inside = (n[:, None] < N) & (k[None, :] < K)
        tl.store(place, tl.load(place, mask=is_inside) + total, mask=is_inside)


def add(
    main_grad: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    block: tuple[int, int, int] = BLOCK,
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> None:
    """Adds grad[rows of e].T @ x[rows of e] to main_grad[e] for each expert e.

    main_grad: fp32 [L, N, K], contiguous.
    grad, x: [R, N] and [R, K], contiguous and of one type.
    offsets: int32 [L], ends of the experts' rows.
    block, num_warps, num_stages: of the kernel.
    """
    experts, n, k = main_grad.shape
    assert main_grad.is_contiguous() and main_grad.dtype == torch.float32
    assert grad.is_contiguous() and x.is_contiguous() and grad.shape == (x.shape[0], n) and x.shape[1] == k
    assert offsets.shape == (experts,) and offsets.dtype == torch.int32
    grid = (triton.cdiv(n, block[0]) * triton.cdiv(k, block[1]), experts)
    _add_kernel[grid](main_grad, grad, x, offsets, n, k, *block, num_warps=num_warps, num_stages=num_stages)

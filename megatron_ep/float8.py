"""Rows as fp8 e4m3 with a scale for each 128 elements, the way `megatron_ep.dispatch` takes them."""

from __future__ import annotations

import torch

from megatron_ep import _C

LARGEST = 448.0  # of e4m3 (OCP 8-bit floating point specification, 2023, table 1)
SCALE_BLOCK = 128
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # csrc/core/dtypes.h


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] to float8_e4m3fn [T, H] and float32 scales [T, ceil(H / 128)]; x is about values * scale.

    A scale is the largest |x| of its block divided by 448, or 1 where that is 0. A block with a NaN becomes all NaN.
    Computed in float32, rounded to nearest even. On a GPU it is one kernel. No gradient.

    Raises ValueError unless x is contiguous, [T, H] and bfloat16, float16 or float32.
    """
    if x.dim() != 2 or x.shape[1] < 1 or not x.is_contiguous():
        raise ValueError(f"x has shape {tuple(x.shape)} and strides {tuple(x.stride())}, must be contiguous [T, H]")
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}, must be one of {', '.join(map(str, DTYPES))}")
    x = x.detach()
    if x.is_cuda and hasattr(_C, "quantize_cuda") and torch.cuda.get_device_capability(x.device) >= (9, 0):
        return _quantize_on_gpu(x)
    tokens, hidden = x.shape
    blocks = -(-hidden // SCALE_BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * SCALE_BLOCK - hidden)).view(tokens, blocks, SCALE_BLOCK)
    scales = padded.abs().amax(dim=2) / LARGEST
    scales[scales == 0] = 1
    values = (padded / scales.unsqueeze(2)).view(tokens, blocks * SCALE_BLOCK)[:, :hidden]
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous(), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float8_e4m3fn [T, H] and float32 [T, ceil(H / 128)] to values * scale, [T, H] in dtype (bfloat16, float16 or
    float32), multiplied in float32 and rounded once. No gradient."""
    tokens, hidden = values.shape
    out = torch.empty(tokens, hidden, dtype=dtype, device=values.device)
    exact = values.to(dtype)  # all three hold every e4m3
    if hidden % SCALE_BLOCK:
        torch.mul(exact, scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, :hidden], out=out)
    else:
        blocks = (tokens, hidden // SCALE_BLOCK, SCALE_BLOCK)
        torch.mul(exact.view(blocks), scales.unsqueeze(2), out=out.view(blocks))
    return out


def _quantize_on_gpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], -(-x.shape[1] // SCALE_BLOCK), device=x.device)
    with torch.cuda.device(x.device):
        _C.quantize_cuda(
            rows=x.shape[0],
            hidden=x.shape[1],
            dtype=DTYPES[x.dtype],
            x=x.data_ptr(),
            values=values.data_ptr(),
            scales=scales.data_ptr(),
            stream=torch.cuda.current_stream().cuda_stream,
        )
    return values, scales

"""Conversion of rows to and from fp8 e4m3 with one scale per 128 elements, as `megatron_ep.dispatch` takes them."""

from __future__ import annotations

from typing import Any

import torch

from megatron_ep import _C, reference
from megatron_ep.config import MAX_ROW_BYTES, SUMMABLE_TYPES
from megatron_ep.reference import SCALE_BLOCK

DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): SUMMABLE_TYPES[name] for name in ("bfloat16", "float16", "float32")
}
SCALES_OF_WORD = {torch.float32: 1, torch.float8_e8m0fnu: 1, torch.int32: 4}  # an int32 holds four float8_e8m0fnu


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts x [T, H] to float8_e4m3fn values [T, H] and float32 scales [T, ceil(H / 128)], so that x is about values
    * scale.

    Gives the bits of `megatron_ep.reference.quantize`: a scale is the largest |x| of its block divided by 448, or 1 if
    that is 0; a block with an infinity or NaN becomes NaN. Runs as one kernel on a GPU. Has no gradient.

    Raises ValueError unless x is contiguous, [T, H] with H <= 2^29, and bfloat16, float16 or float32.
    """
    _check_tensor("x", x)
    if x.dim() != 2 or not 1 <= x.shape[1] <= MAX_ROW_BYTES or not x.is_contiguous():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {tuple(x.stride())}, must be contiguous [T, H] with 1 <= H <= "
            f"{MAX_ROW_BYTES}"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}, must be one of {', '.join(map(str, DTYPES))}")
    x = x.detach()
    if _has_kernels(x):
        return _quantize_on_gpu(x)
    return reference.quantize(x)


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    straight_through: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns values * scales, [..., H] in dtype (bfloat16, float16 or float32), multiplied in float32 and rounded
    once.

    Runs as one kernel on a GPU if scales are float32 and contiguous.

    values: float8_e4m3fn [..., H], contiguous.
    scales: [..., ceil(H / 128)], float32 or float8_e8m0fnu, with any strides; or int32 [..., H / 512], each with four
        float8_e8m0fnu.
    straight_through: result of a low-latency dispatch that receives the gradient, in its dtype. None: no gradient.

    Raises ValueError for tensors of other types or shapes.
    """
    _check_scaled(values, scales, dtype)
    values = values.detach()
    if scales.dtype == torch.int32:
        scales = scales.contiguous().view(torch.float8_e8m0fnu)
    factors, hidden = scales.float(), values.shape[-1]
    rows = torch.empty(values.shape, dtype=dtype, device=values.device)  # all three types hold every e4m3
    if _has_kernels(values) and factors is scales and scales.is_contiguous():
        _dequantize_on_gpu(values, scales, rows)
    elif hidden % SCALE_BLOCK:
        torch.mul(values.to(dtype), factors.repeat_interleave(SCALE_BLOCK, dim=-1)[..., :hidden], out=rows)
    else:
        blocks = (*values.shape[:-1], hidden // SCALE_BLOCK, SCALE_BLOCK)
        torch.mul(values.to(dtype).view(blocks), factors.unsqueeze(-1), out=rows.view(blocks))
    return rows if straight_through is None else _StraightThrough.apply(rows, straight_through)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, must be a tensor")


def _check_scaled(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
    _check_tensor("values", values)
    _check_tensor("scales", scales)
    is_right = values.dtype == torch.float8_e4m3fn and values.dim() >= 1 and values.is_contiguous()
    if not is_right or not 1 <= values.shape[-1] <= MAX_ROW_BYTES:
        raise ValueError(
            f"values is {values.dtype} of shape {tuple(values.shape)} and strides {values.stride()}, must be "
            f"torch.float8_e4m3fn [..., H], contiguous, 1 <= H <= {MAX_ROW_BYTES}"
        )
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}, must be one of {', '.join(map(str, DTYPES))}")
    if scales.dtype not in SCALES_OF_WORD:
        raise ValueError(f"scales is {scales.dtype}, must be one of {', '.join(map(str, SCALES_OF_WORD))}")
    shape = (*values.shape[:-1], -(-values.shape[-1] // (SCALE_BLOCK * SCALES_OF_WORD[scales.dtype])))
    if scales.shape != shape or scales.device != values.device:
        raise ValueError(
            f"scales has shape {tuple(scales.shape)} on {scales.device}, must be {shape} on {values.device}, where the "
            "values are"
        )


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, straight_through: torch.Tensor) -> torch.Tensor:
        ctx.dtype = straight_through.dtype
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad.to(ctx.dtype)


def _has_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and hasattr(_C, "quantize_cuda") and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _dequantize_on_gpu(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    hidden = values.shape[-1]
    addresses = {"values": values.data_ptr(), "scales": scales.data_ptr(), "reals": out.data_ptr()}
    with torch.cuda.device(values.device):
        stream = torch.cuda.current_stream().cuda_stream
        _C.dequantize_cuda(
            rows=values.numel() // hidden, hidden=hidden, dtype=DTYPES[out.dtype], stream=stream, **addresses
        )


def _quantize_on_gpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[0], -(-x.shape[1] // SCALE_BLOCK), dtype=torch.float32, device=x.device)
    addresses = {"reals": x.data_ptr(), "values": values.data_ptr(), "scales": scales.data_ptr()}
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        _C.quantize_cuda(rows=x.shape[0], hidden=x.shape[1], dtype=DTYPES[x.dtype], stream=stream, **addresses)
    return values, scales

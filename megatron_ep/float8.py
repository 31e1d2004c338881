"""Conversion of rows to and from fp8 with one scale per 128 elements, as `megatron_ep.dispatch` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ep import _C, reference
from megatron_ep.config import MAX_ROW_BYTES, SUMMABLE_TYPES, require_one_of
from megatron_ep.reference import SCALE_BLOCK

DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): SUMMABLE_TYPES[name] for name in ("bfloat16", "float16", "float32")
}
VALUE_DTYPES: dict[torch.dtype, int] = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}  # ValueFormat in core/float8.h
SCALE_FORMATS = ("fp32", "pow2")
SCALES_OF_WORD = {torch.float32: 1, torch.float8_e8m0fnu: 1, torch.int32: 4}  # an int32 holds four float8_e8m0fnu


def quantize(
    x: torch.Tensor, scales: str = "fp32", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts x [T, H] to values [T, H] of dtype and float32 scales [T, ceil(H / 128)], so that x is about values *
    scale.

    Gives the bits of `megatron_ep.reference.quantize`: a scale is the largest |x| of its block divided by the largest
    value of dtype, or 1 if that is 0; a block with an infinity or NaN becomes NaN. Runs as one kernel on a GPU. Has no
    gradient.

    scales: "fp32", or "pow2": the next power of two. `dequantize` then returns multiples of it without rounding, and
        rows that it returns are quantized with "pow2" to themselves, as Transformer Engine's Float8BlockScaling
        quantizes. docs/megatron.md has the limits.
    dtype: float8_e4m3fn or float8_e5m2.

    Raises ValueError unless x is contiguous, [T, H] with H <= 2^29, and bfloat16, float16 or float32, and for another
    format or dtype.
    """
    _check_tensor("x", x)
    if x.dim() != 2 or not 1 <= x.shape[1] <= MAX_ROW_BYTES or not x.is_contiguous():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {tuple(x.stride())}, must be contiguous [T, H] with 1 <= H <= "
            f"{MAX_ROW_BYTES}"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}, must be one of {', '.join(map(str, DTYPES))}")
    require_one_of("scales", scales, SCALE_FORMATS)
    _check_value_dtype("dtype", dtype)
    x = x.detach()
    if _has_kernels(x):
        return _quantize_on_gpu(x, scales, dtype)
    return reference.quantize(x, scales, dtype)


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    straight_through: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns values * scales, [..., H] in dtype (bfloat16, float16 or float32), multiplied in float32 and rounded
    once.

    Runs as one kernel on a GPU if scales are float32 and contiguous.

    values: float8_e4m3fn or float8_e5m2 [..., H], contiguous.
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
    rows = torch.empty(values.shape, dtype=dtype, device=values.device)  # all three types hold every fp8
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


def _check_value_dtype(name: str, dtype: object) -> None:
    if dtype not in VALUE_DTYPES:
        raise ValueError(f"{name} is {dtype}, must be one of {', '.join(map(str, VALUE_DTYPES))}")


def _check_scaled(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
    _check_tensor("values", values)
    _check_tensor("scales", scales)
    is_right = values.dtype in VALUE_DTYPES and values.dim() >= 1 and values.is_contiguous()
    if not is_right or not 1 <= values.shape[-1] <= MAX_ROW_BYTES:
        raise ValueError(
            f"values is {values.dtype} of shape {tuple(values.shape)} and strides {values.stride()}, must be "
            f"torch.float8_e4m3fn or torch.float8_e5m2 [..., H], contiguous, 1 <= H <= {MAX_ROW_BYTES}"
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
    _convert_on_gpu(_C.dequantize_cuda, out, values, scales, _C.ScaleFormat.none)


def _quantize_on_gpu(x: torch.Tensor, scale_format: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], -(-x.shape[1] // SCALE_BLOCK), dtype=torch.float32, device=x.device)
    _convert_on_gpu(_C.quantize_cuda, x, values, scales, getattr(_C.ScaleFormat, scale_format))
    return values, scales


def _convert_on_gpu(
    convert: Callable[..., None],
    reals: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    scale_format: _C.ScaleFormat,
) -> None:
    hidden = values.shape[-1]
    with torch.cuda.device(values.device):
        convert(
            rows=values.numel() // hidden,
            hidden=hidden,
            dtype=DTYPES[reals.dtype],
            reals=reals.data_ptr(),
            values=values.data_ptr(),
            scales=scales.data_ptr(),
            value_format=VALUE_DTYPES[values.dtype],
            scale_format=scale_format,
            stream=torch.cuda.current_stream().cuda_stream,
        )

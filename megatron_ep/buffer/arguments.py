"""Checks of tensors that calls take, which all modes share: dtypes, shapes, memory.

Raise ValueError. Lists have one tensor per rank of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from megatron_ep import _C
from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import ELEMENT_TYPES, MAX_ROW_BYTES, MAX_ROWS, MAX_TOPK, SUMMABLE_TYPES, require_int
from megatron_ep.reference import SCALE_BLOCK

Tensors = torch.Tensor | Sequence[torch.Tensor]

PAYLOAD_TYPES: dict[torch.dtype, int] = {getattr(torch, name): number for name, number in ELEMENT_TYPES.items()}
COMBINE_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in SUMMABLE_TYPES)
WEIGHT_DTYPES = (torch.float32, torch.float64)
SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)
# combine takes one weight per row, [R], not the router's [T, K].
WEIGHTS_OF_ROWS = ": one for each row of x, such as rows.probs of rows = dispatch(..., topk_weights)"
# The number of rows is an int32; rows added by padding must leave room for the others.
MAX_PADDED_ROWS = 2**30


def _built_dtypes() -> tuple[torch.dtype, ...]:
    built = _C.build_info().get("dtypes")  # None: nothing is built for GPUs
    names = zip(("bf16", "fp16", "fp32", "fp64"), COMBINE_DTYPES, strict=True)
    return COMBINE_DTYPES if built is None else tuple(dtype for name, dtype in names if name in built.split(","))


_BUILT_DTYPES = _built_dtypes()


def summable_dtypes(device_type: str) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that combine sums: all on "cpu", those of MEGATRON_EP_DTYPES at build time on "cuda"."""
    return _BUILT_DTYPES if device_type == "cuda" else COMBINE_DTYPES


def check_summable(name: str, dtype: torch.dtype, device_type: str) -> None:
    """Raises ValueError unless combine sums this dtype."""
    allowed = summable_dtypes(device_type)
    if dtype in allowed:
        return
    said = f"{name} is {dtype}, must be one of {', '.join(map(str, allowed))}"
    if dtype in COMBINE_DTYPES:
        said += ", which this build of megatron_ep sums on GPUs: built with MEGATRON_EP_DTYPES=all it sums the others"
    raise ValueError(said)


def as_taken(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns a tensor, or each of a list, contiguous, and bfloat16 and float16 in dtype; a gradient passes through.

    Other values are returned unchanged, and a later check raises for them.
    """
    if isinstance(value, (list, tuple)):
        return [as_taken(item, dtype) for item in value]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    return (value.to(dtype) if dtype and value.dtype in (torch.bfloat16, torch.float16) else value).contiguous()


def weight_dtype(x: Any) -> torch.dtype:
    """Returns the dtype of weights that multiply x, a tensor or a list of them."""
    first = x[0] if isinstance(x, (list, tuple)) and x else x
    is_double = isinstance(first, torch.Tensor) and first.dtype == torch.float64
    return torch.float64 if is_double else torch.float32


def as_list(name: str, value: Tensors | None, group: RankGroup, is_traced: bool = False) -> list[torch.Tensor]:
    """Returns tensors as a list, one per rank of this process. Raises ValueError unless each can be used."""
    if group.takes_lists:
        if not isinstance(value, (list, tuple)) or len(value) != len(group.ranks):
            got = f"{len(value)} items" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
            raise ValueError(
                f"{name} is {got}, must be a list of {len(group.ranks)} tensors, one per rank of the LocalCluster"
            )
        tensors = list(value)
    else:
        tensors = [value]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, must be a tensor")
        if tensor.device != group.device:
            raise ValueError(f"{name} is on {tensor.device}, must be on {group.device}, where the buffer is")
        if tensor.layout != torch.strided or tensor.is_nested:
            raise ValueError(f"{name} is a {'nested' if tensor.is_nested else tensor.layout} tensor, must be strided")
        if not is_traced and (isinstance(tensor, FakeTensor) or (tensor.data_ptr() == 0 and tensor.numel() > 0)):
            raise ValueError(f"{name} is a {type(tensor).__name__} without memory, must have memory")
        if not is_traced and (tensor.is_neg() or tensor.is_conj()):
            raise ValueError(f"{name} is a view that negates or conjugates lazily, must be resolved: resolve_neg()")
        if not is_traced and forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(f"{name} has a tangent, must have none: only the backward pass is differentiated")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} has strides {tuple(tensor.stride())} for shape {tuple(tensor.shape)}, must be contiguous"
            )
    _check_alike(f"{name} is", [tensor.dtype for tensor in tensors])
    return tensors


def _check_alike(what: str, values: Sequence[object]) -> None:
    for value in values:
        if value != values[0]:
            raise ValueError(f"{what} {values[0]} on one rank and {value} on another, must be equal")


def check_dtype(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype], meaning: str = "") -> None:
    """Raises ValueError unless the tensor's dtype is allowed. meaning: as in `check_weights`."""
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} is {tensor.dtype}, must be one of {', '.join(map(str, allowed))}{meaning}")


def check_alignment(group: RankGroup, expert_alignment: int) -> None:
    require_int("expert_alignment", expert_alignment, 1, MAX_PADDED_ROWS // group.num_local_experts)


def check_num_tokens(group: RankGroup, topk_idx: Sequence[torch.Tensor], expert_alignment: int) -> None:
    """Raises ValueError if the rows of a rank that receives every token, with this many on each rank, exceed int32.

    Leaves room for a loop that runs up to a warp beyond the last row.
    """
    local_experts = group.num_local_experts
    rows = MAX_ROWS - 64 - local_experts * (expert_alignment - 1)
    most = rows // (group.topology.world_size * min(topk_idx[0].shape[1], local_experts))
    for idx in topk_idx:
        if idx.shape[0] > most:
            raise ValueError(
                f"topk_idx has {idx.shape[0]} tokens, must have at most {most}: a rank may be sent {rows} rows"
            )


def check_ids(ids: list[torch.Tensor]) -> None:
    check_dtype("topk_idx", ids[0], (torch.int64, torch.int32))
    for idx in ids:
        if idx.dim() != 2 or not 1 <= idx.shape[1] <= MAX_TOPK:
            flatten = ": topk_idx.reshape(-1, topk_idx.shape[-1])" if idx.dim() > 2 else ""
            raise ValueError(
                f"topk_idx has shape {tuple(idx.shape)}, must be [T, K] with 1 <= K <= {MAX_TOPK}{flatten}"
            )
    _check_alike("topk_idx has K =", [idx.shape[1] for idx in ids])


def check_payload(name: str, xs: list[torch.Tensor], rows: list[int], is_traced: bool = False) -> None:
    check_dtype(name, xs[0], tuple(PAYLOAD_TYPES))
    for x, expected in zip(xs, rows, strict=True):
        if x.dim() > 2:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, must be [{expected}, H]: {name}.reshape(-1, {name}.shape[-1])"
            )
        if x.dim() == 2 and x.shape[1] >= 1 and is_traced:  # compares numbers that depend on data when the graph runs
            torch._check(x.shape[0] == expected)
        elif x.dim() != 2 or x.shape[1] < 1 or x.shape[0] != expected:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be [{expected}, H] with H >= 1")
        if x.shape[1] * x.element_size() > MAX_ROW_BYTES or (not is_traced and x.shape[0] > MAX_ROWS):
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be smaller: {MAX_ROW_BYTES} bytes a row")
    _check_alike(f"{name} has H =", [x.shape[1] for x in xs])


def check_weights(
    name: str,
    weights: list[torch.Tensor] | None,
    shapes: Sequence[tuple[int, ...]],
    allowed: Sequence[torch.dtype],
    meaning: str = "",
) -> None:
    """Raises ValueError for weights of a wrong dtype or shape. meaning: explains the weights in the message."""
    if weights is None:
        return
    check_dtype(name, weights[0], allowed, meaning)
    for weight, shape in zip(weights, shapes, strict=True):
        if tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}, must be {shape}{meaning}")


def check_scales(xs: list[torch.Tensor], scales: list[torch.Tensor] | None) -> None:
    is_float8 = xs[0].dtype == torch.float8_e4m3fn
    if (scales is not None) != is_float8:
        raise ValueError(
            f"scales must be given {'with' if is_float8 else 'only with'} x of torch.float8_e4m3fn, x is {xs[0].dtype}"
        )
    if scales is None:
        return
    check_dtype("scales", scales[0], SCALE_DTYPES)
    for x, scale in zip(xs, scales, strict=True):
        shape = (x.shape[0], -(-x.shape[1] // SCALE_BLOCK))
        if tuple(scale.shape) != shape:
            raise ValueError(
                f"scales has shape {tuple(scale.shape)}, must be {shape}: one per {SCALE_BLOCK} elements of x"
            )

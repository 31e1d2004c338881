"""Products of rows that are grouped by expert with one weight per expert, and their gradients.

R rows, L experts, K and N the width of a row before and after. `offsets` int32 [L] are the ends of the experts' rows,
on the device of the rows. Rows behind the last end belong to nobody: they may hold anything, also NaN, results there
are undefined, and no other result depends on them. On a GPU the host waits for nothing.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

log = logging.getLogger(__name__)

Delayed = deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # gradient, x and offsets of each backward pass

GRANULARITY = 8  # the width of a row must be a multiple: torch's product reads 16 bytes at once
CAPABILITY = (9, 0)

# A key of ADDERS, or "autograd" for a gradient that is returned: only benchmarks and tests set it.
OVERRIDE: str | None = None


@functools.cache
def require_product(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError if torch has no grouped product for this device and type that leaves the counts there."""
    if device.type == "cpu":
        return
    if not hasattr(F, "grouped_mm"):
        raise ValueError(
            f"grouped experts need torch.nn.functional.grouped_mm, which torch {torch.__version__} does not have: "
            "leave them out, or install a newer torch"
        )
    if dtype != torch.bfloat16:
        raise ValueError(
            f"params_dtype is {dtype}, must be torch.bfloat16 for grouped experts on a GPU: for other types the "
            "grouped product of torch waits for the counts on the host"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        raise ValueError(
            f"grouped experts need a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, this is "
            f"{torch.cuda.get_device_name(device)} with {capability[0]}.{capability[1]}, where the grouped product of "
            "torch waits for the counts on the host"
        )


def linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, delayed: Delayed | None) -> torch.Tensor:
    """Returns x [R, K] times the transpose of the weight [L, N, K] of each row's expert: [R, N].

    If the weight has a `main_grad`, and `grad_added_to_main_grad` as Megatron's data parallelism sets it, the backward
    pass adds the gradient there and sets the latter.

    delayed: receives what `weight_gradient` needs, and the weight gets no gradient in the backward pass; None: it does.
    """
    return _Linear.apply(x, weight, offsets, delayed)


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, delayed: Delayed | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.weight, ctx.delayed = weight, delayed  # the parameter itself, whose attributes a saved tensor may lack
        return _product(x, weight.transpose(1, 2), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = _product(grad, weight, offsets) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            if ctx.delayed is None:
                of_weight = weight_gradient(ctx.weight, grad, x, offsets)
            else:
                ctx.delayed.append((grad, x, offsets))
        return of_x, of_weight, None, None


def _product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [R, K] times the weight [L, K, N] of each row's expert: [R, N]."""
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[2])
    if x.is_cuda:
        return F.grouped_mm(x, weight, offs=offsets)
    parts = [x[begin:end] @ of_expert for begin, end, of_expert in zip(*_bounds(offsets), weight, strict=True)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - int(offsets[-1]), weight.shape[2])])


def _bounds(offsets: torch.Tensor) -> tuple[list[int], list[int]]:
    ends = offsets.tolist()
    return [0, *ends[:-1]], ends


def weight_gradient(weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a weight [L, N, K] from that of the rows [R, N] and the rows x [R, K].

    If it is added to `main_grad`, returns a tensor of undefined values, because data parallelism waits for one.
    """
    if not adds_to_main_grad(weight):
        return _weight_product(grad, x, offsets)
    parameter: Any = weight
    adder(parameter.main_grad, grad)(parameter.main_grad.view(weight.shape), grad, x, offsets)
    parameter.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):  # what is returned will be added, too
        return torch.zeros_like(weight)
    return _ignored(weight.shape, weight.dtype, weight.device)


def adds_to_main_grad(weight: torch.Tensor) -> bool:
    """Returns whether a weight's gradient is added to its `main_grad`."""
    has = getattr(weight, "main_grad", None) is not None and hasattr(weight, "grad_added_to_main_grad")
    return has and OVERRIDE != "autograd"


def _weight_product(grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The transpose of grad [R, N] times x [R, K], for each expert's rows: [L, N, K]."""
    if x.shape[0] == 0:
        return x.new_zeros(offsets.shape[0], grad.shape[1], x.shape[1])
    if x.is_cuda:
        return F.grouped_mm(grad.t(), x, offs=offsets)
    return torch.stack([grad[begin:end].t() @ x[begin:end] for begin, end in zip(*_bounds(offsets), strict=True)])


# A function that adds the gradient from grad [R, N], x [R, K] and offsets to main_grad [L, N, K], in each run the same
# bits.
Adder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def adder(main_grad: torch.Tensor, grad: torch.Tensor) -> Adder:
    """Returns the fastest installed function that adds a weight's gradient to this main_grad."""
    if OVERRIDE is not None:
        return ADDERS[OVERRIDE]
    adds_in_product = grad.is_cuda and grad.dtype == torch.bfloat16 and main_grad.dtype == torch.float32
    return ADDERS["triton" if adds_in_product and has_triton() else "add"]


@functools.cache
def has_triton() -> bool:
    """Returns whether Triton is installed, and logs once if it is not."""
    has = find_spec("triton") is not None
    if not has:
        log.info("megatron_ep: grouped experts would be faster with triton installed")
    return has


def _add(main_grad: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> None:
    """Adds a gradient that is computed, and rounded, in the type of the rows."""
    if x.shape[0]:
        main_grad.add_(_weight_product(grad, x, offsets))


def _add_by_triton(main_grad: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> None:
    from megatron_ep.megatron import grouped_weight_gradients

    grouped_weight_gradients.add(main_grad, grad, x, offsets)


ADDERS: dict[str, Adder] = {"triton": _add_by_triton, "add": _add}

_memory: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _ignored(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of undefined values; all of a type share memory."""
    memory = _memory.get((dtype, device))
    if memory is None or memory.numel() < shape.numel():
        memory = _memory[dtype, device] = torch.empty(shape.numel(), dtype=dtype, device=device)
    return memory[: shape.numel()].view(shape)


def add_bias(
    x: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [R, N] plus the bias [L, N] of each row's expert, times scale [R, 1] if given; in the type of x.

    The gradient of the bias is summed in at least fp32, in the order of the rows.
    """
    return _AddBias.apply(x, bias, offsets, scale)


class _AddBias(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(bias, offsets, scale)
        of_rows = _of_rows(bias, offsets, x.shape[0])
        return (x + (of_rows if scale is None else of_rows * scale)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bias, offsets, scale = ctx.saved_tensors
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32))
        of_bias = of_scale = None
        if ctx.needs_input_grad[1]:
            scaled = exact if scale is None else exact * scale
            bounds = F.pad(offsets, (1, 0)).long()
            of_bias = torch.segment_reduce(scaled, "sum", offsets=bounds, unsafe=True).to(bias.dtype)
        if scale is not None and ctx.needs_input_grad[3]:
            of_scale = (exact * _of_rows(bias, offsets, grad.shape[0])).sum(1, keepdim=True).to(scale.dtype)
        return grad, of_bias, None, of_scale


def _of_rows(bias: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the bias of each row's expert [R, N]; for rows of nobody that of the last."""
    numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    experts = torch.searchsorted(offsets, numbers, right=True).clamp_(max=offsets.shape[0] - 1)
    return bias.index_select(0, experts)

"""What it saves if rows and gradients that arrive as fp8 go into Transformer Engine's grouped products as they are: no
dequantize, and no cast of them. One GPU (Hopper), Transformer Engine 2.20, Triton. Prints facts of that run, and exits
with status 1 where bits differ that must be equal.

    PYTHONPATH=$PWD python tests/gpu/fp8_into_products.py [--rows 32768] [--hidden 7168] [--ffn 2048] [GROUP ...]

Two ways to run the same experts (two grouped products with a SwiGLU and the rows' probabilities between them) on rows
and gradients with scales that are powers of two:

  modules   what a layer does: `float8.dequantize` to bf16, then te.GroupedLinear, which quantizes them again
  products  `general_grouped_gemm` on the fp8 rows; one kernel makes the columns that the weights' gradients read, of
            all experts, whose numbers of rows it reads on the device, and puts scales in the order that cuBLASLt reads

  columns   the kernel gives the bits of Transformer Engine's own columns of the dequantized rows
  bits      output, gradient of the rows, gradients of the weights: equal in both ways
  times     of the casts alone and of a forward and backward pass, CUDA events, medians of 11
  memory    the peak of a forward and backward pass over what was there before
  profile   the kernels of both ways and their times
"""

import argparse
import statistics
import sys
import traceback

import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
import triton
import triton.language as tl
from transformer_engine.common.recipe import Float8BlockScaling, Format
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

from megatron_ep import float8

BLOCK = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TE_DTYPES = {E4M3: DType.kFloat8E4M3, E5M2: DType.kFloat8E5M2}


@triton.jit
def power_of_two(exponent):
    """2^exponent as float32, exponent in [-127, 127]."""
    bits = tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def columns_kernel(
    values, scales, ends, columns, column_scales, row_scales,
    hidden: tl.constexpr, experts: tl.constexpr, is_e5m2: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Of 128 rows of an expert and 128 elements. Element [row, h] is a value times the scale of its row, exactly; the
    scale of a column is the smallest power of two with which its largest magnitude is within the format."""
    tile, part = tl.program_id(0), tl.program_id(1)
    # which rows of which expert: a tile never has rows of two
    first_row, first_tile, begin, rows, own_tile = 0, 0, 0, 0, 0
    for expert in range(experts):
        end = tl.load(ends + expert).to(tl.int32)
        tiles = (end - first_row + block - 1) // block
        is_own = (tile >= first_tile) & (tile < first_tile + tiles)
        begin = tl.where(is_own, first_row, begin)
        rows = tl.where(is_own, end - first_row, rows)
        own_tile = tl.where(is_own, tile - first_tile, own_tile)
        first_tile += tiles
        first_row = end
    if rows > 0:
        lanes = tl.arange(0, block)
        row = own_tile * block + lanes  # of the expert
        is_row = row < rows
        element = (part * block + lanes).to(tl.int64)
        at = (begin + row).to(tl.int64)
        bytes_ = tl.load(values + at[:, None] * hidden + element[None, :], mask=is_row[:, None], other=0)
        scale = tl.load(scales + at * (hidden // block) + part, mask=is_row, other=1.0)
        if is_e5m2:
            x = bytes_.to(tl.float8e5, bitcast=True).to(tl.float32) * scale[:, None]
        else:
            x = bytes_.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, None]
        largest = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True)
        # the largest of both formats is 1.75 times a power of two
        most: tl.constexpr = 15 if is_e5m2 else 8
        exponent = most + 127 - (largest >> 23) - tl.where((largest & 0x7FFFFF) > 0x600000, 1, 0)
        exponent = tl.where(largest == 0, 0, tl.minimum(exponent, 127))
        y = x * power_of_two(exponent)[None, :]
        if is_e5m2:
            out = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            out = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        base = begin.to(tl.int64)
        to = columns + base * hidden + element[:, None] * rows + row[None, :]
        tl.store(to, tl.trans(out), mask=is_row[None, :])
        tl.store(column_scales + tile.to(tl.int64) * hidden + element, power_of_two(-exponent))
        tl.store(row_scales + base * (hidden // block) + part * rows + row, scale, mask=is_row)


def tiles_of(splits):
    return [-(-rows // BLOCK) for rows in splits]


def make_columns(values, scales, ends):
    """Columns [H * R] of all experts, one after the other; their scales [tiles, H]; scales of rows, in the order of
    cuBLASLt, [H / 128 * R]. ends: int64 [L] on the device, rows of the experts up to each."""
    rows, hidden = values.shape
    most_tiles = rows // BLOCK + len(ends)
    columns = torch.empty(rows * hidden, dtype=torch.uint8, device=values.device)
    column_scales = torch.empty(most_tiles, hidden, dtype=torch.float32, device=values.device)
    row_scales = torch.empty(scales.numel(), dtype=torch.float32, device=values.device)
    columns_kernel[(most_tiles, hidden // BLOCK)](
        values.view(torch.uint8), scales, ends, columns, column_scales, row_scales,
        hidden=hidden, experts=len(ends), is_e5m2=values.dtype == E5M2, block=BLOCK, num_warps=8,
    )  # fmt: skip
    return columns, column_scales, row_scales


def quantizer(dtype, dim, **usage):
    settings = {"rowwise": True, "columnwise": True, **usage}
    return Float8BlockQuantizer(TE_DTYPES[dtype], block_scaling_dim=dim, force_pow_2_scales=True, **settings)


def storages(values, scales, splits, ends):
    """The rows of each expert as Transformer Engine's storage."""
    columns, column_scales, row_scales = make_columns(values, scales, ends)
    hidden, bytes_, parts, row, tile = values.shape[1], values.view(torch.uint8), [], 0, 0
    for rows, tiles in zip(splits, tiles_of(splits), strict=True):
        parts.append(
            Float8BlockwiseQTensorStorage(
                bytes_[row : row + rows],
                row_scales[row * hidden // BLOCK : (row + rows) * hidden // BLOCK].view(hidden // BLOCK, rows),
                columns[row * hidden : (row + rows) * hidden].view(hidden, rows),
                column_scales[tile : tile + tiles],
                TE_DTYPES[values.dtype],
                quantizer(values.dtype, 1),
                False,
                fake_dtype=torch.bfloat16,
            )
        )
        row, tile = row + rows, tile + tiles
    return parts


def product(a, b, out, splits, layout, **settings):
    none = [None] * len(splits)
    general_grouped_gemm(
        a, b, out, none, torch.bfloat16, layout=layout, m_splits=list(splits), use_split_accumulator=True, **settings
    )


def split_quantized(x, splits, dtype):
    return tex.split_quantize(x.contiguous(), list(splits), [quantizer(dtype, 1) for _ in splits])


class Linear(torch.autograd.Function):
    """A grouped product of x [R, H]; or, if `arrived` is there, of these fp8 rows, in whose place x gets the gradient.
    gradient: None, or a function that returns fp8 rows in place of the gradient of the output."""

    @staticmethod
    def forward(ctx, x, arrived, gradient, splits, ends, gradient_dtype, *weights):
        inputs = split_quantized(x, splits, E4M3) if arrived is None else storages(*arrived, splits, ends)
        quantized = [quantizer(E4M3, 2)(weight) for weight in weights]
        out = torch.empty(x.shape[0], weights[0].shape[0], dtype=torch.bfloat16, device=x.device)
        product(quantized, inputs, [out], splits, "TN", single_output=True)
        for part in inputs:
            part.update_usage(rowwise_usage=False, columnwise_usage=True)
        ctx.parts = quantized, inputs, splits, ends, gradient, gradient_dtype, weights[0].shape
        return out

    @staticmethod
    def backward(ctx, grad):
        quantized, inputs, splits, ends, gradient, gradient_dtype, features = ctx.parts
        ctx.parts = None  # freed as saved tensors are
        if gradient is None:
            grads = split_quantized(grad, splits, gradient_dtype)
        else:
            grads = storages(*gradient(), splits, ends)
        dx = torch.empty(grad.shape[0], features[1], dtype=torch.bfloat16, device=grad.device)
        product(quantized, grads, [dx], splits, "NN", single_output=True, grad=True)
        dws = [torch.zeros(features, dtype=torch.bfloat16, device=grad.device) for _ in splits]
        product(inputs, grads, dws, splits, "NT", grad=True)
        return dx, None, None, None, None, None, *dws


class Combined(torch.autograd.Function):
    """Stands for combine: its backward pass brings these fp8 rows, in bf16, whatever the gradient."""

    @staticmethod
    def forward(ctx, output, values, scales):
        ctx.arrived = values, scales
        return output.view_as(output)

    @staticmethod
    def backward(ctx, _):
        return float8.dequantize(*ctx.arrived), None, None


def carrier(rows):
    """Rows that only carry a gradient, and take no memory."""
    return torch.zeros((), dtype=torch.bfloat16, device=rows.device).expand(rows.shape)


def swiglu(x):
    first, second = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


class Case:
    def __init__(self, options, number_format):
        torch.manual_seed(0)
        rows, hidden, ffn = options.rows, options.hidden, options.ffn
        share = rows // 8 // 16 * 16
        self.splits = [2 * share, share, 0, share // 2 // 16 * 16, share, share]
        self.splits.append(rows - sum(self.splits))
        self.ends = torch.tensor(self.splits, device="cuda").cumsum(0)
        self.recipe = Float8BlockScaling(fp8_format=Format.E4M3 if number_format == "e4m3" else Format.HYBRID)
        self.gradient_dtype = E4M3 if number_format == "e4m3" else E5M2
        settings = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
        self.first = te.GroupedLinear(len(self.splits), hidden, 2 * ffn, **settings)
        self.second = te.GroupedLinear(len(self.splits), ffn, hidden, **settings)
        self.weights = [
            [getattr(part, f"weight{i}") for i in range(len(self.splits))] for part in (self.first, self.second)
        ]
        sizes = torch.exp(torch.randn(rows, 1, device="cuda"))
        self.x, self.grad = (
            float8.quantize((torch.randn(rows, hidden, device="cuda") * sizes).bfloat16(), "pow2", dtype)
            for dtype in (E4M3, self.gradient_dtype)
        )
        self.probs = torch.rand(rows, 1, device="cuda")

    def clear(self):
        for weight in (*self.weights[0], *self.weights[1]):
            weight.grad = None

    def modules(self):
        leaf = carrier(self.x[0]).requires_grad_()
        rows = float8.dequantize(*self.x, straight_through=leaf)
        context = te.autocast if hasattr(te, "autocast") else te.fp8_autocast
        name = "recipe" if hasattr(te, "autocast") else "fp8_recipe"
        with context(enabled=True, **{name: self.recipe}):
            hidden = (swiglu(self.first(rows, self.splits)) * self.probs).bfloat16()
            del rows
            output = Combined.apply(self.second(hidden, self.splits), *self.grad)
        output.backward(carrier(output))
        return output.detach(), leaf.grad

    def products(self):
        leaf = carrier(self.x[0]).requires_grad_()
        how = self.splits, self.ends, self.gradient_dtype
        hidden = Linear.apply(leaf, self.x, None, *how, *self.weights[0])
        hidden = (swiglu(hidden) * self.probs).bfloat16()
        output = Linear.apply(hidden, None, lambda: self.grad, *how, *self.weights[1])
        output.backward(carrier(output))
        return output.detach(), leaf.grad

    def run(self, way):
        self.clear()
        return [*way(), *(weight.grad for weight in (*self.weights[0], *self.weights[1]))]


def columns(case):
    """Whether columns, their scales and scales of rows are Transformer Engine's."""
    right = True
    for what, (values, scales) in (("rows", case.x), ("gradients", case.grad)):
        ours = storages(values, scales, case.splits, case.ends)
        theirs = split_quantized(float8.dequantize(values, scales), case.splits, values.dtype)
        for rows, one, other in zip(case.splits, ours, theirs, strict=True):
            if rows:
                equal = [
                    torch.equal(one._columnwise_data, other._columnwise_data.view(torch.uint8)),
                    torch.equal(one._columnwise_scale_inv, other._columnwise_scale_inv),
                ]
                # Transformer Engine halves a scale, and doubles the values, where the largest was rounded down to half
                # of the format's largest: as numbers they are the same.
                equal.append(torch.equal(dequantized(one), dequantized(other)))
                right &= all(equal)
                print(f"{what}, expert with {rows}: columns, their scales, rows as numbers: {equal}")
    return right


def dequantized(part):
    scales = part._rowwise_scale_inv[:, : part._rowwise_data.shape[0]].t()
    dtype = E4M3 if part._fp8_dtype == DType.kFloat8E4M3 else E5M2
    return part._rowwise_data.view(dtype).float() * scales.repeat_interleave(BLOCK, dim=1)


def bits(case):
    """Whether the two ways give the same numbers."""
    names = ["output", "dx", *(f"dW{layer} of {i}" for layer in (1, 2) for i in range(len(case.splits)))]
    first, second = case.run(case.modules), case.run(case.products)
    equal = {name: torch.equal(a, b) for name, a, b in zip(names, first, second, strict=True)}
    print("equal:", [name for name, same in equal.items() if same])
    for name, a, b in zip(names, first, second, strict=True):
        if not equal[name]:
            apart = ((a.double() - b.double()).norm() / a.double().norm()).item()
            print(f"DIFFERS: {name}, apart {apart:.3e}")
    return all(equal.values())


def median_us(call, times=11):
    for _ in range(3):
        call()
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end))
    return statistics.median(found)


def times(case):
    for what, (values, scales) in (("rows", case.x), ("gradients", case.grad)):
        bf16 = float8.dequantize(values, scales)
        casts = {
            "modules: dequantize": lambda v=values, s=scales: float8.dequantize(v, s),
            "modules: cast of rows and columns": lambda x=bf16, v=values: split_quantized(x, case.splits, v.dtype),
            "products: columns and scales": lambda v=values, s=scales: make_columns(v, s, case.ends),
        }
        for name, call in casts.items():
            print(f"{what}: {name:36} {median_us(call):8.1f} us")
    for way in (case.modules, case.products, case.modules, case.products):
        print(f"{way.__name__}: forward and backward {median_us(lambda w=way: case.run(w)) / 1000:8.3f} ms")
    return True


def memory(case):
    for way in (case.modules, case.products):
        case.run(way)
        torch.cuda.synchronize()
        case.clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case.run(way)
        torch.cuda.synchronize()
        print(f"{way.__name__}: peak {(torch.cuda.max_memory_allocated() - before) / 1e6:8.1f} MB")
    return True


def profile(case):
    for way in (case.modules, case.products):
        case.run(way)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            case.run(way)
            torch.cuda.synchronize()
        kernels = sorted(found.key_averages(), key=lambda one: -one.device_time_total)
        print(f"{way.__name__}:")
        for kernel in kernels[:16]:
            print(f"  {kernel.device_time_total / 1000:8.3f} ms {kernel.count:4} {kernel.key[:100]}")
    return True


GROUPS = {one.__name__: one for one in (columns, bits, times, memory, profile)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("groups", nargs="*", choices=[[], *GROUPS], default=[*GROUPS])
    options = parser.parse_args()
    failed = 0
    for number_format in ("e4m3", "hybrid"):
        case = Case(options, number_format)
        for group in options.groups:
            print(f"== {number_format}: {group}", flush=True)
            try:
                failed += not GROUPS[group](case)
            except Exception:  # each group is a fact of its own
                failed += 1
                traceback.print_exc()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

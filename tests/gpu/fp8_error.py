"""What rows and gradients that travel as fp8 cost experts of Transformer Engine, on one GPU: the error of the output,
of the gradient of the rows (dx) and of the weights (dW) against fp64, for each way to travel and each rounding of the
experts. Prints a table in Markdown.

    PYTHONPATH=$PWD python tests/gpu/fp8_error.py [--rows 8192] [--hidden 7168] [--ffn 2048]

megatron_ep (with CUDA kernels) and transformer_engine must be importable. Rows travel as `moe_dispatch_fwd_dtype` sends
them, in the ways named "rows", with fp32 scales or scales that are powers of two; gradients as `moe_combine_bwd_dtype`
does, or with fp32 scales. A star: what a layer does with these experts. "bits": whether the output, and dx, have the
bits that they have with bf16 on the way. Exits with status 1 where they must have and do not.

The experts are two GroupedLinear with a SwiGLU and the rows' probabilities between them, which are not rounded. The
rows of one distribution are normal; those of the other have channels of log-normal size, as activations have.
"""

import argparse
import contextlib
import sys

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, Format

from megatron_ep import float8

DEVICE = "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = {  # of the experts: a recipe and the dtype of its gradients
    "bf16": (None, None),
    "fp8 tensorwise, hybrid": (lambda: Float8CurrentScaling(fp8_format=Format.HYBRID), E5M2),
    "fp8 blockwise, e4m3": (lambda: Float8BlockScaling(fp8_format=Format.E4M3), E4M3),
    "fp8 blockwise, hybrid": (lambda: Float8BlockScaling(fp8_format=Format.HYBRID), E5M2),
}
WIRES = {  # scales of rows, scales of gradients; None: bf16
    "bf16": (None, None),
    "rows, fp32 scales": ("fp32", None),
    "rows, powers of two": ("pow2", None),
    "rows and gradients, fp32 scales": ("fp32", "fp32"),
    "rows and gradients, powers of two": ("pow2", "pow2"),
}


def travelled(x, scales, dtype):
    """Rows as they arrive."""
    return x if scales is None else float8.dequantize(*float8.quantize(x, scales, dtype), x.dtype)


def swiglu(x):
    first, second = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


def fp8_of(recipe):
    if recipe is None:
        return contextlib.nullcontext()
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


class Experts:
    def __init__(self, splits, hidden, ffn):
        settings = {"bias": False, "params_dtype": torch.bfloat16, "device": DEVICE}
        self.splits = splits
        self.first = te.GroupedLinear(len(splits), hidden, 2 * ffn, **settings)
        self.second = te.GroupedLinear(len(splits), ffn, hidden, **settings)
        self.weights = [getattr(part, f"weight{i}") for part in (self.first, self.second) for i in range(len(splits))]

    def run(self, rows, probs, grad, recipe):
        """Output, dx and the list of dW."""
        leaf = rows.detach().clone().requires_grad_()
        for weight in self.weights:
            weight.grad = None
        with fp8_of(recipe):
            hidden = swiglu(self.first(leaf, self.splits)) * probs
            output = self.second(hidden.to(leaf.dtype), self.splits)
        output.backward(grad)
        return output.detach(), leaf.grad, [weight.grad.clone() for weight in self.weights]

    def exact(self, rows, probs, grad):
        """The same in fp64, an expert at a time."""
        outputs, dxs, first_dws, second_dws = [], [], [], []
        number = len(self.splits)
        parts = zip(*(part.split(self.splits) for part in (rows, probs, grad)), strict=True)
        for i, (x, p, g) in enumerate(parts):
            leaves = [one.detach().double().requires_grad_() for one in (x, self.weights[i], self.weights[number + i])]
            output = (swiglu(leaves[0] @ leaves[1].T) * p.double()) @ leaves[2].T
            output.backward(g.double())
            outputs.append(output.detach())
            for found, leaf in zip((dxs, first_dws, second_dws), leaves, strict=True):
                found.append(leaf.grad)
        return torch.cat(outputs), torch.cat(dxs), first_dws + second_dws


def error(got, want):
    """|got - want| / |want| in percent; of lists, of all elements together."""
    if not isinstance(got, list):
        got, want = [got], [want]
    apart = sum(float((a.double() - b).square().sum()) for a, b in zip(got, want, strict=True))
    return 100 * (apart / sum(float(b.square().sum()) for b in want)) ** 0.5


def taken(recipe, wire):
    """Whether a layer does this with such experts."""
    if recipe.startswith("fp8 blockwise"):
        return wire in ("bf16", "rows, powers of two", "rows and gradients, powers of two")
    return wire in ("bf16", "rows, fp32 scales")


def compare(options):
    """Prints the rows of the table; returns what lost bits that must be there."""
    lost = []
    share = options.rows // 8 // 16 * 16
    splits = [2 * share, share, 0, share // 2 // 16 * 16, share, share]
    splits.append(options.rows - sum(splits))  # one expert has most rows, one none
    torch.manual_seed(0)
    channels = torch.exp(torch.randn(options.hidden, device=DEVICE))
    for distribution, sizes in (("normal", torch.ones_like(channels)), ("channels", channels)):
        rows, grad = (torch.randn(2, options.rows, options.hidden, device=DEVICE) * sizes).bfloat16()
        probs = torch.rand(options.rows, 1, device=DEVICE)
        for name, (recipe, gradient_dtype) in RECIPES.items():
            torch.manual_seed(1)
            experts = Experts(splits, options.hidden, options.ffn)  # it keeps its quantizers when the recipe changes
            exact = experts.exact(rows, probs, grad)
            plain = None
            for wire, (of_rows, of_gradients) in WIRES.items():
                arrived = travelled(rows, of_rows, E4M3)
                arrived_grad = travelled(grad, of_gradients, gradient_dtype or E4M3)
                found = experts.run(arrived, probs, arrived_grad, recipe and recipe())
                plain = plain or found
                bits = [torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True)]
                is_taken = taken(name, wire)
                if is_taken and name.startswith("fp8 blockwise") and not all(bits):
                    lost.append(f"{distribution}, {name}, {wire}")
                errors = " | ".join(f"{error(a, b):.2f}" for a, b in zip(found, exact, strict=True))
                words = ", ".join(part for part, same in zip(("output", "dx"), bits, strict=True) if same) or "-"
                star = " *" if is_taken else ""
                print(f"| {distribution} | {name} | {wire}{star} | {errors} | {words} |", flush=True)
    return lost


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--ffn", type=int, default=2048)
    options = parser.parse_args()
    print("| rows | experts | on the way | output % | dx % | dW % | bits of bf16 |\n|---|---|---|---|---|---|---|")
    lost = compare(options)
    for what in lost:
        print(f"FAILS: {what}: other bits than with bf16 on the way")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()

"""Experts of a MoE layer whose weight gradients are computed when `backward_dw` is called."""

import torch
from counted_experts import CountedExperts


class _Delayed(torch.autograd.Function):
    """Experts whose weights get no gradient from the backward pass."""

    @staticmethod
    def forward(ctx, experts, overwrites, rows, counts, probs, *weights):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (rows, probs)]
            output, _ = CountedExperts.forward(experts, leaves[0], counts, leaves[1])
        ctx.experts, ctx.overwrites, ctx.leaves, ctx.output = experts, overwrites, leaves, output
        return output.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.experts.told.append("E")
        ctx.experts.later.append((ctx.output, grad, ctx.overwrites))
        rows, probs = torch.autograd.grad(ctx.output, ctx.leaves, grad, retain_graph=True)
        return None, None, rows, None, probs, *(None for _ in ctx.experts.parameters())


class DelayedExperts(CountedExperts):
    """As Transformer Engine's with delay_wgrad_compute: `backward_dw` overwrites `grad`; or, if it fuses, it overwrites
    `main_grad` for the first forward pass of a step, and adds to it for others."""

    fuses = False
    is_first_microbatch, disable_parameter_transpose_cache = True, False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.later, self.told = [], []

    def forward(self, rows, tokens_per_expert, probs):
        overwrites = self.is_first_microbatch and not self.disable_parameter_transpose_cache
        self.is_first_microbatch = False
        return _Delayed.apply(self, overwrites, rows, tokens_per_expert, probs, *self.parameters()), None

    def backward_dw(self):
        self.told.append("W")
        output, grad, overwrites = self.later.pop(0)
        weights = [*self.parameters()]
        for weight, of in zip(weights, torch.autograd.grad(output, weights, grad), strict=True):
            if self.fuses:
                weight.main_grad.copy_(of if overwrites else weight.main_grad + of)
                weight.grad_added_to_main_grad = True
            else:
                weight.grad = of

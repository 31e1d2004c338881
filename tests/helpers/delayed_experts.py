"""Experts of a MoE layer whose weight gradients are computed when `backward_dw` is called."""

import torch
from counted_experts import CountedExperts


class _Delayed(torch.autograd.Function):
    """Experts whose weights get no gradient from the backward pass."""

    @staticmethod
    def forward(ctx, experts, rows, counts, probs, *weights):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (rows, probs)]
            output, _ = CountedExperts.forward(experts, leaves[0], counts, leaves[1])
        ctx.experts, ctx.leaves, ctx.output = experts, leaves, output
        return output.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.experts.told.append("E")
        ctx.experts.later.append((ctx.output, grad))
        rows, probs = torch.autograd.grad(ctx.output, ctx.leaves, grad, retain_graph=True)
        return None, rows, None, probs, *(None for _ in ctx.experts.parameters())


class DelayedExperts(CountedExperts):
    """As Transformer Engine's with delay_wgrad_compute: `backward_dw` overwrites `grad`, or adds to `main_grad`."""

    fuses = False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.later, self.told = [], []

    def forward(self, rows, tokens_per_expert, probs):
        return _Delayed.apply(self, rows, tokens_per_expert, probs, *self.parameters()), None

    def backward_dw(self):
        self.told.append("W")
        output, grad = self.later.pop(0)
        weights = [*self.parameters()]
        for weight, of in zip(weights, torch.autograd.grad(output, weights, grad), strict=True):
            if self.fuses:
                weight.main_grad.add_(of)
                weight.grad_added_to_main_grad = True
            else:
                weight.grad = of

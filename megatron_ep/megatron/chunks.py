"""`moe_chunks` and `overlap_dispatch_backward_with_experts_wgrad`: communication of a MoE layer beside its experts.

With two chunks the dispatches D, experts E and combines C of the halves of a layer's tokens are called in the order
D0 D1 E0 C0 E1 C1, the calls on the communication stream; torch runs the backward pass in the mirrored order. So D1
runs beside E0 and C0 beside E1. The weights' gradients of the experts run beside the backward pass of dispatch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_ep import overlap
from megatron_ep.buffer.interface import RowCounts
from megatron_ep.megatron.dispatcher import EPTokenDispatcher

DELAYS = "overlap_dispatch_backward_with_experts_wgrad"


def enable(layer: MoELayer, config: TransformerConfig) -> None:
    """Makes a layer with an `EPTokenDispatcher` overlap communication as its options say; without them changes nothing.

    Raises ValueError if the layer has a setting with which this does not work.
    """
    number, delays = layer.token_dispatcher.options.moe_chunks, bool(getattr(config, DELAYS, False))
    if number == 1 and not delays:
        return
    what = f"{DELAYS} is True" if number == 1 else f"moe_chunks is {number}"
    steps = ("forward", "dispatch", "combine")
    for name, is_set in {
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        "moe_pad_expert_input_to_capacity": config.moe_pad_expert_input_to_capacity,
        "moe_shared_expert_overlap": layer.shared_experts is not None and layer.shared_expert_overlap,
        "moe_expert_rank_capacity_factor": layer.token_dispatcher.options.moe_expert_rank_capacity_factor is not None,
        "a CUDA graph that holds the experts (cuda_graph_impl)": _has_graphed_experts(config),
        "delayed fp8 scaling (fp8_recipe)": number > 1 and config.fp8 and config.fp8_recipe == "delayed",
        f"a {type(layer).__name__} that is not Megatron's": any(
            getattr(type(layer), step) is not getattr(MoELayer, step) for step in steps
        ),
    }.items():
        if is_set:
            raise ValueError(f"{what} with {name}: give one of the two")
    if number > 1 and not config.gradient_accumulation_fusion and config.params_dtype.itemsize < 4:
        warnings.warn(
            f"{what} without gradient_accumulation_fusion: the chunks' gradients of weights are added in "
            f"{config.params_dtype}, which rounds once more",
            stacklevel=2,
        )
    for module in layer.experts.modules() if number > 1 else ():
        if hasattr(module, "disable_parameter_transpose_cache"):
            # Otherwise Transformer Engine overwrites main_grad in the backward pass of the first forward pass of a
            # step, which is that of the first chunk and comes last.
            module.disable_parameter_transpose_cache = True
    chunks = Chunks(layer, number, delays)
    layer.dispatch, layer.combine = chunks.dispatch, chunks.combine
    layer.routed_experts_compute = chunks.routed_experts_compute


def _has_graphed_experts(config: TransformerConfig) -> bool:
    held = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or ()  # (): all
    outside = {"attn", "mlp", "mamba", "moe_router", "moe_preprocess"}
    is_partial = bool(held) and {getattr(part, "name", part) for part in held} <= outside
    return getattr(config, "cuda_graph_impl", "none") != "none" and not is_partial


class Chunks:
    """The methods that replace three of a MoE layer's. Between them `MoELayer.forward` only hands on what they return.

    layer: the layer.
    number: of chunks, 1 or 2.
    delays: whether the experts' weight gradients run beside the backward pass of dispatch.
    """

    def __init__(self, layer: MoELayer, number: int, delays: bool) -> None:
        self._layer, self._number, self._delays = layer, number, delays
        self._last_counts: list[RowCounts | None] = [None] * number

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (hidden_states, probs) if self._is_on else MoELayer.dispatch(self._layer, hidden_states, probs)

    def combine(self, output: torch.Tensor) -> torch.Tensor:
        return output if self._is_on else MoELayer.combine(self._layer, output)

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Takes tokens [T, H] and weights [T, K] to the experts and back: [T, H] and no bias."""
        layer, n = self._layer, self._number
        compute = functools.partial(type(layer).routed_experts_compute, layer)
        if not self._is_on:
            return compute(hidden_states, probs)
        whole, tokens = layer.token_dispatcher, hidden_states.shape[0]
        sizes = [tokens * (i + 1) // n - tokens * i // n for i in range(n)]
        xs, weights, ids = (tensor.split(sizes) for tensor in (hidden_states, probs, whole.topk_idx))
        chunks = [self._chunk(whole, i, ids[i]) for i in range(n)]
        whole._layout, whole._is_unread = None, False  # the chunks have them
        stream = torch.cuda.current_stream() if hidden_states.is_cuda else None
        began = None if stream is None else stream.record_event()
        for chunk, x in zip(chunks[1:], xs[1:], strict=True):
            # Otherwise the host, when it needs these counts, would wait for the end of the dispatches before.
            overlap.start(chunk.exchange_counts, x, previous_event=began)
        dispatches = [
            overlap.start(self._send, *of_chunk, i == 0, stream, previous_event=began)
            for i, of_chunk in enumerate(zip(chunks, xs, weights, ids, strict=True))
        ]
        combines = []
        for chunk, dispatch in zip(chunks, dispatches, strict=True):
            rows, row_probs, counts = dispatch.wait()
            whole._comm_manager.tokens_per_expert = counts
            output, _ = compute(rows, row_probs)
            combines.append(overlap.start(chunk.token_combine, output))
        self._last_counts = [chunk._last_counts for chunk in chunks]
        sums = [combine.wait() for combine in combines]
        return torch.cat(sums) if n > 1 else sums[0], None

    def _chunk(self, whole: EPTokenDispatcher, number: int, ids: torch.Tensor) -> EPTokenDispatcher:
        """Returns a dispatcher for one pass of a chunk, whose state is not that of the layer's."""
        chunk = copy.copy(whole)
        chunk._comm_manager = dataclasses.replace(whole._comm_manager)
        chunk.topk_idx, chunk._last_counts, chunk._chunk = ids, self._last_counts[number], number
        return chunk

    def _send(
        self,
        chunk: EPTokenDispatcher,
        x: torch.Tensor,
        probs: torch.Tensor,
        ids: torch.Tensor,
        ends_backward: bool,
        stream: torch.cuda.Stream | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Dispatches a chunk. ids, and the last result, its counts, are used on both streams."""
        del ids  # those that the chunk has
        if self._delays:
            weights = [weight for weight in self._layer.experts.parameters() if weight.requires_grad]
            x = DelayedWeights.apply(self._layer.experts, ends_backward, stream, x, *weights) if weights else x
        return *chunk.token_dispatch(x, probs), chunk._comm_manager.tokens_per_expert

    @property
    def _is_on(self) -> bool:
        """Whether the pass is one of training: Megatron's inference pads, or takes another dispatcher, on all ranks."""
        dispatcher = self._layer.token_dispatcher
        return isinstance(dispatcher, EPTokenDispatcher) and not dispatcher.drop_and_pad


class DelayedWeights(Function):
    """Returns tokens unchanged. Its backward pass, which comes once that of dispatch is launched, computes the experts'
    weight gradients and returns them, so that hooks of a weight run once, when its gradient is there.

    experts: a module whose `backward_dw` puts gradients into `grad` or adds them to `main_grad`.
    ends_backward: whether this is the last of a layer's chunks in the backward pass.
    stream: the stream of the experts; this function runs on that of dispatch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        experts: torch.nn.Module,
        ends_backward: bool,
        stream: torch.cuda.Stream | None,
        x: torch.Tensor,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.experts, ctx.ends_backward, ctx.stream, ctx.weights = experts, ends_backward, stream, weights
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        before = [weight.grad for weight in ctx.weights]
        with contextlib.nullcontext() if ctx.stream is None else torch.cuda.stream(ctx.stream):
            for weight in ctx.weights:
                weight.grad = None
            ctx.experts.backward_dw()
            found = [weight.grad for weight in ctx.weights]
            if ctx.ends_backward:
                # A gradient that is in main_grad already: DDP wants one that changes nothing.
                zeros = {w.shape: w.new_zeros(w.shape) for w, g in zip(ctx.weights, found, strict=True) if g is None}
                found = [zeros[w.shape].detach() if g is None else g for w, g in zip(ctx.weights, found, strict=True)]
        for weight, own in zip(ctx.weights, before, strict=True):
            weight.grad = own
        if ctx.stream is not None:
            torch.cuda.current_stream().wait_stream(ctx.stream)
        return None, None, None, grad, *found

"""Megatron's top-k router on the fused gate of `megatron_ep.router.api`.

T tokens on this rank, E experts, K choices per token. Makes the same choices as Megatron's router except near ties,
see `megatron_ep.router.api`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_ep.config import MAX_TOPK
from megatron_ep.megatron.replays import Choice
from megatron_ep.megatron.topk_choices import choices_of
from megatron_ep.router.api import SCORE_FUNCTIONS, Routing, grouped_topk

__all__ = ["EPTopKRouter", "fused_router", "topk_routing_with_score_function"]

# Megatron rounds to the logits' dtype: up to 0.17 the scores before the choice, from 0.18 on the weights after it.
ROUNDS_SCORES = Version(megatron_version) < Version("0.18")
BALANCING_TYPES = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


class EPTopKRouter(TopKRouter):
    """Drop-in for Megatron's `TopKRouter`: same parameters, buffers and losses, and the same results except near ties.

    Kernels of this library compute the gate, the scores for the auxiliary losses and their gradients; the rest is the
    base class's code: input jitter, gating, z-loss, auxiliary losses, the counts behind the expert bias, replay.

    With 16-bit logits (a bf16 model without moe_router_dtype) results are rounded where the installed Megatron rounds:
    from 0.18 on, the weights. Up to 0.17 the scores before the choice, which makes so many equal that the order of
    torch.topk decides. Megatron's own function is then the gate, with its results and its speed. moe_router_dtype
    "fp32" avoids both.

    config, pg_collection: see `TopKRouter`.
    sparse: return ids and weights for the dispatcher instead of Megatron's dense interface, see `routing`.
    options: arguments that newer versions of Megatron-Core pass on (is_mtp_layer).

    Raises ValueError if the config asks for an unsupported setting: sinkhorn or quantile balancing, a score function
    other than sigmoid and softmax, Transformer Engine's fused router, more than 32 experts for a token; or sparse
    together with capacity-limited experts, whose choice is not K experts for each token.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        sparse: bool = False,
        **options: Any,
    ) -> None:
        _check(config, sparse)
        super().__init__(config=config, pg_collection=pg_collection, **options)
        keep_exact(self)
        self.sparse = sparse

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses the experts. `forward` returns the result.

        logits: [S, B, E], T = S * B.
        padding_mask: bool [S, B], True for padding, which gets no expert: it is not sent, its output is zeros, and
            losses and counts exclude it.

        Returns probs [T, E] in the logits' dtype and bool routing_map [T, E]; or, if sparse, weights [T, K] in that
        dtype and int64 expert ids [T, K]. The auxiliary losses are attached to the first. Dense also while the config
        has an expert capacity, which Megatron's inference sets during decoding.
        """
        sparse = self.sparse and self.config.moe_expert_capacity_factor is None
        seq_length, batch_size = logits.shape[:2]
        logits = logits.view(-1, self.config.num_moe_experts)
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=padding_mask)

        balances = self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled()
        routing = self._choose(logits, padding_mask, dense=not sparse, aux=balances)
        if sparse:
            weights, chosen = routing.weights, routing.ids
        else:
            assert routing.probs is not None and routing.routing_map is not None
            weights, chosen = routing.probs, routing.routing_map
        if self.config.moe_expert_capacity_factor is not None:
            weights, chosen = apply_router_token_dropping(
                weights,
                chosen,
                router_topk=self.topk,
                capacity_factor=self.config.moe_expert_capacity_factor,
                drop_policy=self.config.moe_token_drop_policy,
                pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
            )
        if balances:  # Megatron's auxiliary losses are attached to the weights; their scores and map exclude padding
            assert routing.aux_scores is not None and routing.aux_map is not None
            given, padded = (routing.aux_scores, routing.aux_map), padding_mask is not None
            weights = self._apply_aux_loss(weights, *given, with_padding_mask=padded)
            weights = self._apply_seq_aux_loss(weights, *given, seq_length, batch_size, with_padding_mask=padded)
            weights = self._apply_global_aux_loss(weights, *given, with_padding_mask=padded)
        if self.enable_expert_bias and torch.is_grad_enabled():  # Megatron updates the bias by these counts
            is_limited = self.config.moe_expert_capacity_factor is not None
            self.local_tokens_per_expert += chosen.sum(dim=0) if is_limited else routing.tokens_per_expert
        return weights, chosen

    def _choose(self, logits: torch.Tensor, padding: torch.Tensor | None, dense: bool, aux: bool) -> Routing:
        config = self.config
        options: dict[str, Any] = dict(
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            # For Megatron a factor of 0 means no factor.
            scaling_factor=config.moe_router_topk_scaling_factor or None,
            pre_softmax=config.moe_router_pre_softmax and self.score_function == "softmax",
        )
        if config.moe_router_group_topk:
            options |= dict(num_groups=config.moe_router_num_groups, group_topk=config.moe_router_group_topk)
        if ROUNDS_SCORES and logits.element_size() == 2:
            return self._choose_as_megatron(logits, padding, options, aux)
        choice = self.router_replay
        if isinstance(choice, Choice):  # of the forward pass, for its replay
            options["replay_ids"] = choice.topk_idx
        elif choice is not None:
            options["replay_ids"] = self._replay_ids(logits.detach(), options)
        routing = grouped_topk(logits, self.topk, **options, padding_mask=padding, dense=dense, aux=aux)
        if isinstance(choice, Choice):
            choice.topk_idx = routing.ids
        return routing._replace(weights=routing.weights.to(logits.dtype))

    def _choose_as_megatron(
        self, logits: torch.Tensor, padding: torch.Tensor | None, options: dict[str, Any], aux: bool
    ) -> Routing:
        """Chooses by Megatron's own function. options: arguments of `grouped_topk`."""
        renamed = dict(options, use_pre_softmax=options["pre_softmax"], router_replay=self.router_replay)
        del renamed["pre_softmax"]
        probs, routing_map = topk_routing_with_score_function(logits, self.topk, **renamed)
        valid = None if padding is None else ~padding.unsqueeze(-1)
        if valid is not None:
            probs, routing_map = probs * valid, routing_map & valid
        ids, weights = choices_of(routing_map, probs, self.topk)
        aux_map, aux_scores = None, None
        if aux:
            aux_map, aux_scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
            if valid is not None:
                aux_map, aux_scores = aux_map & valid, aux_scores * valid
        return Routing(ids, weights, routing_map.sum(dim=0), probs, routing_map, aux_scores, aux_map)

    def _replay_ids(self, logits: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Returns recorded ids [T, K]; otherwise this router's ids, which are recorded if that is enabled."""

        def choose(logits: torch.Tensor, topk: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            routing = grouped_topk(logits, topk, **options)
            return routing.weights, routing.ids

        groups = (self.config.moe_router_num_groups, self.config.moe_router_group_topk)
        return self.router_replay.get_replay_topk(logits, self.topk, *groups, choose)[1]


def keep_exact(router: TopKRouter) -> None:
    """Keeps the fp32 buffers of a router in fp32 when its model is converted to a smaller type, as Float16Module does.

    They are sums: the tokens of each expert since the last step, by which Megatron moves the expert bias or scales
    global auxiliary losses, and that bias itself. In bf16 a count above 256 is rounded.
    """
    router._apply = types.MethodType(_apply_without_rounding, router)


def _apply_without_rounding(router: TopKRouter, convert: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Does what `torch.nn.Module._apply` does, which all conversions and moves call."""
    exact = {n: b for n, b in router._buffers.items() if b is not None and b.dtype == torch.float32}
    type(router)._apply(router, convert, *args, **kwargs)
    for name, buffer in exact.items():
        converted = router._buffers[name]
        if converted is not None and converted.is_floating_point() and converted.element_size() < buffer.element_size():
            router._buffers[name] = buffer.to(converted.device)
    return router


def fused_router(
    config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, **options: Any
) -> EPTopKRouter:
    """Builds the router of an `EPMoELayer`, for its MoESubmodules, which passes ids directly to the dispatcher.

    It is dense only if experts have a limited capacity, because Megatron drops tokens in the dense map.
    """
    return EPTopKRouter(config, pg_collection, sparse=config.moe_expert_capacity_factor is None, **options)


def _check(config: TransformerConfig, sparse: bool) -> None:
    balancing = config.moe_router_load_balancing_type
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind not in BALANCING_TYPES:
            raise ValueError(f"moe_router_load_balancing_type is {kind!r}, must be of {', '.join(BALANCING_TYPES)}")
    if config.moe_router_score_function not in SCORE_FUNCTIONS:
        allowed = ", ".join(SCORE_FUNCTIONS)
        raise ValueError(f"moe_router_score_function is {config.moe_router_score_function!r}, must be of {allowed}")
    if config.moe_router_fusion:
        raise ValueError("moe_router_fusion is True, which asks for Transformer Engine's router: must be False")
    experts, topk, group_topk = config.num_moe_experts, config.moe_router_topk, config.moe_router_group_topk
    if topk > min(MAX_TOPK, experts):
        raise ValueError(f"moe_router_topk is {topk}, must be at most {min(MAX_TOPK, experts)}")
    if group_topk:
        groups = config.moe_router_num_groups  # Megatron's config has checked that they divide the experts
        if group_topk > groups or topk % group_topk:
            raise ValueError(
                f"moe_router_group_topk is {group_topk}, must divide moe_router_topk {topk} and be at most the "
                f"{groups} groups"
            )
        if topk > group_topk * (experts // groups):
            raise ValueError(
                f"moe_router_topk is {topk}, must be at most the {group_topk * (experts // groups)} experts of "
                f"{group_topk} groups"
            )
    if sparse and config.moe_expert_capacity_factor is not None:
        raise ValueError(
            f"sparse is True with moe_expert_capacity_factor {config.moe_expert_capacity_factor}: must be False"
        )

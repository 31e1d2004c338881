"""Opt-in plugin: every MoE layer that Megatron builds in this process uses `EPTokenDispatcher`.

Use it with frameworks whose layer specs you do not want to change. `enable` replaces `MoELayer.__init__`, which all
layers of all pipeline stages have in common, and makes steps and checkpoints check for failed calls (`agreement`);
`disable` restores everything. Layers keep their class, names and parameters, so that checkpoints stay the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron import agreement
from megatron_ep.megatron.experts import KINDS, with_experts
from megatron_ep.megatron.layer import EPMoELayer, initialize

_original: Callable[..., None] | None = None


def enable(router: Callable[..., TopKRouter] | None = None, experts: str | None = None) -> None:
    """Makes every `MoELayer` built in this process from now on move its tokens with `EPTokenDispatcher`.

    No step and no checkpoint of Megatron then keeps results of a failed call: it raises an EPError instead
    (`agreement`). The first step logs the number of layers that dispatch, and their groups (logger
    megatron_ep.megatron.announce, level INFO; `announce.show` prints it). Call `enable` before the model is built;
    `megatron_ep.megatron.dispatcher.configure` sets the settings of buffers. Any dispatcher type may be declared, see
    `EPMoELayer`.

    router: builder that replaces Megatron's `TopKRouter` in these layers and in `EPMoELayer`s, e.g.
        `megatron_ep.megatron.router.fused_router`. Routers of other classes are kept; with None all are.
    experts: "grouped": `megatron_ep.megatron.experts.GroupedExperts` in these layers, too; None keeps Megatron's.

    Raises RuntimeError if it is already enabled; ValueError for other experts.
    """
    global _original
    if _original is not None:
        raise RuntimeError("plugin.enable(): already enabled; disable() first")
    if experts not in (None, *KINDS):
        raise ValueError(f"experts is {experts!r}, must be one of {', '.join(map(repr, KINDS))} or None")
    original = _original = MoELayer.__init__

    @functools.wraps(original)
    def with_ep_dispatcher(
        layer: MoELayer, config: TransformerConfig, submodules: MoESubmodules | None = None, *args: Any, **options: Any
    ) -> None:
        if router is not None and submodules is not None and submodules.router is TopKRouter:
            submodules = dataclasses.replace(submodules, router=router)
        submodules = submodules and with_experts(submodules, experts)
        build = functools.partial(original, layer)
        if not isinstance(layer, EPMoELayer):  # a layer of a spec creates its own EPTokenDispatcher
            build = functools.partial(initialize, layer, build)
        build(config, submodules, *args, **options)

    MoELayer.__init__ = with_ep_dispatcher
    agreement.enable()


def is_enabled() -> bool:
    """Returns whether layers built now use `EPTokenDispatcher`."""
    return _original is not None


def disable() -> None:
    """Makes layers built from now on Megatron's own again, and stops checking steps. Idempotent.

    Existing layers keep their dispatcher.
    """
    global _original
    if _original is not None:
        agreement.disable()
        MoELayer.__init__ = _original
        _original = None

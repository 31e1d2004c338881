"""`EPMoELayer`, Megatron's MoE layer with `EPTokenDispatcher`, and `ep_layer_spec`, which puts it into a model's spec.

Nothing in Megatron is patched: the layer is a subclass, and the spec is copied with that subclass in it.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from megatron.core import __version__ as megatron_version
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from megatron_ep.megatron import announce, flags, fp8_rows
from megatron_ep.megatron.dispatcher import EPTokenDispatcher, counts_on_device
from megatron_ep.megatron.experts import with_experts
from megatron_ep.megatron.replays import give_choices
from megatron_ep.megatron.router import BALANCING_TYPES, EPTopKRouter, keep_exact

# Before 0.19 Megatron treats experts that are not divided among ranks like other parameters, even if their tensor
# parallelism differs.
AVERAGES_WRONGLY = Version(megatron_version).release < (0, 19)

MANY_EXPERTS = 16  # on a rank, from which the launches of a product for each expert may take longer than the products

Spec = TypeVar("Spec")


class EPMoELayer(MoELayer):
    """Megatron's MoE layer, whose tokens are moved by `EPTokenDispatcher`.

    None of Megatron's own dispatchers runs, but the type in the config determines what Megatron validates and frees
    early. Declare "alltoall"; where Megatron would free too much (`flags.needs_flex`), the layer changes this in its
    config to "flex" with the backend "hybridep".

    config, submodules, layer_number: see Megatron's layer.
    pg_collection: process groups; None takes Megatron's global ones.
    options: arguments that newer versions of Megatron-Core pass on (is_mtp_layer, name).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **options: Any,
    ) -> None:
        initialize(self, super().__init__, config, submodules, layer_number, pg_collection, **options)


def initialize(
    layer: MoELayer,
    base: Callable[..., None],
    config: TransformerConfig,
    submodules: MoESubmodules | None,
    layer_number: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    **options: Any,
) -> None:
    """Runs Megatron's own constructor of a MoE layer, then replaces its dispatcher with `EPTokenDispatcher`.

    layer: the layer, not yet initialised.
    base: `MoELayer.__init__`, bound to it.
    config, submodules, layer_number, pg_collection, options: see `EPMoELayer`.

    Raises ValueError as `EPTokenDispatcher`, `fp8_rows.check_experts` and `chunks.enable` do; if the experts do not
    divide among the ranks; if their gradients would be wrong with this version of Megatron-Core; if
    moe_expert_rank_capacity_factor is set and the experts read their counts on the host.
    """
    if pg_collection is None:
        pg_collection = get_default_pg_collection()
    ranks = pg_collection.ep.size()
    etp, tp = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
    if AVERAGES_WRONGLY and ranks == 1 and etp != tp:
        raise ValueError(
            f"expert_tensor_parallel_size is {etp}, must be {tp} as tensor_model_parallel_size with "
            f"expert_model_parallel_size 1: megatron-core {megatron_version} would average the gradients of experts "
            "over the wrong ranks (0.19 is right)"
        )
    if config.num_moe_experts % ranks:
        raise ValueError(
            f"num_moe_experts is {config.num_moe_experts}, must be a multiple of the {ranks} ranks among which they "
            "are divided (expert_model_parallel_size)"
        )
    flags.declare(config)
    # The base class creates one of its own dispatchers. All-gather's needs no stream, no DeepEP and no buffers.
    declared = config.moe_token_dispatcher_type
    config.moe_token_dispatcher_type = "allgather"
    try:
        base(config, submodules, layer_number, pg_collection, **options)
    finally:
        config.moe_token_dispatcher_type = declared
    for module in layer.modules():  # experts keep copies of the config
        if isinstance(getattr(module, "config", None), TransformerConfig):
            module.config.moe_token_dispatcher_type = declared

    layer.token_dispatcher = EPTokenDispatcher(
        layer.num_local_experts, layer.local_expert_indices, config=config, pg_collection=pg_collection
    )
    fp8_rows.check_experts(layer.token_dispatcher, layer.experts)
    # These routers choose at most moe_router_topk experts for a token. Choices of other routers are measured.
    layer.token_dispatcher.trusts_router = type(layer.router) in (TopKRouter, EPTopKRouter)
    if layer.token_dispatcher.trusts_router and _takes_choice(config):
        give_choices(layer.router, layer.token_dispatcher.begin_routing)
    keep_exact(layer.router)
    # A projection after combine needs its input for the gradient of its weights, and other layers may have one.
    is_known = type(layer) in (MoELayer, EPMoELayer)
    layer.token_dispatcher.may_skip_combine = is_known and not getattr(config, "moe_latent_size", None)
    factor = layer.token_dispatcher.options.moe_expert_rank_capacity_factor
    if factor is not None and _needs_host_counts(layer.experts, config):
        raise ValueError(
            f"moe_expert_rank_capacity_factor is {factor}, but {type(layer.experts).__name__} wants to know on the "
            "host how many rows each expert has: use grouped experts (--ep-experts grouped, or experts='grouped'), "
            "TEGroupedMLP with use_transformer_engine_op_fuser or (from megatron-core 0.20 on, declared as flex + "
            "hybridep) moe_use_grouped_tensor, experts of your own that read tokens_per_expert on the device, or one "
            "expert a rank"
        )
    is_te = isinstance(layer.experts, megatron_experts.TEGroupedMLP)
    if is_te and layer.num_local_experts >= MANY_EXPERTS and not (config.fp8 or config.fp4):
        announce.once(
            f"{layer.num_local_experts} local experts of Transformer Engine: --ep-experts grouped computes them in two "
            "products, which the host launches at once (docs/megatron.md, Grouped experts)"
        )
    trace = sys.modules.get("megatron_ep.megatron.routing_trace")
    if trace is not None:  # otherwise it cannot be enabled
        trace.follow(layer, config, layer.token_dispatcher.tp_ep_group, ranks)
    if layer.shared_experts is not None and layer.shared_expert_overlap:
        layer.token_dispatcher.set_shared_experts(layer.shared_experts)
    layer.register_forward_pre_hook(_refuse_megatron_fsdp)
    if hasattr(layer, "_training_token_dispatcher"):  # an inference-optimized layer switches between two
        layer._training_token_dispatcher = layer.token_dispatcher
    delays = getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False)
    if delays or layer.token_dispatcher.options.moe_chunks > 1:
        from megatron_ep.megatron import chunks

        chunks.enable(layer, config)


def _refuse_megatron_fsdp(layer: MoELayer, _: Any) -> None:
    """Raises ValueError if Megatron-FSDP, which wraps a model after it is built, manages the layer's parameters."""
    marks = ("__fsdp_param__", "_mfsdp_parameter_group")
    if any(hasattr(parameter, mark) for parameter in layer.router.parameters() for mark in marks):
        raise ValueError(
            "use_megatron_fsdp is True, which has never run with this dispatcher: use Megatron's distributed "
            "optimizer, or torch's fully_shard"
        )


def _takes_choice(config: TransformerConfig) -> bool:
    """Returns whether Megatron's router and this project's can be given the choice of a forward pass: in the place of
    RouterReplay, if that has none."""
    balancing = config.moe_router_load_balancing_type
    return (
        set([balancing] if isinstance(balancing, str) else balancing) <= set(BALANCING_TYPES)
        and not config.moe_router_fusion
        and not config.moe_enable_routing_replay
    )


def _needs_host_counts(experts: torch.nn.Module, config: TransformerConfig) -> bool:
    """Returns whether Megatron's experts read tokens_per_expert on the host; False for experts of other classes."""
    kinds = [getattr(megatron_experts, name, None) for name in ("SequentialMLP", "GroupedMLP", "TEGroupedMLP")]
    if not isinstance(experts, tuple(kind for kind in kinds if kind is not None)):
        return False
    if isinstance(experts, megatron_experts.SequentialMLP):
        return experts.num_local_experts > 1  # a single expert takes all rows
    return not counts_on_device(config)


def ep_layer_spec(
    spec: Spec,
    pg_collection: ProcessGroupCollection | None = None,
    router: Callable[..., TopKRouter] | None = None,
    required: bool = True,
    experts: str | None = None,
) -> Spec:
    """Returns a copy of a spec in which every `MoELayer` is an `EPMoELayer`; everything else is unchanged.

    spec: a layer's ModuleSpec, a block's submodules or spec, a multi-token-prediction block's, or the MoE layer's own
        spec, as Megatron's `get_gpt_*_spec` functions return them.
    pg_collection: needed only with megatron-core 0.16 and process groups other than Megatron's global ones: that
        version passes a model's groups to no layer class but its own.
    router: builder of the layers' routers, e.g. `megatron_ep.megatron.router.fused_router`; None keeps the spec's.
    required: whether a spec without a `MoELayer` is an error; otherwise it is returned unchanged.
    experts: "grouped": `megatron_ep.megatron.experts.GroupedExperts`; None keeps the spec's.

    Raises ValueError if there is no `MoELayer` in the spec, and `required` is set; and as `experts.with_experts` does.
    """

    def replace_layer(node: Any) -> Any:
        """Returns the spec of an EPMoELayer for the spec of a MoELayer, None for anything else."""
        if isinstance(node, ModuleSpec) and get_module(node) in (MoELayer, EPMoELayer):
            params = node.params if pg_collection is None else {**node.params, "pg_collection": pg_collection}
            submodules = changed(node.submodules)
            return dataclasses.replace(node, module=EPMoELayer, params=params, submodules=submodules)
        if isinstance(node, functools.partial) and node.func in (MoELayer, EPMoELayer):
            submodules = changed(node.keywords["submodules"])
            return functools.partial(EPMoELayer, *node.args, **{**node.keywords, "submodules": submodules})
        return None

    def changed(submodules: MoESubmodules) -> MoESubmodules:
        submodules = with_experts(submodules, experts)
        return submodules if router is None else dataclasses.replace(submodules, router=router)

    copy = replaced(spec, replace_layer)
    if copy is spec and required:
        raise ValueError(f"spec: no MoELayer in this {type(spec).__name__}; is num_moe_experts set?")
    return copy


def replaced(spec: Spec, replace: Callable[[Any], Any]) -> Spec:
    """Returns a copy of a spec with some nodes replaced, at any depth; `spec` itself if there is nothing to replace.

    Only the path to a replaced node is copied: other nodes are the same objects, and shared nodes stay shared.

    replace: returns the replacement of a node, or None to keep the node and visit its children.
    """
    done: dict[int, Any] = {}

    def copy_of(node: Any) -> Any:
        if id(node) not in done:
            done[id(node)] = replace(node) or _rebuild(node, copy_of)
        return done[id(node)]

    return copy_of(spec)


def _rebuild(node: Any, copy_child: Callable[[Any], Any]) -> Any:
    if isinstance(node, functools.partial):
        args, keywords = copy_child(node.args), copy_child(node.keywords)
        is_same = args is node.args and keywords is node.keywords
        return node if is_same else functools.partial(node.func, *args, **keywords)
    if isinstance(node, dict):
        entries = {key: copy_child(value) for key, value in node.items()}
        return node if all(entries[key] is node[key] for key in node) else entries
    if isinstance(node, (list, tuple)):
        items = [copy_child(value) for value in node]
        if all(map(operator.is_, items, node)):
            return node
        return node._make(items) if hasattr(node, "_make") else type(node)(items)  # a named tuple needs separate items
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        children = {f.name: copy_child(getattr(node, f.name)) for f in dataclasses.fields(node) if f.init}
        changed = {name: child for name, child in children.items() if child is not getattr(node, name)}
        return dataclasses.replace(node, **changed) if changed else node
    return node

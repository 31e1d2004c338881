"""`GroupedExperts`: the experts of a Megatron MoE layer as two grouped products of torch, which read on the device how
many rows each expert has.

They take the place of TEGroupedMLP and SequentialMLP: same constructor, forward, initial values and checkpoints. A rank
has two parameters instead of two for each expert, the host launches two products instead of two for each expert, and
need not know the counts.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron.grouped_linear import GroupedLinear
from megatron_ep.megatron.grouped_products import GRANULARITY, add_bias, has_triton, require_product

TAKE_TE = "leave out grouped experts, and those of Transformer Engine do it"
REFUSED = {  # fields of TransformerConfig that must be unset, and what helps
    "fp8": f"they compute in params_dtype: {TAKE_TE}",
    "fp4": f"they compute in params_dtype: {TAKE_TE}",
    "quant_recipe": f"they compute in params_dtype: {TAKE_TE}",
    "use_te_activation_func": "leave it out",
    "use_transformer_engine_op_fuser": f"leave it out, or {TAKE_TE}",
    "moe_use_grouped_tensor": "leave it out: grouped experts read their counts on the device without it",
    "moe_single_grouped_weight": "leave it out: grouped experts have one weight without it",
    "moe_single_grouped_bias": "leave it out: grouped experts have one bias without it",
    "moe_mlp_glu_interleave_size": f"leave it out, or {TAKE_TE}",
    "moe_paged_stash": "leave it out",
    "cpu_offloading": f"leave it out, or {TAKE_TE}",
    "use_kitchen": "leave it out",
    "init_model_with_meta_device": "leave it out",
}
KINDS = ("megatron", "grouped")  # of experts: Megatron's own, and those of this module
OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}  # parts of experts, of the field offload_modules
_CLAMPS_SWIGLU = "clamp_value" in inspect.signature(weighted_bias_swiglu_impl).parameters


class GroupedExperts(MegatronModule):
    """The local experts of a rank, L of them: rows [R, H] in, rows [R, H] out.

    num_local_experts: L.
    config: the model's.
    submodules: ignored; Megatron passes those of the experts that it would have built.
    pg_collection: groups ep, expt_tp and expt_dp.
    name: ignored.
    draws_by_expert: the order in which weights are drawn: all of an expert, as SequentialMLP does, or all of a linear
        layer, as TEGroupedMLP does.

    Raises ValueError for settings that grouped experts do not have, for widths that are no multiple of 8, and as
    `grouped_products.require_product` does.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        draws_by_expert: bool = False,
    ) -> None:
        super().__init__(config=config)
        assert pg_collection is not None, "Megatron's MoE layers pass their groups"
        _check(config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        hidden = config.moe_latent_size or config.hidden_size
        ffn = config.moe_ffn_hidden_size // self.tp_group.size()
        for field, width in {
            "moe_latent_size" if config.moe_latent_size else "hidden_size": hidden,
            "ffn": ffn,
        }.items():
            if width % GRANULARITY:
                what = f"moe_ffn_hidden_size over {self.tp_group.size()} ranks" if field == "ffn" else field
                raise ValueError(f"{what} is {width}, must be a multiple of {GRANULARITY} for grouped experts")
        halves = 2 if config.gated_linear_unit else 1
        make = (config, pg_collection)
        self.linear_fc1 = GroupedLinear(num_local_experts, (halves * ffn, hidden), 0, halves, *make)
        self.linear_fc2 = GroupedLinear(num_local_experts, (hidden, ffn), 1, 1, *make)
        require_product(self.linear_fc1.weight.device, config.params_dtype)
        if config.perform_initialization:
            linears = ((self.linear_fc1, config.init_method), (self.linear_fc2, config.output_layer_init_method))
            draws = [(i, *of_linear) for of_linear in linears for i in range(num_local_experts)]
            for i, linear, init_method in sorted(draws, key=lambda draw: draw[0]) if draws_by_expert else draws:
                linear.initialize(i, init_method, draws_whole=draws_by_expert)
        self.activation_recompute = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )
        self._register_load_state_dict_pre_hook(_rename_sequential, with_module=True)

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Takes rows [R, H], grouped by expert, through their experts. Returns rows [R, H] and no bias.

        tokens_per_expert: int64 [L], rows of each expert, on the device of the rows or the host.
        permuted_probs: [R], which multiplies the activation, or with moe_apply_probs_on_input the rows.

        Rows behind the last expert's are not read; their results, gradients included, are undefined.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        require_product(rows.device, rows.dtype)
        offsets = _on(rows.device, tokens_per_expert).cumsum(0, dtype=torch.int32)
        if self.config.moe_apply_probs_on_input:
            rows, probs = (rows * probs).to(rows.dtype), torch.ones_like(probs)
        hidden = self.linear_fc1(rows.contiguous(), offsets)
        if self.activation_recompute:
            checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)  # False would ask for fp8
            hidden = checkpoint.checkpoint(self._activation, hidden, self.linear_fc1.bias, offsets, probs)
        else:
            hidden = self._activation(hidden, self.linear_fc1.bias, offsets, probs)
        output = self.linear_fc2(hidden, offsets)
        if self.activation_recompute:
            checkpoint.discard_output_and_register_recompute(output)
        if self.linear_fc2.bias is not None:
            output = add_bias(output, self.linear_fc2.bias, offsets, probs)
        return output, None

    def _activation(
        self, hidden: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """The activation as Megatron's experts compute it, row by row: [R, ffn] from [R, ffn or 2 ffn]."""
        config = self.config
        if bias is not None:
            hidden = add_bias(hidden, bias, offsets)
        clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
        if config.bias_activation_fusion:
            store = config.activation_func_fp8_input_store
            if config.activation_func == F.silu:
                if hidden.is_cuda and clamp is None and not store and has_triton():
                    from megatron_ep.megatron.grouped_swiglu import weighted_swiglu

                    return weighted_swiglu(hidden, probs, offsets)
                extra = (clamp,) if _CLAMPS_SWIGLU else ()
                return weighted_bias_swiglu_impl(hidden, None, probs, store, *extra)
            return weighted_bias_quick_geglu_impl(hidden, None, probs, store, offset, clamp)
        if config.activation_func == squared_relu and config.use_fused_weighted_squared_relu:
            return weighted_squared_relu_impl(hidden, probs)
        dtype = hidden.dtype
        if config.gated_linear_unit:
            gate, up = hidden.chunk(2, dim=-1)
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
            hidden = config.activation_func(gate) * (up + offset)
        else:
            hidden = config.activation_func(hidden)
        return (hidden * probs).to(dtype)

    def backward_dw(self) -> None:
        """Computes the gradients of weights that the backward pass has left, if the config delays them."""
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Returns the entries of a distributed checkpoint, which TEGroupedMLP and SequentialMLP write and read, too."""
        entries = self.linear_fc1.sharded_entries("linear_fc1", prefix, sharded_offsets, metadata)
        return entries | self.linear_fc2.sharded_entries("linear_fc2", prefix, sharded_offsets, metadata)


def with_experts(submodules: MoESubmodules, experts: str | None) -> MoESubmodules:
    """Returns the submodules of a MoE layer with other experts, in a copy.

    experts: "grouped": `GroupedExperts` in the place of TEGroupedMLP or SequentialMLP, which draw the same initial
        values; None or "megatron": those that are there.

    Raises ValueError for other names, and if "grouped" is to replace experts of another class.
    """
    if experts not in (None, *KINDS):
        raise ValueError(f"experts is {experts!r}, must be one of {', '.join(map(repr, KINDS))} or None")
    if experts != "grouped":
        return submodules
    given = submodules.experts
    kind = given.func if isinstance(given, functools.partial) else get_module(given)
    if kind is GroupedExperts:
        return submodules
    if kind not in (TEGroupedMLP, SequentialMLP):
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(
            f"experts is 'grouped', but the layer has {name}: grouped experts take the place of TEGroupedMLP and "
            "SequentialMLP alone"
        )
    options: dict[str, Any] = {"draws_by_expert": kind is SequentialMLP}
    if isinstance(given, ModuleSpec):
        return dataclasses.replace(submodules, experts=ModuleSpec(module=GroupedExperts, params=options))
    return dataclasses.replace(submodules, experts=functools.partial(GroupedExperts, **options))


def _check(config: TransformerConfig) -> None:
    """Raises ValueError for a setting that grouped experts do not have."""
    for field, instead in REFUSED.items():
        value = getattr(config, field, None)
        if value not in (None, False):
            raise ValueError(f"{field} is {value!r}, which grouped experts do not have: {instead}")
    if getattr(config, "fine_grained_activation_offloading", False):
        parts = sorted(OFFLOADED.intersection(config.offload_modules))
        if parts:
            raise ValueError(
                f"offload_modules has {', '.join(parts)}, which grouped experts do not have: leave that out, or "
                f"{TAKE_TE}"
            )
    if getattr(config, "expert_gtp_weight_remat_size", 1) > 1:
        raise ValueError(
            f"expert_gtp_weight_remat_size is {config.expert_gtp_weight_remat_size}, must be 1 for grouped experts"
        )
    if config.moe_apply_probs_on_input and config.moe_router_topk != 1:
        raise ValueError(f"moe_router_topk is {config.moe_router_topk}, must be 1 with moe_apply_probs_on_input")
    fused = config.gated_linear_unit and config.activation_func in (F.silu, quick_gelu)
    if config.bias_activation_fusion and not fused:
        raise ValueError(
            "bias_activation_fusion is True, and experts have a fused activation only for swiglu and quick geglu"
        )
    if config.add_bias_linear and config.activation_func == squared_relu and config.use_fused_weighted_squared_relu:
        raise ValueError("use_fused_weighted_squared_relu is True with add_bias_linear: give one of the two")


def _on(device: torch.device, counts: torch.Tensor) -> torch.Tensor:
    """Returns the counts on a device, without a wait of the host."""
    if device.type == "cpu" or counts.device == device:
        return counts.to(device)
    return counts.pin_memory().to(device, non_blocking=True)


def _rename_sequential(_: torch.nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Renames the keys of SequentialMLP, local_experts.0.linear_fc1.weight, .., to linear_fc1.weight0, ..."""
    start = f"{prefix}local_experts."
    for key in [key for key in state if key.startswith(start)]:
        expert, linear, kind = key[len(start) :].split(".", 2)
        value = state.pop(key)
        if kind in ("weight", "bias"):
            state[f"{prefix}{linear}.{kind}{expert}"] = value

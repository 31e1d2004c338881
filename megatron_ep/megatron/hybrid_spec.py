"""`--spec megatron_ep.megatron.hybrid_spec hybrid`: Megatron's hybrid stack (Mamba, attention, MLP and MoE layers),
with our dispatcher in its MoE layers. Requires Transformer Engine and Triton, as the stack does."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ep.megatron.layer import ep_layer_spec


def _stack() -> ModuleSpec:
    if find_spec("megatron.core.models.hybrid") is not None:
        return import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    return import_module("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec  # before 0.18


hybrid: ModuleSpec = ep_layer_spec(_stack())

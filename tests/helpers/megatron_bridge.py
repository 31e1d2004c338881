"""Megatron-Bridge on a machine without a GPU: its recipes, of models as deep and as wide as a test can train.

Version 0.6.2 needs Python 3.12, and of all that it asks for: megatron-core 0.19, transformers, megatron-energon,
nvidia-modelopt, tensorboard, omegaconf, hydra-core, peft, datasets, accelerate, diffusers, einops. It is
installed with --no-deps.
"""

import importlib.machinery
import sys
import types
from unittest import mock

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from skips import missing

NEEDED = missing("megatron.bridge", "megatron.energon", "modelopt", "tensorboard")
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SMALL |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "max_position_embeddings": 64}
# Model, recipe, what Hugging Face calls the model, and its own names.
RECIPES = {
    "Qwen3-30B-A3B": (
        ("qwen.qwen3_moe", "qwen3_30b_a3b_pretrain_config"),
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        {"num_experts": 8, "num_key_value_heads": 2, "head_dim": 8},
    ),
    "DeepSeek-V3": (
        ("deepseek.deepseek_v3", "deepseek_v3_pretrain_config"),
        ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
        {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16},
    ),
}
# What needs a GPU or Transformer Engine; one stage, which has all layers; numbers that can be compared.
ON_HOST = {"transformer_impl": "local", "moe_grouped_gemm": False, "moe_permute_fusion": False, "mtp_num_layers": None}
ON_HOST |= {"moe_router_fusion": False}
ON_HOST |= {"cross_entropy_fusion_impl": "native", "gradient_accumulation_fusion": False, "apply_rope_fusion": False}
ON_HOST |= {"cross_entropy_loss_fusion": False, "bias_activation_fusion": False, "bias_dropout_fusion": False}
ON_HOST |= {"masked_softmax_fusion": False, "persist_layer_norm": False}
ON_HOST |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "pipeline_model_parallel_layout": None}
ON_HOST |= {"expert_model_parallel_size": 4, "sequence_parallel": False, "seq_length": 16}
ON_HOST |= {"cuda_graph_impl": "none", "cuda_graph_modules": [], "use_te_rng_tracker": False}
ON_HOST |= {"bf16": False, "params_dtype": torch.float32, "moe_router_dtype": "fp32"}


class CoreAttention(DotProductAttention):
    """Megatron's, which on the host takes no widths of latent attention: keys and values must have one."""

    def __init__(self, *arguments, k_channels=None, v_channels=None, **options):
        assert k_channels == v_channels
        super().__init__(*arguments, **options)


class _AnyLayer(types.ModuleType):
    """A module of Transformer Engine in which every name is a layer."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})


def bridge():
    """Imports it. Its adapters derive from layers of Transformer Engine, which are never made here: where that is not
    installed, names stand for them while they are imported, once Megatron-Core has seen that it is not."""
    try:
        return importlib.import_module("megatron.bridge")
    except ModuleNotFoundError as error:
        if error.name != "transformer_engine":
            raise
    engine, layers, ops = (_AnyLayer(f"transformer_engine{name}") for name in ("", ".pytorch", ".pytorch.ops"))
    engine.pytorch, layers.ops = layers, ops
    for module in (engine, layers, ops):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    with mock.patch.dict(sys.modules):
        sys.modules.update({module.__name__: module for module in (engine, layers, ops)})
        before = set(sys.modules)
        found = importlib.import_module("megatron.bridge")
        imported = {name: module for name, module in sys.modules.items() if name not in before}
    sys.modules.update(imported)
    return found


def recipe(name):
    """Returns the ConfigContainer of a recipe, whose model is a small one of the same kind."""
    (module, function), (config, architecture), own = RECIPES[name]
    given = getattr(importlib.import_module("transformers"), config)(**SMALL, **own, architectures=[architecture])
    AutoBridge = bridge().AutoBridge
    with mock.patch.object(AutoBridge, "from_hf_pretrained", lambda *_, **__: AutoBridge.from_hf_config(given)):
        container = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), function)()
    for field, value in ON_HOST.items():
        assert hasattr(container.model, field), field
        setattr(container.model, field, value)
    if container.model.multi_latent_attention:
        container.model.kv_channels = container.model.v_head_dim
    return container


def megatrons(config):
    """The layers that recipes ask for, without Transformer Engine."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)


def on_host():
    """While it is open, layers without Transformer Engine have a core attention that fits latent attention."""
    return mock.patch.object(LocalSpecProvider, "core_attention", lambda _: CoreAttention)

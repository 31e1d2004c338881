"""Megatron's hybrid model (`HybridModel`, before 0.18 `MambaModel`) on the host: attention, MLP and MoE layers of the
local spec, since Megatron's own stack is of Transformer Engine's layers, and Mamba's need a GPU."""

import dataclasses
import importlib
from importlib.util import find_spec
from unittest import mock

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer

HAS_HYBRID = find_spec("megatron.core.models.hybrid") is not None


def stack():
    """The spec of a stack."""
    moe, dense = (get_gpt_layer_local_spec(experts, normalization="RMSNorm") for experts in (8, None))
    nothing = {"mlp": IdentityOp, "pre_mlp_layernorm": IdentityOp, "mlp_bda": IdentityFuncOp}
    attention = dataclasses.replace(dense, submodules=dataclasses.replace(dense.submodules, **nothing))
    nothing = {"self_attention": IdentityOp, "input_layernorm": IdentityOp, "self_attn_bda": IdentityFuncOp}
    mlp = dataclasses.replace(dense, submodules=dataclasses.replace(dense.submodules, **nothing))
    experts = ModuleSpec(MoETransformerLayer, submodules=dataclasses.replace(moe.submodules, **nothing))
    name = "models.hybrid.hybrid_block" if HAS_HYBRID else "ssm.mamba_block"
    block = importlib.import_module(f"megatron.core.{name}")
    block.TENorm = LocalSpecProvider().layer_norm(rms_norm=True)  # behind the last layer
    name = "HybridStack" if HAS_HYBRID else "MambaStack"
    layers = {"attention_layer": attention, "mlp_layer": mlp, "moe_layer": experts}
    if HAS_HYBRID:
        layers["mtp_block_spec"] = _prediction(block.TENorm)
    return ModuleSpec(getattr(block, name), submodules=getattr(block, f"{name}Submodules")(**layers))


def _prediction(norm):
    """Of a multi-token-prediction block, whose layers are those of the stack."""
    projection = LocalSpecProvider().column_parallel_linear()
    parts = {"enorm": norm, "hnorm": norm, "layer_norm": norm, "eh_proj": projection, "mtp_model_layer": None}
    layer = mtp.MultiTokenPredictionLayerSubmodules(**parts)
    layers = [ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=layer)]
    return ModuleSpec(
        mtp.MultiTokenPredictionBlock, submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    )


def model(config, spec, vocabulary, length, pattern, **options):
    """The whole model; pattern: for each layer * (attention), - (MLP) or E (experts), from 0.18 on
    behind / those of multi-token prediction; options: of its class."""
    if HAS_HYBRID:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        # From 0.20 on it asks for a class of Transformer Engine's, for which a mock stands where that is missing.
        with mock.patch.object(mtp, "is_inference_column_parallel_linear", lambda _: False, create=True):
            return HybridModel(config, spec, vocabulary, length, hybrid_layer_pattern=pattern, **options)
    from megatron.core.models.mamba.mamba_model import MambaModel

    class Model(MambaModel):
        def forward(self, *args, loss_mask=None, **kwargs):  # pretrain_gpt.py gives one, and this model takes none
            return super().forward(*args, **kwargs)

    return Model(config, spec, vocabulary, length, hybrid_override_pattern=pattern, **options)


def train_it():
    """From now on pretrain_gpt.py trains this model, as pretrain_mamba.py and pretrain_hybrid.py do."""
    if HAS_HYBRID:
        from megatron.training import argument_utils

        argument_utils.gpt_config_from_args = _config
    else:
        import gpt_builders

        gpt_builders.gpt_builder = _builder


def _config(args):
    from megatron.training import argument_utils

    made = argument_utils.hybrid_config_from_args(args)
    made.hybrid_stack_spec = stack()
    return made


def _builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    from megatron.training.arguments import core_transformer_config_from_args

    made = model(
        config or core_transformer_config_from_args(args),
        stack(),
        args.padded_vocab_size,
        args.max_position_embeddings,
        args.hybrid_override_pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
    )
    made.vp_stage = vp_stage
    return made

"""`megatron_ep.megatron.spec`: what Megatron-LM and Megatron-Bridge call by name."""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import functools

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron import plugin, spec
from megatron_ep.megatron.layer import EPMoELayer
from megatron_ep.megatron.router import fused_router


def _config(**options):
    return TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_moe_experts": 8,
            "moe_ffn_hidden_size": 32,
            "moe_layer_freq": [0, 0, 1, 1],
            "add_bias_linear": False,
            "transformer_impl": "local",
            "use_cpu_initialization": True,
            **options,
        }
    )


@pytest.fixture(autouse=True)
def one_stage(monkeypatch):
    """No groups: the first pipeline stage, of two where the config says so."""
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    yield
    plugin.disable()


def _classes(block):
    mlps = [layer.submodules.mlp for layer in block.layer_specs]
    return [mlp.func if isinstance(mlp, functools.partial) else mlp.module for mlp in mlps]


@pytest.mark.parametrize("holder", [lambda config: config, lambda config: SimpleNamespace(transformer=config)])
def test_a_block_with_our_layers(holder):
    classes = _classes(spec.gpt(holder(_config())))
    assert classes[2:] == [EPMoELayer, EPMoELayer] and EPMoELayer not in classes[:2]
    assert not plugin.is_enabled()


def test_the_fused_router_by_name():
    mlp = spec.gpt_fused_router(_config()).layer_specs[3].submodules.mlp
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    assert submodules.router is fused_router


def test_a_pipeline_stage_of_dense_layers():
    block = spec.gpt(_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32))
    assert len(block.layer_specs) == 2 and not {EPMoELayer, MoELayer} & set(_classes(block))


def test_multi_token_prediction_needs_the_plugin():
    with pytest.raises(ValueError, match=r"mtp_num_layers is 1, .*plugin\.enable"):
        spec.gpt(_config(mtp_num_layers=1))
    assert not plugin.is_enabled(), "a spec touches nothing of the process"
    plugin.enable()
    assert _classes(spec.gpt(_config(mtp_num_layers=1)))[2:] == [EPMoELayer, EPMoELayer]


def test_a_dense_model_is_an_error():
    dense = _config(num_moe_experts=None, moe_ffn_hidden_size=None, moe_layer_freq=1, ffn_hidden_size=64)
    with pytest.raises(ValueError, match="num_moe_experts is None"):
        spec.gpt(dense)

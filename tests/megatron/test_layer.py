"""`ep_layer_spec`: which parts of a spec change, that nothing else does, and that models are built from the result."""

import copy
import functools
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron import layer as layers
from megatron_ep.megatron import plugin
from megatron_ep.megatron import spec as by_name
from megatron_ep.megatron.dispatcher import EPTokenDispatcher
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import EPMoELayer, ep_layer_spec
from megatron_ep.megatron.router import fused_router

pytestmark = pytest.mark.numerical


def _config(**options):
    """Of a model of two dense layers and two MoE layers, where no groups are needed."""
    sizes = dict(num_layers=4, hidden_size=32, num_attention_heads=4, num_moe_experts=8, moe_ffn_hidden_size=32)
    rest = dict(moe_layer_freq=[0, 0, 1, 1], add_bias_linear=False, transformer_impl="local")
    return TransformerConfig(**{**sizes, **rest, "use_cpu_initialization": True, **options})


def _block_spec(moe_layer_freq):
    config = _config(num_layers=len(moe_layer_freq), moe_layer_freq=moe_layer_freq)
    return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=0)


def _layer_class(mlp):
    return mlp.func if isinstance(mlp, functools.partial) else mlp.module


def _submodules(mlp):
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def _classes(block):
    return [_layer_class(layer.submodules.mlp) for layer in block.layer_specs]


def test_block_spec_replaces_the_moe_layers_and_nothing_else():
    spec = _block_spec([0, 1, 1])
    before = copy.copy(spec.layer_specs)
    ours = ep_layer_spec(spec)

    assert ours.layer_specs[0] is spec.layer_specs[0], "a dense layer stays the same object"
    assert _classes(ours)[1:] == [EPMoELayer] * 2
    assert _classes(spec)[1:] == [MoELayer] * 2, "the argument is not changed"
    for layer, original in zip(ours.layer_specs[1:], spec.layer_specs[1:], strict=True):
        assert layer.submodules.self_attention is original.submodules.self_attention
        assert _submodules(layer.submodules.mlp) is _submodules(original.submodules.mlp)
    assert ours.layer_norm is spec.layer_norm
    assert all(a is b for a, b in zip(spec.layer_specs, before, strict=True))


class _Pair(NamedTuple):
    mlp: object
    other: object


def test_tuples_are_looked_into():
    moe, other = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False), object()
    pair, (first, second), partial = ep_layer_spec(
        [_Pair(moe, other), (other, moe), functools.partial(GPTModel, moe, other=other)]
    )
    assert isinstance(pair, _Pair) and pair.other is first is other
    assert all(_layer_class(node) is EPMoELayer for node in (pair.mlp, second, *partial.args))
    dense = (other,)
    assert ep_layer_spec([dense, moe])[0] is dense


def test_layers_that_share_a_spec_still_share_it():
    spec = _block_spec([1, 1, 1])
    assert spec.layer_specs[0] is spec.layer_specs[2]
    ours = ep_layer_spec(spec)
    assert ours.layer_specs[0] is ours.layer_specs[2]


def test_layer_spec_and_moe_spec():
    layer = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
    assert _layer_class(ep_layer_spec(layer).submodules.mlp) is EPMoELayer
    moe = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    assert _layer_class(ep_layer_spec(moe)) is EPMoELayer


@pytest.mark.parametrize("spec", [_block_spec([0, 1]), get_moe_module_spec(use_te=False, num_experts=8)])
def test_another_router(spec):
    ours = ep_layer_spec(spec, router=fused_router)
    moe, original = (
        node.layer_specs[1].submodules.mlp if hasattr(node, "layer_specs") else node for node in (ours, spec)
    )
    assert _submodules(moe).router is fused_router
    assert _submodules(original).router is TopKRouter
    assert _submodules(moe).experts is _submodules(original).experts


def test_a_module_named_by_its_path_is_found():
    spec = ModuleSpec(module=("megatron.core.transformer.moe.moe_layer", "MoELayer"))
    assert ep_layer_spec(spec).module is EPMoELayer


def test_applying_it_twice_changes_nothing_more():
    assert _classes(ep_layer_spec(ep_layer_spec(_block_spec([0, 1]))))[1] is EPMoELayer


def test_multi_token_prediction_spec(monkeypatch):
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda **_: True)  # one stage, no groups needed
    config = _config(num_layers=1, moe_layer_freq=1, mtp_num_layers=1)
    layer = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False)
    spec = gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, pp_rank=0)
    ours = ep_layer_spec(spec)
    assert _layer_class(_inner_layer(ours).submodules.mlp) is EPMoELayer
    assert _layer_class(_inner_layer(spec).submodules.mlp) is MoELayer


def _inner_layer(mtp_spec):
    submodules = mtp_spec.layer_specs[0].submodules
    return getattr(submodules, "mtp_model_layer", None) or submodules.transformer_layer


@pytest.mark.parametrize("spec", [[], ModuleSpec(module=torch.nn.Linear)])
def test_a_spec_without_a_moe_layer_is_an_error(spec):
    with pytest.raises(ValueError, match="no MoELayer"):
        ep_layer_spec(spec)


def test_a_dense_model_is_an_error():
    with pytest.raises(ValueError, match="num_moe_experts"):
        ep_layer_spec(gpt_layer_specs.get_gpt_layer_local_spec())
    dense = _config(num_moe_experts=None, moe_ffn_hidden_size=None, moe_layer_freq=1, ffn_hidden_size=64)
    with pytest.raises(ValueError, match="num_moe_experts is None"):
        by_name.gpt(dense)


# ---- what Megatron-LM and Megatron-Bridge call by name


@pytest.fixture
def one_stage(monkeypatch):
    """No groups: the first pipeline stage, of two where the config says so."""
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    yield
    plugin.disable()


@pytest.mark.parametrize("holder", [lambda config: config, lambda config: SimpleNamespace(transformer=config)])
def test_a_block_with_our_layers(one_stage, holder):
    classes = _classes(by_name.gpt(holder(_config())))
    assert classes[2:] == [EPMoELayer, EPMoELayer] and EPMoELayer not in classes[:2]
    assert _submodules(by_name.gpt_fused_router(_config()).layer_specs[3].submodules.mlp).router is fused_router
    assert not plugin.is_enabled()


def test_a_pipeline_stage_of_dense_layers(one_stage):
    block = by_name.gpt(_config(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32))
    assert len(block.layer_specs) == 2 and not {EPMoELayer, MoELayer} & set(_classes(block))


def test_multi_token_prediction_needs_the_plugin(one_stage):
    with pytest.raises(ValueError, match=r"mtp_num_layers is 1, .*plugin\.enable"):
        by_name.gpt(_config(mtp_num_layers=1))
    assert not plugin.is_enabled(), "a spec touches nothing of the process"
    plugin.enable()
    assert _classes(by_name.gpt(_config(mtp_num_layers=1)))[2:] == [EPMoELayer, EPMoELayer]


@run_on("four_ranks")
def test_the_declared_dispatcher_type_stays_declared():
    join_layout(1, 4)
    config = make_config(moe_shared_expert_intermediate_size=16)
    layer = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=8))(config=config)
    assert isinstance(layer.token_dispatcher, EPTokenDispatcher) and layer.config is config
    types = {module.config.moe_token_dispatcher_type for module in layer.modules() if hasattr(module, "config")}
    assert types == {"alltoall"}


@run_on("four_ranks")
def test_experts_that_do_not_divide_are_refused_before_megatrons_assertion():
    join_layout(1, 2)
    spec = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=7))
    with pytest.raises(ValueError, match="num_moe_experts is 7, must be a multiple of the 2 ranks"):
        spec(config=make_config(num_moe_experts=7))


@pytest.mark.parametrize(
    ("wrong", "experts", "rest", "ranks"), [(True, 1, 2, 1), (False, 1, 2, 1), (True, 1, 2, 2), (True, 2, 2, 1)]
)
def test_layouts_whose_gradients_megatron_averages_over_the_wrong_ranks(monkeypatch, wrong, experts, rest, ranks):
    monkeypatch.setattr(layers, "AVERAGES_WRONGLY", wrong)
    sizes = {"expert_tensor_parallel_size": experts, "tensor_model_parallel_size": rest}
    config = SimpleNamespace(num_moe_experts=4, moe_token_dispatcher_type="alltoall", **sizes)
    groups = SimpleNamespace(ep=SimpleNamespace(size=lambda: ranks))
    is_refused = wrong and experts != rest and ranks == 1
    match = "expert_tensor_parallel_size is 1, must be 2" if is_refused else "of the layer itself"
    with pytest.raises(ValueError, match=match):
        layers.initialize(None, mock.Mock(side_effect=ValueError("of the layer itself")), config, None, 1, groups)


@run_on("four_ranks")
def test_megatrons_fsdp_is_refused():
    join_layout(1, 4)
    layer = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=8))(config=make_config())
    layer.router.weight.__fsdp_param__ = True  # as Megatron-FSDP marks what it takes
    with pytest.raises(ValueError, match="use_megatron_fsdp is True, which has never run with this dispatcher"):
        layer(torch.ones(3, 1, 32, dtype=torch.float64))


@pytest.mark.parametrize("router", [None, fused_router])
@run_on("four_ranks")
def test_what_a_router_sums_stays_exact_in_bf16(router):
    """Tokens of each expert above 256, for the bias and for global auxiliary losses, and the bias itself, whatever
    converts the model."""
    join_layout(1, 4)
    config = make_config(
        params_dtype=torch.bfloat16,
        bf16=True,
        moe_router_dtype="fp32",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=1e-3,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer = ep_layer_spec(spec, router=router)(config=config)
    bias = torch.linspace(0, 1e-2, config.num_moe_experts) / 3
    state = {**layer.state_dict(), "router.expert_bias": bias}
    layer.load_state_dict(state)
    model = Float16Module(config, layer)
    for convert in (None, lambda: model.half(), lambda: model.bfloat16(), lambda: model.to(torch.bfloat16)):
        if convert is not None:
            convert()
        assert {buffer.dtype for buffer in layer.router.buffers()} == {torch.float32}
        assert torch.equal(layer.router.expert_bias, bias)
    model.load_state_dict(state)
    assert torch.equal(layer.router.expert_bias, bias) and layer.router.weight.dtype == torch.bfloat16
    tokens, passes = 700, 4
    counts = torch.zeros(config.num_moe_experts, dtype=torch.int64)

    def count(_, given, chosen):
        nonlocal counts
        ids = chosen[1].nonzero()[:, 1] if chosen[1].dtype == torch.bool else chosen[1].flatten()
        counts += torch.bincount(ids, minlength=len(counts))

    layer.router.register_forward_hook(count)
    for _ in range(passes):
        layer(torch.randn(tokens, 1, config.hidden_size, dtype=torch.bfloat16).requires_grad_())
    assert counts.max() > 256 and torch.equal(layer.router.local_tokens_per_expert.long(), counts)
    in_all = layer.router.global_tokens_per_expert  # of choices without the bias
    assert in_all.max() > 1024 and in_all.sum() == dist.get_world_size() * passes * tokens * config.moe_router_topk
    assert layer.double().router.expert_bias.dtype == torch.float64 and layer.to("meta").router.expert_bias.is_meta

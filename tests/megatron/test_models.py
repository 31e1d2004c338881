"""Whole models that somebody else builds: Megatron's hybrid model, and one of a provider as Megatron-Bridge has it. The
loss and every gradient against the same model with Megatron's own dispatcher."""

import dataclasses
import importlib
import inspect
import sys
import types
from unittest import mock

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import hybrid_stack
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron import plugin, shared_buffers, spec
from megatron_ep.megatron.dispatcher import EPTokenDispatcher
from megatron_ep.megatron.equivalence import join_layout, make_config

PATTERN, PREDICTED = "*-E*E", "/*E" if hybrid_stack.HAS_HYBRID else ""  # attention, MLP, MoE; older ones predict none
VOCABULARY, LENGTH = 32, 12
WHOLE = {"params_dtype": torch.float32, "moe_router_dtype": "fp32"}


def _losses_and_gradients(model, ours):
    """Of a micro-batch of this rank's own; the number of MoE layers with our dispatcher, or Megatron's."""
    dispatchers = [module.token_dispatcher for module in model.modules() if hasattr(module, "token_dispatcher")]
    assert dispatchers and all(isinstance(each, EPTokenDispatcher) == ours for each in dispatchers)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens, labels = torch.randint(VOCABULARY, (2, 2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH).expand(2, -1)
    losses = model(tokens, positions, None, labels=labels)
    losses.mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"losses": losses.detach(), **gradients}, len(dispatchers)


def _check(theirs, *models):
    """The same weights, losses and gradients."""
    expected, layers = _losses_and_gradients(theirs, False)
    for model in models:
        model.load_state_dict(theirs.state_dict())
        actual, count = _losses_and_gradients(model, True)
        assert count == layers and actual.keys() == expected.keys()
        for name, value in expected.items():
            scale = max(value.abs().max().item(), 1e-6)
            difference = (actual[name] - value).abs().max().item()
            assert difference < 1e-5 * scale, f"{name}: {difference} of {scale}"
    shared_buffers.close_buffers()


def _hybrid_model(stack):
    predicted = {"mtp_num_layers": 1} if PREDICTED else {}
    options = {"num_layers": len(PATTERN), "normalization": "RMSNorm", "ffn_hidden_size": 48, **predicted, **WHOLE}
    return hybrid_stack.model(make_config(**options), stack, VOCABULARY, LENGTH, PATTERN + PREDICTED)


def _spec_by_name(stack):
    """What `--spec megatron_ep.megatron.hybrid_spec hybrid` names, were `stack` Megatron's."""
    name = f"megatron.core.models.{'hybrid.hybrid' if hybrid_stack.HAS_HYBRID else 'mamba.mamba'}_layer_specs"
    module = types.ModuleType(name)
    module.hybrid_stack_spec = module.mamba_stack_spec = stack
    with mock.patch.dict(sys.modules, {name: module}):
        sys.modules.pop("megatron_ep.megatron.hybrid_spec", None)
        return importlib.import_module("megatron_ep.megatron.hybrid_spec").hybrid


@run_on("four_ranks")
def test_a_hybrid_model():
    join_layout(1, 4)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    stack = hybrid_stack.stack()
    theirs = _hybrid_model(stack)
    plugin.enable()
    try:
        by_plugin = _hybrid_model(stack)
    finally:
        plugin.disable()
    by_name = _hybrid_model(_spec_by_name(stack))
    _check(theirs, by_plugin, by_name)


@dataclasses.dataclass
class Provider(TransformerConfig):
    """As much of Megatron-Bridge's GPTModelProvider as a layer spec meets: it is the configuration itself, and calls
    the spec with it, and with the virtual pipeline stage if the spec takes one."""

    transformer_layer_spec: object = None
    vocab_size: int = VOCABULARY

    def provide(self, vp_stage=None):
        own = self.transformer_layer_spec
        takes_stage = "vp_stage" in inspect.signature(own).parameters
        layers = own(self, vp_stage=vp_stage) if takes_stage else own(self)
        return GPTModel(self, layers, self.vocab_size, LENGTH, position_embedding_type="rope")


def _provided(layers):
    given = make_config(num_layers=3, moe_layer_freq=[0, 1, 1], ffn_hidden_size=48, transformer_impl="local", **WHOLE)
    names = {field.name for field in dataclasses.fields(TransformerConfig) if field.init}
    fields = {name: value for name, value in vars(given).items() if name in names}
    return Provider(**fields, transformer_layer_spec=layers)


@run_on("four_ranks")
def test_a_provider_that_calls_the_spec():
    join_layout(1, 4)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    _check(_provided(_megatrons).provide(), _provided(spec.gpt).provide())


def _megatrons(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)

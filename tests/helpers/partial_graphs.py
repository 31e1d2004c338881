"""CUDA graphs of a part of a TransformerLayer (cuda_graph_impl "transformer_engine"), without a GPU.

A graph runs no Python when it is replayed. Here a second layer with the same parameters runs the captured part, so that
the layer itself, as with a graph, has the Python state of its capture, and goes on with what the graph returns.
"""

import contextlib
import dataclasses
from unittest import mock

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random
from megatron.core.transformer import cuda_graphs, enums, transformer_layer
from megatron.core.transformer.moe import moe_layer, moe_utils
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

FIELD = "cuda_graph_modules" if hasattr(enums, "CudaGraphModule") else "cuda_graph_scope"  # before 0.19
Part = enums.CudaGraphModule if hasattr(enums, "CudaGraphModule") else enums.CudaGraphScope


class _LatentProjection(torch.nn.Linear):
    """Of Transformer Engine: returns a bias, too."""

    def __init__(self, inputs, outputs, *, config, **_):
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def forward(self, x):
        return super().forward(x), None


def make_layer(config, seed, wrapped=lambda spec: spec):
    """A TransformerLayer of the local spec with experts; wrapped: changes its spec."""
    spec = wrapped(get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm"))
    torch.manual_seed(seed)
    with mock.patch.multiple(moe_layer, HAVE_TE=True, TELinear=_LatentProjection, create=True):
        return spec.module(config, spec.submodules, layer_number=1).train()


@contextlib.contextmanager
def _capturing():
    with contextlib.ExitStack() as stack:
        for module in (cuda_graphs, transformer_layer, moe_utils):
            stack.enter_context(mock.patch.object(module, "is_graph_capturing", lambda: True))
        yield


def _share(layer, twin):
    for module, of_twin in zip(layer.modules(), twin.modules(), strict=True):
        of_twin._parameters, of_twin._buffers = module._parameters, module._buffers


def graphed(layer, twin, x):
    """Gives the layer a graph, captured with x, of what its config names. Returns the number of the graph's replays, in
    a list that grows. twin: a second layer of the same config."""
    _share(layer, twin)
    with _capturing():
        layer(x, attention_mask=None)
    replays = []

    def replay(x, **_):
        replays.append(x)
        with _capturing():
            return twin(x, attention_mask=None)

    layer.cuda_graphs, layer.cuda_graph_manual_hooks = [replay], []
    return replays


def make_local_layer(config, seed, wrapped):
    """A MoETransformerLayer, as hybrid models have it, for a graph of Megatron's own (cuda_graph_impl "local")."""

    def local(spec):
        return dataclasses.replace(wrapped(spec), module=MoETransformerLayer)

    config.cuda_graph_impl = "local"
    with mock.patch.object(MoETransformerLayer, "create_mcore_cudagraph_manager", lambda *_: None):
        layer = make_layer(config, seed, local)
    layer.use_partial_cudagraphs, layer._router_dtoh_event = True, torch.cuda.Event()
    layer.moe_layer_recompute = "moe" in (config.recompute_modules or ())
    return layer


def graphed_locally(layer, twin, x):
    """As `graphed`, with such a layer."""
    _share(layer, twin)
    layer(x, attention_mask=None)
    replays, attributes = [], "token_dispatcher_attrs"  # of versions before 0.19
    if hasattr(layer, attributes):
        setattr(twin, attributes, getattr(layer, attributes))

    def replay(x, **options):
        replays.append(x)
        outputs = twin._forward_mlp_router(x, **options)
        layer.pre_mlp_norm_checkpoint = getattr(twin, "pre_mlp_norm_checkpoint", None)
        return outputs

    layer._forward_mlp_router = replay
    return replays


@contextlib.contextmanager
def without_engine():
    """While it is open, neither a graph's arguments nor recomputation of a layernorm ask for Transformer Engine."""
    replay_args = "_get_te_cuda_graph_replay_args"
    manager = mock.Mock(is_fp8_enabled=lambda: False)
    calls = ("fp8_autocast", "activation_recompute_forward")
    nothing = {name: lambda *_, **__: contextlib.nullcontext() for name in calls if not hasattr(random, name)}
    if not hasattr(random, "FP8GlobalStateManager"):
        nothing["FP8GlobalStateManager"] = manager
    with (
        mock.patch.object(TransformerLayer, replay_args, lambda _, *args, **__: (args, {})),
        mock.patch.multiple(random, create=True, **nothing),
    ):
        yield

"""Megatron-Core's own calls of DeepEP, over ours, on CPU tensors."""

import contextlib
import importlib.util
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nightly import at_night
from run_on import run_on
from skips import missing

import megatron_ep.deep_ep

pytestmark = pytest.mark.needs(missing("megatron.core"))

RECOMPUTE = {"moe_router_topk": 3, "recompute_granularity": "selective", "recompute_modules": ["moe"]}
SHARED = {"moe_router_topk": 3, "moe_shared_expert_intermediate_size": 24}
FUSED = "megatron.core.transformer.moe.fused_a2a"
FUSED_NAMES = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
MICROBATCHES, LAYERS, VOCABULARY, LENGTH = 3, 2, 50, 12


def fused_a2a():
    """Megatron's module, imported anew: it looks for deep_ep once."""
    megatron_ep.deep_ep.install()
    spec = importlib.util.find_spec(FUSED)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.numerical
@pytest.mark.parametrize("options", [{}, RECOMPUTE], ids=["plain", "recompute"])
@run_on("four_ranks")
def test_flex_layer(options):
    """A MoE layer with Megatron's flex dispatcher over ours, and with its all-to-all: outputs and all gradients."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_ep.megatron import equivalence

    equivalence.join_layout(1, 4)
    fused = fused_a2a()
    assert fused.HAVE_DEEP_EP and not fused.HAVE_HYBRIDEP
    with mock.patch.multiple(token_dispatcher, **{name: getattr(fused, name) for name in FUSED_NAMES}):
        first, results = None, []
        for dispatcher in ("alltoall", "flex"):
            config = equivalence.make_config(
                moe_token_dispatcher_type=dispatcher,
                moe_flex_dispatcher_backend="deepep",
                moe_router_dtype="fp32",
                params_dtype=torch.float32,
                **options,
            )
            spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
            tensor_parallel.model_parallel_cuda_manual_seed(7)
            layer = spec(config=config)
            first = first or layer
            layer.load_state_dict(first.state_dict())
            generator = torch.Generator().manual_seed(dist.get_rank())
            x, grad = torch.randn(2, 9 + dist.get_rank(), 1, config.hidden_size, generator=generator)
            x.requires_grad_()
            y, _ = layer(x)
            y.backward(grad)
            results.append([y.detach(), x.grad, *(p.grad for _, p in sorted(layer.named_parameters()))])
    torch.testing.assert_close(*results)


@contextlib.contextmanager
def schedule_on_host():
    """What Megatron's 1F1B overlap asks of CUDA beside streams and events."""
    nvtx = {"range_push": lambda *_: None, "range_pop": lambda: None}
    with (
        mock.patch.multiple(torch.cuda.nvtx, **nvtx),
        mock.patch.object(torch.Tensor, "record_stream", lambda *_: None),
    ):
        yield


def train_model(dispatcher, overlaps, options):
    """Losses and gradients of a model after some microbatches, and in how many steps of a layer one microbatch went
    forward and another one backward."""
    from megatron.core import tensor_parallel
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_ep.megatron import equivalence

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # what earlier tests have left has another shape
    config = equivalence.make_config(
        num_layers=LAYERS,
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend="deepep",
        moe_router_dtype="fp32",
        params_dtype=torch.float32,
        **options,
    )
    config.overlap_moe_expert_parallel_comm = overlaps  # Megatron's check of a config wants bf16 for it
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, position_embedding_type="rope")
    generator = torch.Generator().manual_seed(dist.get_rank())
    positions = torch.arange(LENGTH).expand(2, -1)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool().expand(2, 1, -1, -1)

    def forward_step(microbatches, model, return_schedule_plan=False):
        tokens = next(microbatches)
        forward = model.build_schedule_plan if return_schedule_plan else model
        output = forward(tokens, positions, mask, labels=tokens.roll(-1, dims=1))
        return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})

    microbatches = [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(MICROBATCHES)]
    run = TransformerLayerSchedulePlan.run
    with mock.patch.object(TransformerLayerSchedulePlan, "run", side_effect=run) as steps:
        losses = schedules.forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
        )
    both = sum(None not in call.args[:2] for call in steps.call_args_list)
    return [loss["loss"] for loss in losses], dict(model.named_parameters()), both


@pytest.mark.numerical
@pytest.mark.parametrize("options", [at_night({}), SHARED], ids=["plain", "shared experts"])
@run_on("four_ranks")
def test_overlapped_model(options):
    """1F1B overlap with Megatron's flex dispatcher over ours, and one microbatch after the other with its
    all-to-all."""
    from megatron.core.transformer.moe import token_dispatcher

    from megatron_ep.megatron import equivalence

    equivalence.join_layout(1, 4)
    fused = fused_a2a()
    names = {name: getattr(fused, name) for name in FUSED_NAMES}
    with mock.patch.multiple(token_dispatcher, **names), schedule_on_host():
        losses, parameters, both = train_model("alltoall", False, options)
        overlapped_losses, overlapped_parameters, overlapped_both = train_model("flex", True, options)
    assert (both, overlapped_both) == (0, LAYERS * (MICROBATCHES - 1))
    torch.testing.assert_close(overlapped_losses, losses)
    for name, parameter in parameters.items():
        assert parameter.grad.any(), name
        torch.testing.assert_close(overlapped_parameters[name].grad, parameter.grad)

"""Compares this dispatcher with Megatron's all-to-all dispatcher on the same tokens, forward and backward.

These functions run on every rank of a gloo world (see `megatron_ep.tools.local_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher, MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron.dispatcher import EPTokenDispatcher
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.shared_buffers import close_buffers
from megatron_ep.megatron.stand_ins import host_runtime

DISPATCHERS = {"ours": EPTokenDispatcher, "megatron_alltoall": MoEAlltoAllTokenDispatcher}

_layout: tuple[int, int] | None = None


def join_layout(tensor_parallel_size: int, expert_parallel_size: int) -> None:
    """Creates Megatron's groups over the default group. Experts have the same tensor parallelism as other layers.
    Idempotent."""
    global _layout
    if _layout == (tensor_parallel_size, expert_parallel_size):
        return
    host_runtime.enable()
    if _layout is not None:
        close_buffers()
        _destroy_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        expert_model_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    _layout = (tensor_parallel_size, expert_parallel_size)


def _destroy_groups() -> None:
    """Destroys Megatron's groups, because `destroy_model_parallel` leaves the polling threads of gloo's groups."""
    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    for group in groups:
        dist.destroy_process_group(group)


def make_config(**options: Any) -> TransformerConfig:
    """Returns the config of one small layer in the current layout, in fp64 by default.

    options: fields of TransformerConfig that override the defaults.
    """
    assert _layout is not None, "join_layout comes first"
    tensor_parallel_size, expert_parallel_size = _layout
    defaults = dict(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        moe_ffn_hidden_size=48,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp64",
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=tensor_parallel_size,
        expert_model_parallel_size=expert_parallel_size,
        expert_tensor_parallel_size=tensor_parallel_size,
        sequence_parallel=tensor_parallel_size > 1,
        params_dtype=torch.float64,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return TransformerConfig(**{**defaults, **options})


def compare_layers(
    tensor_parallel_size: int,
    expert_parallel_size: int,
    tokens: int | Sequence[int],
    seed: int,
    options: Mapping[str, Any],
    router: Callable[..., TopKRouter] | None = None,
    padding: int = 0,
    experts: str | None = None,
) -> dict[str, float]:
    """Runs a MoE layer, including its router, with Megatron's all-to-all dispatcher and with ours.

    tensor_parallel_size, expert_parallel_size: the layout; their product divides the world size.
    tokens: T, one number for all ranks or one per rank.
    seed: seed of weights and inputs.
    options: see `make_config`.
    router: router of our layer; None: Megatron's own.
    padding: number of a rank's last tokens that are padding. Their outputs are not compared, and get no gradient.
    experts: those of our layer, see `ep_layer_spec`.

    Returns for the output, the input's gradient and each parameter's gradient: the largest difference over the largest
    value.
    """
    join_layout(tensor_parallel_size, expert_parallel_size)
    config = make_config(**options)
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    theirs = spec(config=config)
    ours = ep_layer_spec(spec, router=router, experts=experts)(config=config)
    assert isinstance(ours.token_dispatcher, EPTokenDispatcher)
    ours.load_state_dict(theirs.state_dict())

    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    own = tokens if isinstance(tokens, int) else tokens[dist.get_rank()]
    x, grad = torch.randn(2, own, 1, config.hidden_size, generator=generator, dtype=config.params_dtype, device="cpu")
    mask = None if padding == 0 else torch.arange(own, device="cpu").unsqueeze(0) >= own - padding  # [B, S]
    results = []
    for layer in (theirs, ours):
        leaf = x.clone().requires_grad_()
        output, _ = layer(leaf, padding_mask=mask)
        output = output[: own - padding]
        output.backward(grad[: own - padding])
        results.append({"output": output.detach(), "input gradient": leaf.grad, **_gradients(layer)})
    expected, actual = results
    return {name: _relative_difference(expected[name], actual[name]) for name in expected}


def make_dispatcher(implementation: str, config: TransformerConfig) -> MoETokenDispatcher:
    """Returns a layer's dispatcher over the groups of the current layout, "ours" or "megatron_alltoall"."""
    groups = get_default_pg_collection()
    num_local = config.num_moe_experts // groups.ep.size()
    local_experts = [groups.ep.rank() * num_local + i for i in range(num_local)]
    return DISPATCHERS[implementation](num_local, local_experts, config=config, pg_collection=groups)


def _gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns the gradients by the names that parameters have with SequentialMLP."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in layer.named_parameters():
        if name.startswith("experts.linear_"):  # of all experts
            part, gradients = name.removeprefix("experts."), parameter.grad
            each = [None] * len(parameter) if gradients is None else gradients.unbind()
            found |= {f"experts.local_experts.{i}.{part}": of_expert for i, of_expert in enumerate(each)}
        else:
            found[name] = parameter.grad
    return found


def _relative_difference(expected: torch.Tensor | None, actual: torch.Tensor | None) -> float:
    if expected is None or actual is None:
        return 0.0 if expected is actual else float("inf")
    if expected.shape != actual.shape:
        return float("inf")
    difference = (expected - actual).abs().max().item()
    return difference / max(expected.abs().max().item(), 1e-30)

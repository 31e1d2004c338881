"""What routers have chosen, as it is recorded: which passes count, and where the numbers end."""

import contextlib
import gc

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from run_on import run_on

from megatron_ep.megatron import agreement, routing_trace
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router
from megatron_ep.tools.balance import trace

EXPERTS = 8


@contextlib.contextmanager
def nobody_waits(device):
    """For a GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 20), st.integers(1, 4), st.integers(0, 2**31))
def test_ids_and_maps_are_counted(device, tokens, topk, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(topk).indices
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    chosen = torch.zeros(tokens, EXPERTS + 1, dtype=torch.bool)
    chosen[torch.arange(tokens).unsqueeze(1), ids] = True
    expected = np.bincount(ids[ids >= 0], minlength=EXPERTS)
    for form in (ids, chosen[:, :EXPERTS]):
        form = form.to(device)
        with nobody_waits(device):
            counted = routing_trace.counts_of(form, EXPERTS)
        assert counted.dtype == torch.int32 and np.array_equal(counted.cpu(), expected)


def _layers(config, router):
    spec = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False), router=router)
    layers = [spec(config=config) for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.set_layer_number(number + 1)
    return layers


def _record(directory, tensor_parallel_size, fused):
    """Three steps of two micro-batches; what the dispatchers of this rank were given, by step, layer, micro-batch."""
    gc.collect()  # all buffers are asked, also those that earlier tests have left in circles
    join_layout(tensor_parallel_size, 4 // tensor_parallel_size)
    config = make_config(params_dtype=torch.float32, moe_router_dtype="fp32", num_layers=2)
    routing_trace.enable(directory)
    optimizer = None
    try:
        layers = _layers(config, fused_router if fused else None)
        expected = {}

        def run(layer, x):
            output, _ = layer(x)
            return output

        for step in (1, 2, 3):
            for micro_batch in range(2):
                for number, layer in enumerate(layers):
                    x = torch.randn(3 + step, 1, config.hidden_size, requires_grad=True)
                    if step == 2:  # the first pass knows no gradients, the second is in the backward pass
                        tensor_parallel.checkpoint(lambda x, layer=layer: run(layer, x), False, x).sum().backward()
                    else:
                        run(layer, x).sum().backward()
                    chosen = layer.token_dispatcher.topk_idx
                    if tensor_parallel_size > 1:  # each choice is there once for each rank with a part of the expert
                        local = layer.num_local_experts
                        chosen = chosen[chosen // local % tensor_parallel_size == 0]
                        chosen = chosen // (local * tensor_parallel_size) * local + chosen % local
                    expected[step, number + 1, micro_batch] = np.bincount(chosen.flatten(), minlength=EXPERTS)
                    with torch.no_grad():
                        run(layer.eval(), x)
                    layer.train()
            if step < 3:
                routing_trace.end_step()
            else:  # as Megatron's scripts end it
                agreement.enable()
                parameter = torch.nn.Parameter(torch.ones(1))
                parameter.main_grad = torch.ones(1)
                config = OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0)
                optimizer = FP32Optimizer(torch.optim.SGD([parameter], lr=1.0), config, lambda *_: None)
                optimizer.step()
    finally:
        agreement.disable()
        routing_trace.disable()
        routing_trace.disable()
    return dist.get_rank(), expected


@pytest.mark.parametrize(("tensor_parallel_size", "fused"), [(1, True), (1, False), (2, False)])
def test_training_passes_are_recorded_once(four_ranks, tmp_path, tensor_parallel_size, fused):
    """Neither those that recompute nor those of evaluation."""
    results = four_ranks.run(_record, tmp_path, tensor_parallel_size, fused)
    found = trace.read(tmp_path)
    assert (found.num_experts, found.topk, found.recorded_steps) == (EXPERTS, 2, 3)
    assert found.expert_ranks == 4 // tensor_parallel_size
    [group] = found.groups
    keys = list(zip(group.steps, group.layers, group.micro_batches, strict=True))
    for rank, expected in results:
        assert keys == sorted(expected)
        assert np.array_equal(group.counts[:, group.sources.index(rank)], [expected[key] for key in keys])
    assert group.counts.sum() > 0


def _continue(directory):
    join_layout(1, 4)
    config = make_config(params_dtype=torch.float32, moe_router_dtype="fp32", num_layers=2)
    for step in (7, 8):
        routing_trace.enable(directory)
        try:
            layer = _layers(config, None)[0]
            layer(torch.randn(4, 1, config.hidden_size))
            routing_trace.end_step(step)
        finally:
            routing_trace.disable()
    routing_trace.enable(directory)
    try:
        other = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
        config = make_config(params_dtype=torch.float32, moe_router_dtype="fp32", num_layers=2, **other)
        layer = _layers(config, None)[0]
        layer(torch.randn(4, 1, config.hidden_size))
        with pytest.raises(ValueError, match="is of another run; choose another directory"):
            routing_trace.end_step(9)
    finally:
        routing_trace.disable()


def test_a_file_is_continued_by_the_same_run_alone(four_ranks, tmp_path):
    four_ranks.run(_continue, tmp_path)
    found = trace.read(tmp_path)
    assert [set(group.steps) for group in found.groups] == [{7, 8}]


@run_on("four_ranks")
def test_what_cannot_be_recorded_is_refused(tmp_path):
    join_layout(1, 4)
    routing_trace.enable(tmp_path)
    try:
        config = make_config(params_dtype=torch.float32, moe_router_dtype="fp32")
        config.cuda_graph_impl = "local"
        with pytest.raises(RuntimeError, match="already enabled"):
            routing_trace.enable(tmp_path)
        says = "^cuda_graph_impl is 'local', must be 'none' with a trace: no Python sees a replay"
        with pytest.raises(ValueError, match=says):
            _layers(config, None)
        config.cuda_graph_impl = "none"
        _layers(config, None)
        other = make_config(params_dtype=torch.float32, moe_router_dtype="fp32", moe_router_topk=3)
        with pytest.raises(ValueError, match="layers differ in their experts"):
            _layers(other, None)
    finally:
        routing_trace.disable()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"trace .*file: File exists"):
        routing_trace.enable(file)


def test_nothing_is_recorded_unless_it_is_enabled():
    routing_trace.end_step()
    routing_trace.disable()
    assert agreement.before_step is None

"""A layer whose parameters torch's fully_shard has spread over its data-parallel ranks: EP 2 x DP 2, on the host."""

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import ep_layer_spec

pytestmark = pytest.mark.numerical


@run_on("four_ranks")
def test_fully_shard_gathers_and_reduces_around_our_dispatcher():
    join_layout(1, 2)
    spec = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=8))
    layers = []
    for _ in range(2):
        model_parallel_cuda_manual_seed(3)
        layers.append(spec(config=make_config(), layer_number=1))
    plain, sharded = layers
    sharded.load_state_dict(plain.state_dict())
    copies = DeviceMesh.from_group(get_default_pg_collection().expt_dp, "cpu")
    everyone = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    fully_shard(sharded.experts, mesh=copies)
    fully_shard(sharded, mesh=everyone)
    x, grad = torch.randn(2, 9, 1, 32, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    outputs, gradients = [], []
    for layer in layers:
        leaf = x.clone().requires_grad_()
        output, _ = layer(leaf)
        output.backward(grad)
        outputs.append(output)
        gradients.append(leaf.grad)
    assert torch.equal(*outputs) and torch.equal(*gradients)
    for (name, whole), (_, part) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        is_expert = name.startswith("experts")
        group, size = (copies.get_group(), copies.size()) if is_expert else (dist.group.WORLD, dist.get_world_size())
        dist.all_reduce(whole.grad, group=group)
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad / size, rtol=1e-12, atol=1e-12, msg=name)

"""Recipes of Megatron-Bridge with our dispatcher: two steps of training, whose losses and parameters are those of
Megatron's own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import megatron_bridge
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from ports import free_port

from megatron_ep.megatron import plugin, shared_buffers, spec
from megatron_ep.megatron.dispatcher import EPTokenDispatcher
from megatron_ep.megatron.equivalence import join_layout
from megatron_ep.tools.local_ranks import LocalRanks

pytestmark = [pytest.mark.needs(megatron_bridge.NEEDED), pytest.mark.nightly]
STEPS, BATCH = 2, 2
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def ranks():
    """Longer than for other tests: to import Megatron-Bridge takes most of a minute."""
    with LocalRanks(4, timeout=600.0) as ranks:
        yield ranks


def _trained(name, layers, is_ours, **model):
    """Losses of the steps, and the parameters behind them."""
    recipe = megatron_bridge.recipe(name)
    provider = recipe.model
    provider.transformer_layer_spec = layers
    for field, value in model.items():
        setattr(provider, field, value)
    provider.finalize()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    recipe.ddp.overlap_grad_reduce = recipe.ddp.overlap_param_gather = False
    with megatron_bridge.on_host():
        [chunk] = provider.provide_distributed_model(ddp_config=recipe.ddp, pg_collection=groups)
    dispatchers = [module.token_dispatcher for module in chunk.modules() if hasattr(module, "token_dispatcher")]
    assert dispatchers and all(isinstance(each, EPTokenDispatcher) == is_ours for each in dispatchers)
    recipe.optimizer.bf16, recipe.optimizer.params_dtype = False, torch.float32
    recipe.optimizer.use_precision_aware_optimizer = False
    recipe.optimizer.main_grads_dtype = torch.float32
    recipe.optimizer.exp_avg_dtype = recipe.optimizer.exp_avg_sq_dtype = torch.float32
    recipe.optimizer.lr = 1e-2
    recipe.optimizer.finalize()
    optimizer = get_megatron_optimizer(recipe.optimizer, [chunk], use_gloo_process_groups=False)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        tokens, labels = torch.randint(provider.vocab_size, (2, BATCH, provider.seq_length), generator=generator)
        positions = torch.arange(provider.seq_length).expand(BATCH, -1)
        chunk.zero_grad_buffer()
        loss = chunk(tokens, positions, None, labels=labels).mean()
        loss.backward()
        chunk.finish_grad_sync()
        is_taken, norm, _ = optimizer.step()
        assert is_taken and norm > 0
        losses.append(loss.detach())
    shared_buffers.close_buffers()
    return losses, dict(chunk.named_parameters())


def _by_plugin(name, **model):
    plugin.enable()
    try:
        return _trained(name, megatron_bridge.megatrons, True, **model)
    finally:
        plugin.disable()


@pytest.mark.parametrize("name", megatron_bridge.RECIPES)
@pytest.mark.parametrize("model", [{}, FULL], ids=["as given", "full recompute"])
@run_on("ranks")
def test_a_recipe_trains_as_with_megatrons_dispatcher(name, model):
    megatron_bridge.bridge()
    join_layout(1, 4)
    declared = {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": None}
    expected, parameters = _trained(name, megatron_bridge.megatrons, False, **declared, **model)
    for losses, trained in (_trained(name, spec.gpt, True, **model), _by_plugin(name, **model)):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        assert trained.keys() == parameters.keys()
        for key, value in parameters.items():
            torch.testing.assert_close(trained[key], value, rtol=1e-3, atol=1e-5, msg=key)


def _pretrained(name, dispatcher):
    """Loss and gradient norm of each step, as Bridge logs them, and the log."""
    program = [str(Path(megatron_bridge.__file__).with_name("bridge_pretrain.py")), name, dispatcher, "3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command += ["--master-port", str(free_port())]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    steps = re.findall(r"iteration +\d+/ +3 .*lm loss: (\S+) .*grad norm: (\S+)", run.stdout)
    return torch.tensor([[float(number) for number in step] for step in steps]), run.stdout


@pytest.mark.parametrize("name", megatron_bridge.RECIPES)
def test_bridges_own_pretrain_logs_the_same_losses(name):
    expected, log = _pretrained(name, "alltoall")
    assert expected.shape == (3, 2) and "MoE layer" not in log
    actual, log = _pretrained(name, "ep")
    assert re.search(r"megatron_ep: \d MoE layers? dispatch over 4 ranks", log)
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=0)  # norms are logged with three digits
    torch.testing.assert_close(actual[:, 0], expected[:, 0], rtol=1e-5, atol=0)

"""The loss curve of a recipe with our dispatcher is that of Megatron's, step by step, with Megatron's choices replayed.

Two right dispatchers, or routers, differ in the last bits of fp32; once in some 100,000 choices of a token such a bit
decides between two experts, and then the curves part. So the models take the same choices.
"""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_ep.megatron.equivalence import join_layout
from megatron_ep.megatron.shared_buffers import close_buffers
from megatron_ep.tools.local_ranks import LocalRanks
from megatron_ep.training import data, recipe
from megatron_ep.training.model import build_model, build_optimizer

pytestmark = [pytest.mark.numerical, pytest.mark.nightly]

TINY = Path(__file__).parents[2] / "recipes" / "tiny_moe_cpu.yaml"
SMALLER = ("train.global_batch_size=4", "train.micro_batch_size=1")
STEPS = 16


class Training:
    """A model with its optimizer; `step` returns the mean loss of all ranks."""

    def __init__(self, loaded):
        torch.manual_seed(loaded.train.seed)
        model_parallel_cuda_manual_seed(loaded.train.seed)
        self.model = build_model(loaded, data.VOCAB_SIZE)
        self.optimizer, self.scheduler = build_optimizer(loaded, self.model)
        self.routers = [module for module in self.model.modules() if isinstance(module, TopKRouter)]
        for router in self.routers:
            router.router_replay = RouterReplay()

    def record(self):
        for router in self.routers:
            router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)

    def replay(self, other):
        for router, recorded in zip(self.routers, other.routers, strict=True):
            router.router_replay.clear_indices()
            router.router_replay.set_target_indices(recorded.router_replay.get_recorded_indices())
            router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def step(self, batch):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.model(input_ids=batch["tokens"], position_ids=None, attention_mask=None, labels=batch["labels"])
        loss = losses.mean()
        loss.backward()
        finalize_model_grads([self.model])
        self.optimizer.step()
        self.scheduler.step(increment=1)
        mean = loss.detach().double()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()


def _curves():
    join_layout(1, 4)
    theirs, *ours = [
        Training(recipe.load(TINY, [*SMALLER, *overrides]))
        for overrides in (
            ("dispatcher.type=alltoall",),
            ("dispatcher.router=megatron",),
            ("dispatcher.router=fused",),
            ("dispatcher.router=fused", "dispatcher.moe_dispatch_fwd_dtype=fp8"),
        )
    ]
    loaded = recipe.load(TINY, SMALLER)
    samples = data.Samples(loaded, data.prepare(loaded), dist.get_rank())
    curves = []
    for step in range(STEPS):
        batch = samples.batch(step, 0)
        theirs.record()
        curves.append([theirs.step(batch)])
        for training in ours:
            training.replay(theirs)
            curves[-1].append(training.step(batch))
    close_buffers()
    return curves


def test_the_loss_curve_is_that_of_megatrons_dispatcher():
    with LocalRanks(4, timeout=300.0) as ranks:
        curves = ranks.run(_curves)[0]
    assert curves[-1][0] < curves[0][0] - 0.5
    for theirs, same_router, fused_router, float8 in curves:
        assert abs(same_router - theirs) < 1e-6 * theirs
        assert abs(fused_router - theirs) < 1e-6 * theirs
        assert abs(float8 - theirs) < 1e-3 * theirs
    assert max(abs(float8 - theirs) for theirs, *_, float8 in curves) > 1e-5, "no row was rounded"

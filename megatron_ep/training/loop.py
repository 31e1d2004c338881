"""One rank of a training run."""

from __future__ import annotations

import contextlib
import datetime
import resource
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.meeting import job
from megatron_ep.meeting.rendezvous import agreed_name
from megatron_ep.megatron.stand_ins import gpu_runtime, host_runtime
from megatron_ep.training.recipe import Recipe

if TYPE_CHECKING:
    from megatron_ep.training.data import Samples


def train(recipe: Recipe, out: Path, resume: bool) -> None:
    """Trains the recipe's model as rank RANK of WORLD_SIZE (torchrun's variables) and returns after the last step.

    recipe: the recipe, equal on all ranks.
    out: a directory that all ranks share; receives loss.csv and checkpoints/.
    resume: whether to continue from the latest checkpoint in `out`.

    Raises ValueError if corpus or checkpoint do not match the recipe, and EPError if the dispatcher or another rank
    gave up.
    """
    torch.set_num_threads(recipe.train.threads_per_rank)
    warnings.filterwarnings("ignore", module=r"megatron\.core")  # warnings about a missing Transformer Engine
    (gpu_runtime if recipe.train.device == "cuda" else host_runtime).enable()
    _join(datetime.timedelta(seconds=recipe.train.distributed_timeout))
    _initialize_megatron(recipe)
    from megatron_ep.megatron import routing_trace
    from megatron_ep.megatron.shared_buffers import abort_peers_on_error, close_buffers
    from megatron_ep.normal.row_limit import explained

    if recipe.dispatcher.trace is not None:
        routing_trace.enable(recipe.dispatcher.trace)
    try:
        with explained(), abort_peers_on_error():
            _run(recipe, out, resume)
    finally:
        routing_trace.disable()
        close_buffers()
    dist.destroy_process_group()


def _join(timeout: datetime.timedelta) -> None:
    """Creates the default group in a store of this attempt, because gloo would find addresses of ended ranks."""
    store, rank, world_size = job.store_of_ranks(timeout)
    name = agreed_name(dist.PrefixStore("megatron_ep", store), rank, world_size, timeout)
    store = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _initialize_megatron(recipe: Recipe) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=recipe.topology.world_size,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=recipe.train.distributed_timeout / 60,
        create_gloo_process_groups=False,  # the default groups use gloo already
    )
    torch.manual_seed(recipe.train.seed)
    model_parallel_cuda_manual_seed(recipe.train.seed)


def _run(recipe: Recipe, out: Path, resume: bool) -> None:
    from megatron_ep.training import data
    from megatron_ep.training.checkpoint import Checkpoints
    from megatron_ep.training.log import Row, TrainLog
    from megatron_ep.training.model import build_model, build_optimizer

    corpus = data.prepare(recipe)
    samples = data.Samples(recipe, corpus, dist.get_rank())
    model = build_model(recipe, data.VOCAB_SIZE)
    optimizer, scheduler = build_optimizer(recipe, model)
    checkpoints = Checkpoints(out / "checkpoints", recipe, corpus, model, optimizer, scheduler)
    start = checkpoints.load() if resume else 0
    if start >= recipe.train.train_iters:
        raise ValueError(
            f"--resume: the run is at step {start}, train.train_iters (--steps) is {recipe.train.train_iters}"
        )
    batch_tokens = recipe.train.global_batch_size * recipe.dataset.seq_length
    log: Any = contextlib.nullcontext()
    parameters = _count_parameters(model)
    if dist.get_rank() == 0:
        log = TrainLog(out, recipe, corpus, parameters, start)
    slowest = _SlowestPeer()
    with log:
        for step in range(start, recipe.train.train_iters):
            began = time.perf_counter()
            lr = optimizer.param_groups[0]["lr"]
            loss, grad_norm = _train_step(recipe, model, optimizer, scheduler, samples, step)
            seconds = time.perf_counter() - began
            if dist.get_rank() == 0:
                on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                peak = on_host if recipe.train.device == "cpu" else torch.cuda.max_memory_allocated()
                log.write(
                    Row(
                        step=step + 1,
                        loss=loss,
                        tokens_per_second=batch_tokens / seconds,
                        lr=lr,
                        grad_norm=grad_norm,
                        seconds=seconds,
                        memory_gib=peak / 2**30,
                    ),
                    slowest,
                )
            if (step + 1) % recipe.checkpoint.save_interval == 0 or step + 1 == recipe.train.train_iters:
                ep.raise_if_failed()
                checkpoints.save(step + 1)
        if dist.get_rank() == 0:
            log.finish()


def _train_step(
    recipe: Recipe, model: Any, optimizer: Any, scheduler: Any, samples: Samples, step: int
) -> tuple[float, float]:
    """Runs a step. Returns the mean loss of all ranks, and the norm of the gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_ep.megatron import routing_trace

    train = recipe.train
    num_microbatches = train.global_batch_size // (train.micro_batch_size * recipe.topology.world_size)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=(
            {name: part.to(train.device) for name, part in samples.batch(step, microbatch).items()}
            for microbatch in range(num_microbatches)
        ),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=recipe.dataset.seq_length,
        micro_batch_size=train.micro_batch_size,
    )
    ep.raise_if_failed()
    routing_trace.end_step(step + 1)
    _, grad_norm, _ = optimizer.step()
    scheduler.step(increment=1)
    total = torch.stack(losses).double().mean().cpu()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), float(grad_norm)


class _SlowestPeer:
    """Names the rank that this one waited for longest since the last call."""

    def __init__(self) -> None:
        self._before: torch.Tensor | int = 0

    def __call__(self) -> str:
        from megatron_ep.megatron.shared_buffers import wait_ns

        total = wait_ns()
        if total is None:  # another dispatcher has no buffers
            return ""
        waits, self._before = total - self._before, total
        if not waits.sum():
            return ""
        rank = int(waits.argmax())
        return f"  {waits[rank] / waits.sum():.0%} of this rank's waiting was for rank {rank}"


def _forward_step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Megatron's forward_step_func: returns losses [B, S] of tokens, and the function that averages them."""
    from megatron_ep.megatron.attention import packed_sequences

    batch = next(batches)
    packed = packed_sequences(batch["cu_seqlens"]) if "cu_seqlens" in batch else None
    losses = model(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=batch["labels"],
        packed_seq_params=packed,
    )

    def reduce(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = batch["loss_mask"]
        loss = (output.float() * mask).sum() / mask.sum()
        return loss, loss.detach().clone()  # the schedule divides it by the number of microbatches

    return losses, reduce


def _count_parameters(model: torch.nn.Module) -> int:
    """Returns the number of parameters of the whole model: experts of every rank, all others once."""
    experts = sum(p.numel() for p in model.parameters() if not getattr(p, "allreduce", True))
    shared = sum(p.numel() for p in model.parameters() if getattr(p, "allreduce", True))
    total = torch.tensor(experts)
    dist.all_reduce(total)
    return int(total) + shared

"""Nothing is kept, on any rank of the job, of a step that a failed call has reached."""

import contextlib
import copy
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from unittest import mock

import pytest
from rank_processes import LinkedProcess
from run_on import run_on
from store_relay import StoreRelay

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

import megatron_ep as ep
from megatron_ep.megatron import agreement, plugin
from megatron_ep.megatron.equivalence import join_layout

ASK_S = 30.0  # so that a busy machine has the time to answer


def _optimizer(clip_grad=0.0, parts=2, group=None):
    """Megatron's, made of some or one alone, and its parameters."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(parts)]
    for parameter in parameters:
        parameter.main_grad = torch.ones(1)
    config = OptimizerConfig(optimizer="adam", lr=1.0, clip_grad=clip_grad)
    made = [FP32Optimizer(torch.optim.Adam([each], lr=1.0), config, lambda *_: None) for each in parameters]
    for each in made:
        each.grad_stats_parallel_group = group
    return (ChainedOptimizer(made) if parts > 1 else made[0]), parameters


def _state(optimizer, parameters):
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return copy.deepcopy(
        ([each.detach() for each in parameters], [each.optimizer.state_dict()["state"] for each in parts])
    )


def _error_of(keep, *args):
    try:
        keep(*args)
    except ep.EPError as error:
        return f"{type(error).__name__}: {error}"
    return "kept"


@pytest.mark.parametrize(("clip_grad", "parts", "looks"), [(1.0, 2, True), (0.0, 1, False), (1.0, 1, False)])
@run_on("four_ranks")
def test_what_a_failure_has_reached_is_kept_nowhere(clip_grad, parts, looks):
    """Ranks 0 and 1 exchange tokens, and ranks 2 and 3; a call of the latter fails. Its NaN then reaches all, before
    the latter have looked unless `looks`."""
    join_layout(1, 2)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    group = groups[dist.get_rank() // 2]
    optimizer, parameters = _optimizer(clip_grad, parts, group)
    with (
        mock.patch.object(dist_checkpointing, "save") as write,
        mock.patch.object(agreement, "ASK_S", ASK_S),
        ep.Buffer(group, ep.Config(num_experts=4)) as buffer,
    ):
        plugin.enable()
        try:
            said = [_error_of(optimizer.step), _error_of(dist_checkpointing.save)]
            dist.barrier()
            if dist.get_rank() == 2:
                buffer.abort("a test")
            dist.barrier()
            if looks:
                said += [_error_of(optimizer.step), _error_of(dist_checkpointing.save)]
            elif dist.get_rank() > 1:
                time.sleep(1.0)
            before = _state(optimizer, parameters)
            parameters[-1].main_grad.fill_(torch.nan)
            began = time.monotonic()
            said.append(_error_of(optimizer.step))
            seconds = time.monotonic() - began
            same = all(map(torch.equal, before[0], _state(optimizer, parameters)[0]))
            same &= str(before[1]) == str(_state(optimizer, parameters)[1])
            dist.barrier()
            buffer.reset()
            parameters[-1].main_grad.fill_(1.0)
            said.append(_error_of(optimizer.step))
        finally:
            plugin.disable()
    assert said[:2] == ["kept", "kept"] and said[-1] == "kept"
    assert same, "weights and the optimizer's state"
    assert seconds < ASK_S
    if dist.get_rank() < 2:  # what has not reached them they keep, and wait for no other rank
        assert set(said[2:-2]) <= {"kept"} and write.call_count == 1 + looks
        assert said[-2].startswith("EPAbortError: rank "), said
        assert "failed before the optimizer's step, of which nothing is kept; its error: rank 0 was told" in said[-2]
    else:
        assert all(each.startswith("EPAbortError: rank 0 was told to stop: a test") for each in said[2:-1]), said
        assert write.call_count == 1


@run_on("four_ranks")
def test_a_rank_steps_as_often_as_it_likes_and_into_its_own_nan():
    join_layout(1, 2)
    optimizer, parameters = _optimizer(parts=1)
    agreement.enable()
    agreement.enable()
    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    agreement.log.addHandler(handler)
    try:
        with mock.patch.object(agreement, "ASK_S", 0.3):
            without_gradients, (frozen,) = _optimizer(parts=1)
            del frozen.main_grad
            without_gradients.step()
            for _ in range(dist.get_rank()):
                optimizer.step()
            finite = parameters[0].item()
            parameters[0].main_grad.fill_(torch.nan)
            for _ in range(2):
                optimizer.step()
    finally:
        agreement.log.removeHandler(handler)
        agreement.disable()
    assert finite == pytest.approx(1.0 - dist.get_rank(), abs=1e-5)
    assert parameters[0].isnan() and len(warned) == 1


@pytest.mark.usefixtures("no_other_buffers")
def test_a_process_alone_asks_itself():
    with ep.LocalCluster(1, 2, ep.Config(num_experts=4)) as cluster:
        agreement.check()
        cluster.abort("a test")
        with pytest.raises(ep.EPAbortError, match="was told to stop: a test"):
            agreement.check()


def run_rank(rank: int, port: int, link: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    join_layout(1, 2)
    agreement.enable()
    optimizer, parameters = _optimizer(parts=1)
    parameters[0].main_grad.fill_(torch.nan)
    cluster = ep.LocalCluster(1, 2, ep.Config(num_experts=4))
    link.send("ready")
    link.recv()
    if rank == 1:
        cluster.abort("a test")
        said = _error_of(agreement.check)
    else:
        with mock.patch.object(agreement, "ASK_S", 0.5):
            said = _error_of(optimizer.step)
    link.send(said)
    os._exit(0)


@pytest.mark.parametrize("asks_late", [False, True])
def test_a_failure_is_heard_through_a_store_that_is_silent(asks_late):
    """Rank 1 fails and ends. Rank 0 has NaN during the silence, or afterwards."""
    with StoreRelay() as relay, contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(LinkedProcess(run_rank, rank, relay.port)) for rank in range(2)]
        assert [rank.hear() for rank in ranks] == ["ready"] * 2
        with ThreadPoolExecutor(1) as pool:
            silence = pool.submit(relay.fall_silent, 3.0)
            time.sleep(0.2)
            ranks[1].link.send("go")
            if not asks_late:
                ranks[0].link.send("go")
            silence.result()
        assert ranks[1].hear().startswith("EPAbortError: rank 0 was told to stop: a test")
        ranks[1].wait()
        if asks_late:
            ranks[0].link.send("go")
        said = ranks[0].hear()
        assert said.startswith("EPAbortError: rank 1 of the job failed before the optimizer's step"), said


@run_on("four_ranks")
def test_nothing_is_kept_while_it_is_not_known_whether_a_rank_failed():
    join_layout(1, 2)
    optimizer, parameters = _optimizer(parts=1)
    parameters[0].main_grad.fill_(torch.nan)
    agreement.enable()
    try:
        with mock.patch.object(agreement, "ask", side_effect=RuntimeError("the connection is lost")):
            said = _error_of(optimizer.step)
    finally:
        agreement.disable()
    assert "it is not known whether a rank of the job failed" in said and parameters[0].item() == 1.0

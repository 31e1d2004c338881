"""Nothing is kept, on any rank of the job, once a call has failed on one of them."""

from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

import megatron_ep as ep
from megatron_ep.megatron import agreement, plugin
from megatron_ep.megatron.equivalence import join_layout


def _optimizer():
    """Megatron's, made of two, and the parameters."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    for parameter in parameters:
        parameter.main_grad = torch.ones(1)
    config = OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0)
    parts = [FP32Optimizer(torch.optim.SGD([each], lr=1.0), config, lambda *_: None) for each in parameters]
    return ChainedOptimizer(parts), parameters


def _error_of(keep, *args):
    try:
        keep(*args)
    except ep.EPError as error:
        return f"{type(error).__name__}: {error}"
    return "kept"


def _keep_after_a_failure():
    """Ranks 0 and 1 exchange tokens, and ranks 2 and 3; a call of the latter fails."""
    join_layout(1, 2)
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    optimizer, parameters = _optimizer()
    with (
        mock.patch.object(dist_checkpointing, "save") as write,
        ep.Buffer(groups[dist.get_rank() // 2], ep.Config(num_experts=4)) as buffer,
    ):
        plugin.enable()
        try:
            said = [_error_of(optimizer.step), _error_of(dist_checkpointing.save)]
            dist.barrier()
            if dist.get_rank() == 2:
                buffer.abort("a test")
            dist.barrier()
            said += [_error_of(optimizer.step), _error_of(dist_checkpointing.save)]
        finally:
            plugin.disable()
        return said, [parameter.item() for parameter in parameters], write.call_count


def test_a_failure_in_one_group_ends_the_step_and_the_checkpoint_of_all(four_ranks):
    for rank, (said, values, writes) in enumerate(four_ranks.run(_keep_after_a_failure)):
        assert said[:2] == ["kept", "kept"] and values == [0.0, 0.0] and writes == 1
        if rank < 2:
            assert said[2].startswith("EPAbortError: rank 3 of the job failed before the optimizer's step"), said
            assert said[3].startswith("EPAbortError: rank 3 of the job failed before a checkpoint"), said
        else:
            assert all(each.startswith("EPAbortError: rank 0 was told to stop: a test") for each in said[2:]), said


def _count_agreements():
    optimizer, _ = _optimizer()
    counts = []
    with mock.patch.object(dist_checkpointing, "save"):
        agreement.enable()
        agreement.enable()
        try:
            with mock.patch.object(agreement, "agree", wraps=agreement.agree) as agree:
                for keep in (optimizer.step, dist_checkpointing.save, dist_checkpointing.save):
                    keep()
                    counts.append(agree.call_count)
                agreement.disable()
                optimizer.step()
                return [*counts, agree.call_count]
        finally:
            agreement.disable()


def test_one_agreement_a_step_and_none_for_its_checkpoint(four_ranks):
    assert four_ranks.run(_count_agreements) == [[1, 1, 2, 2]] * 4


@pytest.mark.usefixtures("no_other_buffers")
def test_a_process_alone_asks_itself():
    with ep.LocalCluster(1, 2, ep.Config(num_experts=4)) as cluster:
        agreement.agree("a test's end")
        cluster.abort("a test")
        with pytest.raises(ep.EPAbortError, match="was told to stop: a test"):
            agreement.agree("a test's end")

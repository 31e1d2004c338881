"""Checkpoints of `GroupedExperts` and of SequentialMLP, each read by the other: parameters and states of optimizers.

A test is a function that runs on all four ranks.
"""

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import copy
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from test_experts import ACTIVATIONS, given, make, parameters, settings

from megatron_ep.megatron import optimizer_states
from megatron_ep.megatron.experts import GroupedExperts
from megatron_ep.tools.local_ranks import LocalRanks

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("no_other_buffers")]

KINDS = {"sequential": SequentialMLP, "grouped": GroupedExperts}
WAYS = [("sequential", "grouped"), ("grouped", "sequential"), ("grouped", "grouped")]
LAYOUTS = {  # tensor-parallel ranks of experts, expert-parallel ranks of the writer and the reader
    "EP 4": ((1, 4), (1, 4)),
    "EP 2 from EP 4": ((1, 4), (1, 2)),
    "ETP 2, EP 2 from EP 4": ((1, 4), (2, 2)),
    "EP 4 from ETP 2, EP 2": ((2, 2), (1, 4)),
}


@pytest.fixture(scope="module")
def four_started_ranks():
    """Ranks that no other file has used: after some of these a checkpoint in another layout took more than a minute."""
    with LocalRanks(4, timeout=60.0) as ranks:
        yield ranks


def shared_folder():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


class Model(MegatronModule):
    def __init__(self, config, kind, seed):
        super().__init__(config)
        self.experts = make(KINDS[kind], config, seed)
        # Of no expert, and large enough for a part on each data-parallel rank.
        self.scale = torch.nn.Parameter(torch.ones(64, config.hidden_size, dtype=config.params_dtype))

    def forward(self, x, *args):
        return self.experts(x * self.scale.mean(0), *args)[0]


def metadata(**options):
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True), **options}


def wholes(model):
    """The parameters of all experts of all ranks, by linear layer: [E, ...], tensor-parallel parts side by side."""
    groups, found = get_default_pg_collection(), []
    of_layer = [(name, parameter) for name, parameter in make(GroupedExperts, model.config).named_parameters()]
    for (name, parameter), own in zip(of_layer, parameters(model.experts), strict=True):
        axis = getattr(parameter, "partition_dim", None)
        if axis is not None:
            halves = 2 if model.config.gated_linear_unit and "fc1" in name else 1
            parts = [part.chunk(halves, dim=axis) for part in gathered(own, groups.expt_tp)]
            own = torch.cat([piece for half in zip(*parts, strict=True) for piece in half], dim=axis)
        found.append(torch.cat(gathered(own, groups.ep)))
    return found


def gathered(own, group):
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return parts


def config_of(layout, **options):
    tp, ep = layout
    return settings(tp=tp, ep=ep, num_moe_experts=8, **options)


APART = {"singleton_local_shards": True}  # a tensor for each expert


@pytest.mark.parametrize(
    ("layouts", "activation", "how"),
    [
        *((layouts, "swiglu", {}) for layouts in LAYOUTS),
        ("ETP 2, EP 2 from EP 4", "gelu", {}),
        ("ETP 2, EP 2 from EP 4", "swiglu", APART),
        ("EP 4", "quick geglu with bias", {}),
    ],
)
@pytest.mark.parametrize(("writer", "reader"), WAYS)
@run_on("four_ranks")
def test_parameters(layouts, activation, how, writer, reader):
    before, after = LAYOUTS[layouts]
    model = Model(config_of(before, **ACTIVATIONS[activation]), writer, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    folder, expected = shared_folder(), wholes(model)
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata(**how)), folder)
    dist.barrier()
    model = Model(config_of(after, **ACTIVATIONS[activation]), reader, seed=4)
    assert not torch.equal(wholes(model)[0], expected[0])
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(metadata=metadata(**how)), folder))
    for actual, wanted in zip(wholes(model), expected, strict=True):
        assert torch.equal(actual, wanted)


@run_on("four_ranks")
def test_state_dicts():
    """TEGroupedMLP's keys out, those and SequentialMLP's in."""
    config = settings(**ACTIVATIONS["quick geglu with bias"])
    one, other = Model(config, "grouped", 3), Model(config, "grouped", 4)
    state = one.state_dict()
    names = ["scale"] + [
        f"experts.linear_fc{n}.{kind}{i}" for n in (1, 2) for kind in ("weight", "bias") for i in range(4)
    ]
    extra = [f"experts.linear_fc{n}._extra_state" for n in (1, 2)]
    assert sorted(state) == sorted([*names, *extra])
    other.load_state_dict(state)
    theirs = Model(config, "sequential", 5)
    for source in (one, theirs):
        other.load_state_dict(source.state_dict())
        for actual, wanted in zip(parameters(other.experts), parameters(source.experts), strict=True):
            assert torch.equal(actual, wanted)
    del state["experts.linear_fc1.weight2"]
    with pytest.raises(RuntimeError, match=r"linear_fc1\.weight"):
        other.load_state_dict(state)


# ---- states of optimizers


def trained(kind, config, seed, steps, distributed=True):
    """A model in Megatron's DDP after some steps, and its optimizer."""
    model = Model(config, kind, seed)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp, model)
    made = OptimizerConfig(
        optimizer="adam", lr=1e-2, weight_decay=0.0, clip_grad=0.0, bf16=True, use_distributed_optimizer=distributed
    )
    optimizer = get_megatron_optimizer(made, [wrapped], use_gloo_process_groups=False)
    for number in range(steps):
        step(wrapped, optimizer, number)
    return wrapped, optimizer


def step(model, optimizer, number):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    x, counts, probs, grad = given(model.config, (3, 0, 9, 5), seed=10 * number)
    model(x.requires_grad_(), counts, probs).backward(grad)
    model.finish_grad_sync()
    optimizer.step()


def saved(model, optimizer, is_loading, kind):
    of_model = model.module.sharded_state_dict(metadata=metadata(distrib_optim_sharding_type=kind))
    of_optimizer = optimizer.sharded_state_dict(
        of_model, is_loading, metadata=metadata(distrib_optim_sharding_type=kind)
    )
    return {"model": of_model, "optimizer": of_optimizer}


# Megatron neither saves nor loads the steps of torch's Adam, which the host has, and lets all parameters share them.


def _with_own_step(optimizer, parameter, tensors):
    own = optimizer._get_main_param_and_optimizer_states(parameter)
    _set_states(optimizer, parameter, {"step": own["step"], **tensors})


_set_states = DistributedOptimizer._set_main_param_and_optimizer_states


def set_steps(optimizer, steps):
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(steps))


def continued(writer, reader, kind):
    """A model and one that continues from its checkpoint, each after another step."""
    config = settings(params_dtype=torch.bfloat16, bf16=True)
    folder = shared_folder()
    model, optimizer = trained(writer, config, 3, 2, distributed=kind is not None)
    dist_checkpointing.save(saved(model, optimizer, False, kind), folder)
    dist.barrier()
    step(model, optimizer, 2)
    other, of_other = trained(reader, config, 4, 1, distributed=kind is not None)
    loaded = dist_checkpointing.load(saved(other, of_other, True, kind), folder)
    other.module.load_state_dict(loaded["model"])
    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", _with_own_step):
        of_other.load_state_dict(loaded["optimizer"])
    set_steps(of_other, 2)
    step(other, of_other, 2)
    return model.module, other.module


@pytest.mark.parametrize(("writer", "reader"), WAYS)
@pytest.mark.parametrize("kind", ["fully_reshardable", None])
@run_on("four_ranks")
def test_optimizers_by_parameter(writer, reader, kind):
    """The format that is not in the order of memory, and an optimizer that is not distributed (None)."""
    model, other = continued(writer, reader, kind)
    for actual, wanted in zip(parameters(other.experts), parameters(model.experts), strict=True):
        assert torch.equal(actual, wanted)


@run_on("four_ranks")
def test_optimizers_in_the_order_of_memory():
    """Megatron's default is continued by the same kind of experts alone."""
    for kind in KINDS:
        model, other = continued(kind, kind, "dp_reshardable")
        for actual, wanted in zip(parameters(other.experts), parameters(model.experts), strict=True):
            assert torch.equal(actual, wanted)
    for writer, reader, what in (
        ("sequential", "grouped", "with Megatron's experts .* this run has grouped experts"),
        ("grouped", "sequential", "with grouped experts .* this run has Megatron's experts"),
    ):
        with pytest.raises(ValueError, match=what + ".*--dist-ckpt-optim-fully-reshardable"):
            continued(writer, reader, "dp_reshardable")
        dist.barrier()


@run_on("four_ranks")
def test_megatron_alone_refuses_the_order_of_memory():
    """A process without this project, which compares the sizes of buckets alone."""
    config = settings(params_dtype=torch.bfloat16, bf16=True)
    sizes = {}
    for kind in KINDS:
        _, optimizer = trained(kind, config, 3, 1)
        of_experts = [of for of in optimizer.chained_optimizers if of.buffers[0].params[0].dim() > 1][-1:]
        sizes[kind] = of_experts[0].per_bucket_numel_unpadded
    assert sizes["grouped"][:-1] == sizes["sequential"], "Megatron's own numbers are the same"
    assert "--dist-ckpt-optim-fully-reshardable" in str(sizes["grouped"][-1]) and len(sizes["sequential"]) == 1


@pytest.mark.parametrize(("writer", "reader"), [(True, True), (False, False), (True, False), (False, True)])
def test_optimizers_of_the_torch_format(writer, reader):
    """Whose sizes Megatron compares, too."""
    sizes = {"buckets_coalesced": True, 0: {"bf16": {"numel_unpadded": 8}}}
    loaded = []

    def optimizer(has_grouped_experts):
        parameter = torch.nn.Parameter(torch.zeros(8))
        if has_grouped_experts:
            setattr(parameter, optimizer_states.IS_GROUPED, True)
        return SimpleNamespace(buffers=[SimpleNamespace(params=[parameter])])

    state = optimizer_states._with_noted_sizes(optimizer(writer), lambda _: copy.deepcopy(sizes))
    assert (state == sizes) is not writer, "a Megatron without this project refuses another size"

    def load():
        optimizer_states._without_noted_sizes(optimizer(reader), lambda _, state: loaded.append(state), state)

    if writer is reader:
        load()
        assert loaded == [sizes]
    else:
        with pytest.raises(ValueError, match="--dist-ckpt-optim-fully-reshardable"):
            load()
        assert not loaded

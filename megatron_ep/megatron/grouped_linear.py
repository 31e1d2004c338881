"""`GroupedLinear`: one linear layer of all local experts of a rank, with one parameter, and its entries in checkpoints.

L local experts of E, `out` and `in` the width of this rank's part of an expert. Checkpoints name each expert's part, so
that experts of Megatron's read what is written here, and the other way round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron_ep.megatron.grouped_products import Delayed, adds_to_main_grad, linear, weight_gradient
from megatron_ep.megatron.optimizer_states import IS_GROUPED, guard

DELAYS = ("delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad")
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


class GroupedLinear(torch.nn.Module):
    """Weights [L, out, in], and biases [L, out] if the model has any, of one linear layer of the local experts.

    num_local_experts: L.
    shape: out and in on this rank.
    split: the axis of `shape` that is divided among the tensor-parallel ranks of experts: 0 or 1.
    halves: 2 if `out` is a gate and what it multiplies, each divided by itself; otherwise 1.
    config, groups: the model's.

    The values are undefined until `initialize`.
    """

    def __init__(
        self,
        num_local_experts: int,
        shape: tuple[int, int],
        split: int,
        halves: int,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        guard()
        self._config, self._groups, self._split, self._halves = config, groups, split, halves
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        dtype = config.params_dtype
        self.weight = torch.nn.Parameter(torch.empty(num_local_experts, *shape, device=device, dtype=dtype))
        bias = torch.zeros(num_local_experts, shape[0], device=device, dtype=dtype) if config.add_bias_linear else None
        self.bias = None if bias is None else torch.nn.Parameter(bias)
        # Megatron reduces the gradients of such parameters over the ranks that have the same experts.
        has_own_ranks = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for parameter in self.parameters():
            is_split = parameter is self.weight or split == 0
            _mark(parameter, allreduce=not has_own_ranks, tensor_model_parallel=is_split, **{IS_GROUPED: True})
            if is_split:
                _mark(parameter, partition_dim=split + 1, partition_stride=1)
        delays = any(getattr(config, field, False) for field in DELAYS)
        self._delayed: Delayed | None = deque() if delays else None
        self._hooks: list[Callable[[], None]] = []
        if delays:  # data parallelism then gives its hook to `register_wgrad_accumulation_and_reduce_hooks`
            _mark(self.weight, skip_backward_post_hook=True)
        self._register_state_dict_hook(_name_experts)
        self._register_load_state_dict_pre_hook(_join_experts, with_module=True)

    def initialize(self, expert: int, init_method: Callable[[torch.Tensor], Any], draws_whole: bool) -> None:
        """Draws the weights of a local expert, on a GPU from the generator that Megatron has for experts.

        draws_whole: on the host draw those of all tensor-parallel ranks, and keep this rank's, as Megatron's own layers
            do; otherwise only this rank's, as Transformer Engine's do.
        """
        weight, tp = self.weight.data[expert], self._groups.expt_tp
        if self._config.use_cpu_initialization and draws_whole:
            sizes = [size * (tp.size() if axis == self._split else 1) for axis, size in enumerate(weight.shape)]
            _initialize_affine_weight_cpu(
                weight,
                *sizes,
                weight.shape[self._split],
                self._split,
                init_method,
                stride=self._halves,
                params_dtype=self._config.params_dtype,
                rank=tp.rank(),
                world_size=tp.size(),
                skip_set_tensor_parallel_attributes=True,
            )
        elif get_cuda_rng_tracker().is_initialized() and not self._config.use_cpu_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(weight)
        else:
            init_method(weight)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Returns x [R, in] times the weights of each row's expert [R, out], without a bias.

        offsets: int32 [L], ends of the experts' rows, on the device of x.
        """
        return linear(x, self.weight, offsets, self._delayed)

    def backward_dw(self) -> None:
        """Computes the weights' gradient of the earliest backward pass that left it, if the config delays it."""
        if not self._delayed:
            return
        gradient = weight_gradient(self.weight, *self._delayed.popleft())
        is_added = adds_to_main_grad(self.weight)
        if self._hooks or not is_added:
            before = self.weight.grad
            self.weight.grad = gradient if before is None or is_added else before + gradient
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Runs the hook after each `backward_dw`. Megatron's data parallelism calls this with the hook of `weight`."""
        self._hooks.append(hook)

    def sharded_entries(
        self, name: str, prefix: str, offsets: Sequence[tuple[int, int, int]], metadata: dict | None
    ) -> dict[str, Any]:
        """Returns the entries of a distributed checkpoint, which has a tensor of all experts, or one for each if the
        metadata says so.

        name: of this linear layer, such as linear_fc1.
        prefix, offsets, metadata: as Megatron passes to `sharded_state_dict` of the experts.
        """
        tp, ep, edp = self._groups.expt_tp, self._groups.ep, self._groups.expt_dp
        local = self.weight.shape[0]
        first, total, axis = local * ep.rank(), local * ep.size(), len(offsets)
        is_apart = bool((metadata or {}).get("singleton_local_shards", False))

        def place(expert: int) -> tuple[str, tuple[tuple[int, int, int], ...]]:
            """The prefix and the offsets of a local expert."""
            if is_apart:
                return f"{prefix}experts.{first + expert}.", tuple(offsets)
            return f"{prefix}experts.", (*offsets, (axis, first + expert, total))

        entries: dict[str, Any] = {}
        for kind, parameter in self.named_parameters():
            is_split = kind == "weight" or self._split == 0
            halves = self._halves if is_split else 1
            replica = (0, 0 if is_split else tp.rank(), edp.rank())
            key = f"{prefix}experts.{name}.{kind}"
            build = _builder(place, prefix, self._split if is_split else None, halves, tp.rank(), tp.size(), is_apart)
            entries[f"{prefix}{name}.{kind}"] = ShardedTensorFactory(
                key, parameter, build, _merger(halves, self._split if is_split else 0), replica
            )
        for expert in range(local):  # empty without fp8, but Transformer Engine's experts ask for them
            key, at = place(expert)
            entries[f"{prefix}{name}._extra_state{expert or ''}"] = make_sharded_object_for_checkpoint(
                _no_state(), f"{key}{name}._extra_state", at, (0, tp.rank(), edp.rank())
            )
        return entries


def _mark(parameter: torch.Tensor, **attributes: Any) -> None:
    """Sets attributes by which Megatron knows what a parameter is."""
    for name, value in attributes.items():
        setattr(parameter, name, value)


def _builder(
    place: Callable[[int], tuple[str, tuple[tuple[int, int, int], ...]]],
    prefix: str,
    split: int | None,
    halves: int,
    rank: int,
    ranks: int,
    is_apart: bool,
) -> Callable[..., list[ShardedTensor]]:
    """Returns the function that divides a tensor [L, ...], a parameter or a state of the optimizer, into a checkpoint's
    tensors. rank, ranks: among which the axis `split` of an expert is divided."""

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        if flattened_range is not None:
            raise ValueError(
                "this format of optimizer states cannot hold those of grouped experts, whose parameters are flattened: "
                f"use {RESHARDABLE}"
            )
        parts = []
        for expert, of_expert in enumerate(tensor.detach()):
            own_prefix, at = place(expert)
            own_key = key.replace(f"{prefix}experts.", own_prefix, 1)
            pieces = of_expert.chunk(halves, dim=split or 0)
            for half, piece in enumerate(pieces):
                suffix = ""
                where: tuple[tuple[int, int, int], ...] = ()
                if split is not None and (halves == 1 or is_apart):
                    where = ((len(at) + split, rank, ranks),)
                elif split is not None:
                    where = ((len(at) + split, rank + half * ranks, halves * ranks),)
                if halves > 1 and is_apart:
                    suffix = ("_w", "_v")[half]
                parts.append(
                    ShardedTensor.from_rank_offsets(
                        own_key + suffix, piece, *at, *where, replica_id=replica_id, prepend_axis_num=len(at)
                    )
                )
        return parts

    return build


def _merger(halves: int, split: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Returns the inverse of `_builder`."""

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            experts = [torch.cat(parts[i : i + halves], dim=split) for i in range(0, len(parts), halves)]
            return torch.stack(experts)

    return merge


def _no_state() -> torch.Tensor:
    """Returns what the extra state of Transformer Engine's modules is without fp8."""
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _name_experts(module: GroupedLinear, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Gives a state dict the keys of TEGroupedLinear: weight0, weight1, ..., bias0, ... One with the parameters
    themselves (keep_vars) keeps the keys of `sharded_entries`, which Megatron puts over it."""
    for kind, parameter in module.named_parameters():
        joined = state.get(f"{prefix}{kind}", parameter)
        if joined is not parameter:
            del state[f"{prefix}{kind}"]
            state.update({f"{prefix}{kind}{i}": part for i, part in enumerate(joined.unbind(0))})
    state[f"{prefix}_extra_state"] = _no_state()


def _join_experts(module: GroupedLinear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Takes the keys of TEGroupedLinear for the parameters of all experts."""
    for key in [key for key in state if key.startswith(f"{prefix}_extra_state")]:
        del state[key]
    for kind, parameter in module.named_parameters():
        keys = [f"{prefix}{kind}{i}" for i in range(parameter.shape[0])]
        if f"{prefix}{kind}" not in state and all(key in state for key in keys):
            state[f"{prefix}{kind}"] = torch.stack([state.pop(key) for key in keys])

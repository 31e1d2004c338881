"""Records how many tokens this rank's routers send to each expert, for `megatron-ep balance`: opt-in.

Every pass of a micro-batch through a layer adds one sum to a list. At the end of a step all sums are copied to the host
together, and they are written a step later, so that nothing waits for the GPU. Recomputed passes are omitted because
they repeat the same choices; passes of evaluation and inference are omitted because they train nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron import agreement, trace_file

MAX_PASSES = 1 << 16  # passes of a step; more mean that `end_step` is not called

_recorder: _Recorder | None = None


def enable(directory: str | os.PathLike[str]) -> None:
    """Records layers built in this process from now on, in a file of this rank in the directory, which is created if
    necessary. Every rank calls it. An existing file is continued.

    A step of Megatron's optimizers ends a step if `megatron_ep.megatron.plugin` is enabled; otherwise call `end_step`
    after each.

    Raises ValueError if the path is not a directory, or cannot be written, and RuntimeError if it is already enabled.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("routing_trace.enable(): already enabled; disable() first")
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"trace {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"trace {path}: cannot be written")
    _recorder = _Recorder(path)
    agreement.before_step = end_step


def follow(layer: MoELayer, config: TransformerConfig, group: dist.ProcessGroup, expert_ranks: int) -> None:
    """Records a layer that has been built, if `enable` has been called.

    group: the group over which it exchanges tokens.
    expert_ranks: number of its ranks that have different experts.

    Raises ValueError if the layer runs in a CUDA graph, whose replays cannot be recorded, or if another layer has
    another number of experts or other ranks.
    """
    if _recorder is not None:
        _recorder.follow(layer, config, group, expert_ranks)


def end_step(number: int | None = None) -> None:
    """Ends a step: the passes since the last call belong to it.

    number: the step's number, from 1. None: the iteration of Megatron-LM's script, otherwise the last plus one.
    """
    if _recorder is not None:
        _recorder.end_step(number)


def disable() -> None:
    """Writes the remaining passes and stops recording. Idempotent."""
    global _recorder
    if _recorder is not None:
        agreement.before_step = None
        recorder, _recorder = _recorder, None
        recorder.close()


@dataclass
class _Step:
    """A step's passes: layers and micro-batches, and counts [passes, E] that are being copied to the host."""

    number: int
    keys: list[tuple[int, int]]
    counts: torch.Tensor
    arrived: torch.cuda.Event | None

    def records(self) -> np.ndarray[Any, Any]:
        if self.arrived is not None:
            self.arrived.synchronize()  # does not wait in practice, because the copy began a step ago
        records = np.zeros(len(self.keys), trace_file.record_type(self.counts.shape[1]))
        records["step"] = self.number
        records["layer"], records["micro_batch"] = np.array(self.keys).T
        records["counts"] = self.counts.numpy()
        return records


@dataclass
class _Recorder:
    directory: Path
    step: int = 0  # number of the last step
    handles: list[Any] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # numbers of layers, by id of their routers
    passes: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)  # passes of this step
    micro_batches: dict[int, int] = field(default_factory=dict)  # last micro-batch of this step, by layer
    on_their_way: _Step | None = None
    header: trace_file.Header | None = None
    file: Any = None

    def follow(self, layer: MoELayer, config: TransformerConfig, group: dist.ProcessGroup, expert_ranks: int) -> None:
        graphs = getattr(config, "cuda_graph_impl", "none")
        if graphs != "none":
            raise ValueError(f"cuda_graph_impl is {graphs!r}, must be 'none' with a trace: no Python sees a replay")
        header = trace_file.Header(
            rank=dist.get_rank(),
            group=tuple(dist.get_process_group_ranks(group)),
            expert_ranks=expert_ranks,
            num_experts=int(config.num_moe_experts or 0),
            topk=config.moe_router_topk,
        )
        if self.header not in (None, header):
            raise ValueError("trace: layers differ in their experts or in their ranks, must have the same")
        self.header = header
        # A model that is built again must not count passes of a failed step.
        self.passes.clear()
        self.micro_batches.clear()
        self.numbers.clear()
        self.handles.append(layer.router.register_forward_hook(self._saw))

    def _saw(self, router: torch.nn.Module, _: Any, chosen: Any) -> None:
        """Counts a router's forward pass. chosen: weights, and a bool map [T, E] or ids [T, K]."""
        # A forward pass within a backward pass is a recomputation.
        if not router.training or torch._C._current_graph_task_id() != -1:
            return
        layer = self._number(router)
        micro_batch = self.micro_batches[layer] = self.micro_batches.get(layer, -1) + 1
        if len(self.passes) >= MAX_PASSES:
            raise RuntimeError(f"routing_trace: {MAX_PASSES} passes without an end_step()")
        assert self.header is not None, "follow comes first"
        self.passes.append((layer, micro_batch, counts_of(chosen[1], self.header.num_experts)))

    def _number(self, router: Any) -> int:
        """Returns the number of the layer in the whole model, from 1. Layers of multi-token prediction, which Megatron
        numbers separately, come after the others."""
        if id(router) not in self.numbers:
            number, taken = router.layer_number or 1, set(self.numbers.values())
            while number in taken or (number <= router.config.num_layers and getattr(router, "is_mtp_layer", False)):
                number += router.config.num_layers
            self.numbers[id(router)] = number
        return self.numbers[id(router)]

    def end_step(self, number: int | None) -> None:
        self.step = _iteration(self.step + 1) if number is None else number
        self._write()
        passes, self.passes = self.passes, []
        self.micro_batches.clear()
        if passes:
            counts, arrived = torch.stack([counts for *_, counts in passes]), None
            if self.file is None:
                self.file = self._open()
            if counts.is_cuda:
                for *_, own in passes:  # with 1F1B overlap another stream made them
                    own.record_stream(torch.cuda.current_stream(counts.device))
                on_host = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
                counts = on_host.copy_(counts, non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record()
            keys = [(layer, micro_batch) for layer, micro_batch, _ in passes]
            self.on_their_way = _Step(self.step, keys, counts, arrived)
            if arrived is None:
                self._write()

    def _write(self) -> None:
        step, self.on_their_way = self.on_their_way, None
        if step is not None:
            self.file.write(step.records().tobytes())
            self.file.flush()

    def _open(self) -> Any:
        header = self.header
        assert header is not None, "follow comes first"
        path = trace_file.file_of(self.directory, header.rank)
        if path.exists() and path.stat().st_size:
            there, length = trace_file.read_header(path)
            if there != header:
                raise ValueError(f"trace {path}: is of another run; choose another directory")
            whole = trace_file.record_type(header.num_experts).itemsize  # a killed writer may leave part of a record
            size = path.stat().st_size
            os.truncate(path, size - (size - length) % whole)
            return open(path, "ab")
        file = open(path, "wb")  # noqa: SIM115
        file.write(header.line())
        return file

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self._write()
        if self.file is not None:
            self.file.close()


def counts_of(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Returns the tokens of each expert, int32 [E] on the device, for a bool map [T, E] or ids [T, K], -1 for none.
    Unlike torch.bincount it does not make the host wait."""
    if chosen.dtype == torch.bool:
        return chosen.sum(dim=0, dtype=torch.int32)
    ids = chosen.detach().reshape(-1) + 1
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))[1:]


def _iteration(step: int) -> int:
    """Returns the current iteration of Megatron-LM's script; `step` in other programs."""
    variables = sys.modules.get("megatron.training.global_vars")
    arguments = None if variables is None else vars(variables).get("_GLOBAL_ARGS")
    done = getattr(arguments, "curr_iteration", None)
    return step if done is None else int(done) + 1


atexit.register(disable)

"""Reads routing traces. E experts; W ranks exchange tokens, EP of them have different experts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ep.megatron.trace_file import SUFFIX, read_header, record_type

# Limit for a trace in memory. If a trace is longer, steps at equal distances are read.
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tokens, and n passes of micro-batches through their layers, in the order of the keys.

    sources: ranks of the rows of counts, for messages. steps, layers, micro_batches: int [n]. counts: uint32 [n, W, E].
    """

    sources: tuple[int, ...]
    steps: np.ndarray
    layers: np.ndarray
    micro_batches: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class Trace:
    """The records of all ranks, or of a part of the steps. recorded_steps: steps in the files."""

    num_experts: int
    expert_ranks: int
    groups: tuple[Group, ...]
    recorded_steps: int
    topk: int


def read(directory: Path, max_bytes: int = MAX_BYTES) -> Trace:
    """Reads a directory of `--ep-trace`.

    If a step was repeated after a restart, its last passes count. Steps that not all ranks have are omitted.

    Raises ValueError if a file is not a trace, or of another run; if a rank's file is missing; if no step is complete;
    if ranks have recorded different layers or micro-batches.
    """
    files = [_File(path) for path in sorted(directory.glob(f"*{SUFFIX}"))]
    first = files[0].header
    for file in files[1:]:
        same = dataclasses.replace(file.header, rank=first.rank, group=first.group)
        if same != first or len(file.header.group) != len(first.group):
            raise ValueError(f"{file.path}: is of another run than {files[0].path.name}")
    by_rank = {file.header.rank: file for file in files}
    groups = sorted({file.header.group for file in files})
    for group in groups:
        for rank in group:
            if rank not in by_rank or by_rank[rank].header.group != group:
                raise ValueError(f"{directory}: has no file of rank {rank}, which exchanges tokens with {group[0]}")
    members = [[by_rank[rank] for rank in group] for group in groups]
    steps = files[0].steps
    for file in files[1:]:
        steps = np.intersect1d(steps, file.steps)
    if not len(steps):
        raise ValueError(f"{directory}: has no step that all {len(files)} ranks have recorded")
    size = sum(len(file.keys) for file in files) * 4 * first.num_experts
    taken = steps[:: -(-size // max_bytes) or 1]
    return Trace(
        num_experts=first.num_experts,
        expert_ranks=first.expert_ranks,
        groups=tuple(_group(files, taken) for files in members),
        recorded_steps=len(steps),
        topk=first.topk,
    )


class _File:
    """A rank's memory-mapped records, sorted by their keys [n, 3]: step, layer, micro-batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header, offset = read_header(path)
        kind = record_type(self.header.num_experts)
        size = path.stat().st_size - offset
        self.records: Any = np.empty(0, kind)
        if size >= kind.itemsize:
            self.records = np.memmap(path, kind, "r", offset, (size // kind.itemsize,))
        keys = np.stack([self.records[name] for name in ("step", "layer", "micro_batch")], axis=1)
        order = np.lexsort((np.arange(len(keys)), keys[:, 2], keys[:, 1], keys[:, 0]))
        keys = keys[order]
        last = np.ones(len(keys), bool)
        last[:-1] = (keys[1:] != keys[:-1]).any(axis=1)
        if size % kind.itemsize and len(keys):  # the writer was killed during a step
            last &= keys[:, 0] != self._cut_step(size % kind.itemsize)
        self.keys, self.order = keys[last], order[last]

    def _cut_step(self, rest: int) -> int:
        with open(self.path, "rb") as file:
            file.seek(-rest, os.SEEK_END)
            begun = file.read(4)
        return int.from_bytes(begun, "little") if len(begun) == 4 else int(self.records["step"][-1])

    @property
    def steps(self) -> np.ndarray:
        return np.unique(self.keys[:, 0])

    def of(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys and counts of these steps."""
        taken = np.isin(self.keys[:, 0], steps)
        return self.keys[taken], self.records["counts"][self.order[taken]]


def _group(files: Sequence[_File], steps: np.ndarray) -> Group:
    keys, counts = files[0].of(steps)
    all_counts = [counts]
    for file in files[1:]:
        others, counts = file.of(steps)
        if not np.array_equal(keys, others):
            raise ValueError(f"{file.path}: has other layers or micro-batches than {files[0].path.name}")
        all_counts.append(counts)
    return Group(files[0].header.group, keys[:, 0], keys[:, 1], keys[:, 2], np.stack(all_counts, axis=1))


def since(trace: Trace, step: int) -> Trace:
    """Returns the trace from a step on.

    Raises ValueError if the trace ends before that step.
    """
    last = max(int(group.steps.max()) for group in trace.groups)
    if step > last:
        raise ValueError(f"--first-step is {step}, but the trace ends with step {last}")
    return dataclasses.replace(trace, groups=tuple(_taken(group, group.steps >= step) for group in trace.groups))


def folded(trace: Trace, ranks: int) -> Trace:
    """Returns the trace as if this number of ranks shared the experts.

    Raises ValueError if it does not divide the number of experts.
    """
    if trace.num_experts % ranks:
        raise ValueError(f"--fold is {ranks}, must divide the {trace.num_experts} experts")
    return dataclasses.replace(trace, expert_ranks=ranks)


def merged(trace: Trace, passes: int) -> Trace:
    """Returns the trace with this number of consecutive passes of a layer added to one, which has the step and
    micro-batch of the first. The passes that remain at the end are omitted.

    Raises ValueError if a layer has fewer passes.
    """
    return dataclasses.replace(trace, groups=tuple(_merged(group, passes) for group in trace.groups))


def _merged(group: Group, passes: int) -> Group:
    firsts, counts = [], []
    for layer in np.unique(group.layers):
        [of_layer] = np.nonzero(group.layers == layer)
        if len(of_layer) < passes:
            raise ValueError(f"--merge is {passes}, but layer {layer} has {len(of_layer)} passes")
        together = of_layer[: len(of_layer) // passes * passes].reshape(-1, passes)
        firsts.append(together[:, 0])
        counts.append(group.counts[together].sum(axis=1))
    order = np.argsort(np.concatenate(firsts))
    kept = np.concatenate(firsts)[order]
    steps, layers, micro_batches = group.steps[kept], group.layers[kept], group.micro_batches[kept]
    return Group(group.sources, steps, layers, micro_batches, np.concatenate(counts)[order])


def _taken(group: Group, taken: np.ndarray) -> Group:
    columns = (group.steps, group.layers, group.micro_batches, group.counts)
    return Group(group.sources, *(column[taken] for column in columns))

"""Megatron-Core's own traces of routing (`--moe-routing-trace-path`, from 0.19 on): JSON lines, a file per rank.

Layers are numbered within a pipeline stage. Files have no groups, nodes and number of experts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ep.tools.balance.trace import Group, Trace

PATTERN = "router_trace_rank*.jsonl"
BEGINNING = re.compile(r'\{"step": (\d+),')
MTP = 10_000  # offset of layers of multi-token prediction, which sorts them after all others

Key = tuple[int, int, int]


def read(directory: Path, num_experts: int | None, expert_ranks: int | None) -> Trace:
    """Reads a directory of Megatron's traces.

    Micro-batches are numbered in the order of a layer's lines, so that recomputed passes count again.

    num_experts: E, which the files do not contain.
    expert_ranks: EP, the number of consecutive ranks that exchange tokens; None: all ranks.

    Raises ValueError if num_experts is None; if ranks do not divide into groups of expert_ranks; if a line is invalid;
    if an expert is not below num_experts; if ranks have different layers.
    """
    if num_experts is None:
        raise ValueError(f"{directory}: is Megatron's trace, which does not say how many experts there are: --experts")
    files = {int(re.sub(r"\D", "", path.stem)): path for path in directory.glob(PATTERN)}
    ranks = sorted(files)
    ep = expert_ranks or len(ranks)
    if len(ranks) % ep or num_experts % ep:
        raise ValueError(f"--ep is {ep}, must divide the {len(ranks)} ranks of the trace and the {num_experts} experts")
    passes: dict[int, dict[Key, np.ndarray]] = {rank: {} for rank in ranks}
    topk = 0
    for rank in ranks:
        topk = _read_rank(files[rank], num_experts, passes[rank])
    steps = set.intersection(*({key[0] for key in of_rank} for of_rank in passes.values()))
    if not steps:
        raise ValueError(f"{directory}: has no step that all {len(ranks)} ranks have recorded")
    keys = sorted(key for key in passes[ranks[0]] if key[0] in steps)
    for rank in ranks:
        if sorted(key for key in passes[rank] if key[0] in steps) != keys:
            raise ValueError(
                f"{files[rank]}: has other layers or micro-batches than {files[ranks[0]].name}; of several pipeline "
                "stages, give each a directory of its own"
            )
    columns = np.array(keys).T

    def group(members: list[int]) -> Group:
        counts = np.stack([np.stack([passes[rank][key] for key in keys]) for rank in members], axis=1)
        return Group(tuple(members), columns[0], columns[1], columns[2], counts)

    return Trace(
        num_experts=num_experts,
        expert_ranks=ep,
        groups=tuple(group(ranks[i : i + ep]) for i in range(0, len(ranks), ep)),
        recorded_steps=len(steps),
        topk=topk,
    )


def _read_rank(file: Path, num_experts: int, passes: dict[Key, np.ndarray]) -> int:
    """Adds the counts [E] of each pass. Returns the number of choices per token."""
    seen: dict[tuple[int, int], int] = {}
    topk = step = 0
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith("\n"):  # the writer was killed during a step
                    begun = BEGINNING.match(line)
                    cut = int(begun[1]) if begun else step
                    for key in [key for key in passes if key[0] == cut]:
                        del passes[key]
                    break
                step, layer, topk, chosen = _parse(file, number, line)
                if chosen.size and not (chosen.min() >= 0 and chosen.max() < num_experts):
                    bad = chosen.max() if chosen.max() >= num_experts else chosen.min()
                    raise ValueError(f"{file}: line {number} has expert {bad}, must be in [0, {num_experts})")
                micro_batch = seen[step, layer] = seen.get((step, layer), -1) + 1
                passes[step, layer, micro_batch] = np.bincount(chosen, minlength=num_experts).astype(np.uint32)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    return topk


def _parse(file: Path, number: int, line: str) -> tuple[int, int, int, np.ndarray]:
    try:
        record: dict[str, Any] = json.loads(line)
        layer = int(record["layer"])
        if record["block"] == "mtp":
            layer += MTP * (1 + int(record["mtp_idx"]))
        chosen = np.asarray(record["top_indices"], dtype=np.int64).reshape(-1)
        return int(record["step"]), layer, int(record["topk"]), chosen
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{file}: line {number} is none of Megatron's routing traces") from None

"""Traces of routing as files, for tests that know what is in them."""

import dataclasses
import json

import numpy as np

from megatron_ep.megatron import trace_file

HEADER = trace_file.Header(rank=0, group=(0,), expert_ranks=1, num_experts=1, topk=1)


def write(directory, counts, layers=(1,), group=None, first_step=1, **fields):
    """Files of all ranks of a group.

    counts: [steps, layers, micro-batches, W, E], what each rank's tokens choose.
    """
    counts = np.asarray(counts)
    steps, _, micro_batches, ranks, experts = counts.shape
    group = tuple(range(ranks)) if group is None else group
    directory.mkdir(exist_ok=True)
    for place, rank in enumerate(group):
        header = dataclasses.replace(HEADER, rank=rank, group=group, expert_ranks=ranks, num_experts=experts)
        header = dataclasses.replace(header, **fields)
        records = np.zeros(steps * len(layers) * micro_batches, trace_file.record_type(experts))
        keys = [(s, n, m) for s in range(steps) for n in range(len(layers)) for m in range(micro_batches)]
        for record, (step, number, micro_batch) in zip(records, keys, strict=True):
            record["step"], record["layer"], record["micro_batch"] = step + first_step, layers[number], micro_batch
            record["counts"] = counts[step, number, micro_batch, place]
        trace_file.file_of(directory, rank).write_bytes(header.line() + records.tobytes())
    return directory


def write_megatron(directory, choices):
    """Files as Megatron-Core 0.19's router_trace writes them.

    choices: by rank, a list of (step, layer, experts of each token).
    """
    directory.mkdir(exist_ok=True)
    for rank, passes in choices.items():
        lines = [
            {
                "step": step,
                "stage": "pre_dispatch",
                "block": "decoder",
                "layer": layer,
                "rank": rank,
                "num_tokens": len(experts),
                "topk": len(experts[0]),
                "top_indices": experts,
            }
            for step, layer, experts in passes
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"router_trace_rank{rank}.jsonl").write_text(text)
    return directory

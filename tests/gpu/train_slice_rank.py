"""One rank of a run by `gpu_script`: pretrain_gpt.py of MEGATRON_LM, its steps measured. RESULT: where rank 0 leaves
them.

PACKED: anything but nothing: mock data comes as packed sequences of other lengths on every rank. PROFILED: the step,
counted from 0, whose GPU time and kernels are taken; its wall time then includes the profiler's.
EXPERTS: grouped: this project's experts in Megatron's own layers.
"""

import contextlib
import dataclasses
import json
import os
import re
import runpy
import sys
import time
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_ep.megatron.stand_ins.host_script import take_installed_helpers


def of_all_ranks(value):
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


# Kernels that wait for another rank, whose time therefore is not their own.
WAITING = re.compile(r"ncclDevKernel|(notify|dispatch|combine)_kernel")


def gpu_time(profiler):
    """Seconds in which the GPU computed, and in which it moved rows between ranks or waited for them; and for each
    kernel its seconds and launches, longest first."""
    spans, kernels = {"seconds": [], "between_ranks": []}, {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            kind = "between_ranks" if WAITING.search(event.name()) else "seconds"
            spans[kind].append((event.start_ns(), event.start_ns() + event.duration_ns()))
            seconds, launches = kernels.get(event.name(), (0.0, 0))
            kernels[event.name()] = (seconds + event.duration_ns() / 1e9, launches + 1)
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {
        **{kind: covered(of_kind) / 1e9 for kind, of_kind in spans.items()},
        "launches": sum(launches for _, launches in kernels.values()),
        "kernels": [[name, *row] for name, row in longest],
    }


def covered(spans):
    """The length that at least one of the spans (start, end) covers."""
    length, until = 0, 0
    for start, end in sorted(spans):
        length += max(0, end - max(start, until))
        until = max(until, end)
    return length


def measure():
    """Every step's wall time between synchronizations, loss and norm, and one step's time of the GPU."""
    from megatron.training import training

    step, steps, profiled = training.train_step, [], {}

    def measured(*args, **kwargs):
        is_profiled = len(steps) == int(os.environ.get("PROFILED", -1))
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if is_profiled else None
        torch.cuda.synchronize()
        began = time.perf_counter()
        with profiler or contextlib.nullcontext():
            result = step(*args, **kwargs)
            torch.cuda.synchronize()
        row = {"seconds": time.perf_counter() - began, "norm": float(result[5])}
        if profiler is not None:
            profiled.update(gpu_time(profiler))
        row["loss"] = float(result[0]["lm loss"]) if "lm loss" in result[0] else None
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            row["loss"] = of_all_ranks(row["loss"])[-1]  # the last stage has it
        dispatchers = [
            module.token_dispatcher
            for chunk in args[2]
            for module in chunk.modules()
            if getattr(module, "token_dispatcher", None) is not None
        ]
        row["tokens"] = of_all_ranks(dispatchers[0].hidden_shape[0]) if os.environ.get("PACKED") else None
        steps.append(row)
        if torch.distributed.get_rank() == 0:
            result_file = {
                "steps": steps,
                "dispatchers": sorted({type(dispatcher).__name__ for dispatcher in dispatchers}),
                "alignments": sorted({getattr(dispatcher, "alignment", 0) for dispatcher in dispatchers}),
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "gpu": profiled,
            }
            Path(os.environ["RESULT"]).write_text(json.dumps(result_file))
        return result

    training.train_step = measured


def take_grouped_experts():
    """Megatron's own layers, with its own dispatcher, take this project's experts."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_ep.megatron.experts import GroupedExperts

    build = MoELayer.__init__

    def with_grouped_experts(layer, config, submodules=None, *args, **options):
        build(layer, config, dataclasses.replace(submodules, experts=GroupedExperts), *args, **options)

    MoELayer.__init__ = with_grouped_experts


take_installed_helpers()
measure()
if os.environ.get("EXPERTS") == "grouped":
    take_grouped_experts()
if os.environ.get("PACKED"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))
    import packed_sequences

    packed_sequences.pack_mock_data()
sys.argv[0] = str(Path(os.environ["MEGATRON_LM"], "pretrain_gpt.py"))
runpy.run_path(sys.argv[0], run_name="__main__")

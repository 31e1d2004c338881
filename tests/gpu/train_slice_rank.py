"""One rank of a run by `gpu_script`: pretrain_gpt.py of MEGATRON_LM, its steps measured. RESULT: where rank 0 leaves
them.

TIMED_FROM: the step from which dispatchers are timed, after the steps whose own time counts; 0: never.
TRACE: a file, which receives the profiler's trace of rank 0's last step.
PACKED: anything but nothing: mock data comes as packed sequences of other lengths on every rank.
"""

import contextlib
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from dispatch_timer import DispatchTimer
from megatron.core import parallel_state

from megatron_ep.megatron.stand_ins.host_script import take_installed_helpers


@contextlib.contextmanager
def traced(step):
    """Traces the step if it is the last one, and a trace is wanted of this rank."""
    if not os.environ.get("TRACE") or step + 1 < int(os.environ["STEPS"]) or torch.distributed.get_rank() > 0:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
    profile.export_chrome_trace(os.environ["TRACE"])


def of_all_ranks(value):
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def measure():
    """Every step's wall time between synchronizations, loss, norm, and the seconds inside the dispatchers' steps."""
    from megatron.training import training

    step, timed_from = training.train_step, int(os.environ["TIMED_FROM"])
    steps, timers = [], []

    def measured(*args, **kwargs):
        if timed_from and len(steps) == timed_from:
            timers.extend(DispatchTimer(chunk, "cuda") for chunk in args[2])
        before = sum(timer.seconds for timer in timers)
        torch.cuda.synchronize()
        began = time.perf_counter()
        with traced(len(steps)):
            result = step(*args, **kwargs)
            torch.cuda.synchronize()
        row = {"seconds": time.perf_counter() - began, "norm": float(result[5])}
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
        row["dispatch"] = sum(timer.seconds for timer in timers) - before if timers else None
        steps.append(row)
        if torch.distributed.get_rank() == 0:
            result_file = {
                "steps": steps,
                "dispatchers": sorted({type(dispatcher).__name__ for dispatcher in dispatchers}),
                "alignments": sorted({getattr(dispatcher, "alignment", 0) for dispatcher in dispatchers}),
                "peak_bytes": torch.cuda.max_memory_allocated(),
            }
            Path(os.environ["RESULT"]).write_text(json.dumps(result_file))
        return result

    training.train_step = measured


take_installed_helpers()
measure()
if os.environ.get("PACKED"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))
    import packed_sequences

    packed_sequences.pack_mock_data()
sys.argv[0] = str(Path(os.environ["MEGATRON_LM"], "pretrain_gpt.py"))
runpy.run_path(sys.argv[0], run_name="__main__")

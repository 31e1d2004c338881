"""One rank of a run by `gpu_script`: pretrain_gpt.py of MEGATRON_LM, its steps measured. RESULT: where rank 0 leaves
them.

PACKED: anything but nothing: mock data comes as packed sequences of other lengths on every rank.
"""

import json
import os
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


def measure():
    """Every step's wall time between synchronizations, loss and norm."""
    from megatron.training import training

    step, steps = training.train_step, []

    def measured(*args, **kwargs):
        torch.cuda.synchronize()
        began = time.perf_counter()
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

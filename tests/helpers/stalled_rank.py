"""One rank of a training run in which rank 1 stays away from the backward pass of step STALLED for longer than a wait.

    stalled_rank.py RECIPE OUT CACHE DEVICE LATENESS

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as for torchrun. LATENESS is `late` (of a host backend: it tells of a
failure as late as a GPU) or `prompt`. Prints the error that ended the rank, and whether its parameters are those of
step STALLED - 1.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from unittest import mock

import torch

STALLED = 3
TIMEOUT = 2.0
RECIPE_CHANGES = (
    "topology.nodes=1",
    "topology.ranks_per_node=2",
    "train.micro_batch_size=8",  # one a step
    "train.train_iters=6",
    "train.distributed_timeout=60",
    "model.num_layers=1",
    "model.moe_layer_freq=1",
    "checkpoint.save_interval=1",
)


def main() -> int:
    recipe_file, out, device, lateness = sys.argv[1:]
    os.environ["MEGATRON_EP_TIMEOUT"] = str(TIMEOUT)
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from host_backends import LateBackend, with_backend

    import megatron_ep as ep
    from megatron_ep.training import loop, model, recipe

    changes = [*RECIPE_CHANGES, f"train.device={device}"]
    seen = {"steps": 0, "forwards": 0, "kept": None, "model": None}
    forward_step, build_model, build_optimizer = loop._forward_step, model.build_model, model.build_optimizer

    def stall(*_):
        time.sleep(3 * TIMEOUT)

    def forward_step_then_stall(*args):
        losses, reduce = forward_step(*args)
        seen["forwards"] += 1
        if seen["forwards"] == STALLED and os.environ["RANK"] == "1":
            losses.register_hook(stall)
        return losses, reduce

    def parameters():
        return [parameter.detach().cpu().clone() for parameter in seen["model"].parameters()]

    def build_and_keep(*args):
        seen["model"] = build_model(*args)
        return seen["model"]

    def build_watched(*args):
        optimizer, scheduler = build_optimizer(*args)
        step = optimizer.step

        def watched():
            result = step()
            seen["steps"] += 1
            seen["kept"] = parameters()
            return result

        optimizer.step = watched
        return optimizer, scheduler

    with (
        with_backend(LateBackend) if lateness == "late" else contextlib.nullcontext(),
        mock.patch.object(loop, "_forward_step", forward_step_then_stall),
        mock.patch.object(model, "build_model", build_and_keep),
        mock.patch.object(model, "build_optimizer", build_watched),
    ):
        try:
            loop.train(recipe.load(Path(recipe_file), changes), Path(out), resume=False)
        except ep.EPError as error:
            print(f"{type(error).__name__}: {error}")
        except BaseException as error:
            print(f"another error, {type(error).__name__}: {error}")
    unchanged = all(map(torch.equal, parameters(), seen["kept"]))
    print(f"{seen['steps']} steps, parameters {'unchanged' if unchanged else 'CHANGED'}", flush=True)
    os._exit(3)  # a process group whose peer has gone may not end by itself


if __name__ == "__main__":
    main()

"""Records what the routers of `recipes/small_moe_routing.yaml` choose while Megatron-LM's pretrain_gpt.py trains it on
text with Transformer Engine, for `megatron-ep balance`. Prints the loss every 25 steps.

    PYTHONPATH=$PWD MEGATRON_LM=tree-of-0.19 python tests/gpu/record_routing.py TEXT [KEY=VALUE ...]

TEXT: an indexed dataset of Megatron's, without .bin and .idx. KEY=VALUE: of the recipe. OUT: folder for the trace
(trace), the steps (routing.json) and the log (default: build/gpu). BUDGET: seconds, the start included (200): what is
not trained by then is left out.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from gpu_script import ROOT, finish, megatron_lm, start, stop

from megatron_ep.training import script_recipe

EVERY = 25
WARM_UP = 20  # steps whose time does not count


def main(text, changes):
    tree = megatron_lm()
    if not Path(f"{text}.idx").is_file():
        sys.exit(f"there is no {text}.idx")
    out = Path(os.environ.get("OUT", ROOT / "build" / "gpu")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.glob("trace/*")):
        sys.exit(f"{out / 'trace'} holds a trace already")
    recipe = script_recipe.load(
        ROOT / "recipes" / "small_moe_routing.yaml",
        [
            "dataset.mock_data=false",
            f"dataset.data_path=[{json.dumps(str(Path(text).resolve()))}]",
            "dataset.split='100,0,0'",
            f"dispatcher.trace={json.dumps(str(out / 'trace'))}",
            *changes,
        ],
    )
    deadline = time.monotonic() + float(os.environ.get("BUDGET", 200))
    steps = train(recipe, tree, out, deadline)
    tokens = recipe.train.global_batch_size * recipe.dataset.seq_length
    seconds = statistics.median(step["seconds"] for step in steps[min(WARM_UP, len(steps) - 1) :])
    print(f"{len(steps)} steps of {tokens:,} tokens, {1e3 * seconds:.0f} ms each")


def train(recipe, tree, out, deadline):
    """Its steps, which it tells of as they come, until the deadline; exits if it fails."""
    running = start(recipe, tree, out, "routing")
    process, result, *_ = running
    told = 0
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            told = tell(steps_of(result), told)
        if process.poll() is None:
            stop(running)
            print("out of time")
        else:
            finish(running, 1.0)
    except RuntimeError as error:
        sys.exit(str(error))
    finally:
        stop(running)
    steps = steps_of(result)
    tell(steps, told)
    if not steps:
        sys.exit(f"no step was done; see {out / 'routing.log'}")
    return steps


def steps_of(result):
    """Those that are in the file, which may be missing or half written."""
    try:
        return json.loads(result.read_text())["steps"]
    except (OSError, ValueError):
        return []


def tell(steps, told):
    """Prints what is due beyond the `told` steps; returns up to which step it is told."""
    for number in range(told + 1, len(steps) + 1):
        if number == 1 or number % EVERY == 0:
            step = steps[number - 1]
            line = f"step {number:4}  loss {step['loss']:.4f}  norm {step['norm']:.3f}  {1e3 * step['seconds']:.0f} ms"
            print(line, flush=True)
    return max(told, len(steps))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])

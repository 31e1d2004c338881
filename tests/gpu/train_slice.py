"""A slice of DeepSeek-V3 in Megatron-LM's pretrain_gpt.py with Transformer Engine: this dispatcher against Megatron's
all-to-all over NCCL with its fused permute, 1F1B overlap on and off, num_sms 24, 16, 8. Prints a table.

    PYTHONPATH=$PWD MEGATRON_LM=tree-of-0.19 python tests/gpu/train_slice.py [CASE ...]

Takes 4, 2 or 1 of the GPUs that are there, as many as EP. megatron_ep (with CUDA kernels), megatron-core's compiled
helpers and transformer_engine must be importable. OUT: folder for slice.json and the logs (default: build/gpu).
BUDGET: seconds for everything (470); cases that no longer fit are said to be left out. STEPS: of each case (14).
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from megatron_ep.megatron import flags
from megatron_ep.training import script_flags, script_recipe

ROOT = Path(__file__).resolve().parents[2]

WARM_UP, TIMED = 4, 4  # the first steps, and the last, in which the dispatchers are timed
# Steps whose losses and norms are compared: later ones magnify roundings. Megatron's all-to-all with and without its
# fused permute are 0.3 % apart at the fifth.
COMPARED = 4
CASES = {  # num_sms (None: Megatron's all-to-all), overlap, options of the door
    "ours, 24 SMs": (24, False, ()),
    "all-to-all": (None, False, ()),
    "ours, 24 SMs, overlap": (24, True, ()),
    "all-to-all, overlap": (None, True, ()),
    "ours, 16 SMs": (16, False, ()),
    "ours, 8 SMs": (8, False, ()),
    "ours, 24 SMs, fused router": (24, False, ("--ep-router", "fused")),
    "ours, 24 SMs, fp8 rows": (24, False, ("--ep-moe-dispatch-fwd-dtype", "fp8")),
    "ours, 24 SMs, probs on combine": (24, False, ("--ep-moe-apply-probs-on-combine",)),
    "ours, 16 SMs, overlap": (16, True, ()),
    "ours, 8 SMs, overlap": (8, True, ()),
}


def main(names):
    tree = os.environ.get("MEGATRON_LM")
    if not tree or not Path(tree, "pretrain_gpt.py").is_file():
        sys.exit("MEGATRON_LM must name a tree of Megatron-LM")
    unknown = [name for name in names if name not in CASES]
    if unknown:
        sys.exit(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    out = Path(os.environ.get("OUT", ROOT / "build" / "gpu"))
    out.mkdir(parents=True, exist_ok=True)
    gpus = max(count for count in (1, 2, 4) if count <= torch.cuda.device_count())
    deadline = time.monotonic() + float(os.environ.get("BUDGET", 470))
    results, longest, failed = {}, 60.0, []
    for name in names or CASES:
        if CASES[name][1] and gpus == 1:
            print(f"{name}: left out, overlap needs EP over 1", flush=True)
        elif deadline - time.monotonic() < longest:
            print(f"{name}: left out, no time", flush=True)
        else:
            began = time.monotonic()
            row = run(name, gpus, tree, out, deadline - began)
            longest = max(longest, time.monotonic() - began)
            if row is None:
                failed.append(name)
            else:
                results[name] = row
                print(line(name, row), flush=True)
            report = {"gpus": gpus, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cases": results}
            (out / "slice.json").write_text(json.dumps(report, indent=1))
    verdict = judge(results)
    print("\n".join(["", HEAD, *(line(name, row) for name, row in results.items()), "", *verdict]))
    sys.exit(1 if failed else 0)


def run(name, gpus, tree, out, limit):
    """The figures of one case, or None when it failed; its log says why."""
    num_sms, overlap, options = CASES[name]
    steps = int(os.environ.get("STEPS", 14))
    recipe = script_recipe.load(
        ROOT / "recipes" / "deepseek_v3_slice_4gpu.yaml",
        [
            f"topology.ranks_per_node={gpus}",
            f"parallel.expert_model_parallel_size={gpus}",
            f"parallel.overlap_moe_expert_parallel_comm={str(overlap).lower()}",
            f"train.train_iters={steps}",
            f"train.global_batch_size={8 * gpus}",
            f"model.num_moe_experts={max(8 * gpus, 16)}",
            f"dispatcher.num_sms={num_sms or 24}",
            "dispatcher.router=megatron",
        ],
    )
    # Apex has the other fusion, which is not everywhere.
    words = [*script_flags.flags(recipe), "--no-gradient-accumulation-fusion"]
    script = str(ROOT / "tests" / "gpu" / "train_slice_rank.py")
    if num_sms is None:
        command = [script, *words, flags.TYPE, "alltoall", "--moe-permute-fusion"]
    else:
        command = ["-m", "megatron_ep.pretrain", *script_flags.door(recipe), *options, script, *words]
    slug = name.replace(", ", "_").replace(" ", "_")
    result, log = out / f"slice_{slug}.json", out / f"slice_{slug}.log"
    result.unlink(missing_ok=True)
    variables = os.environ | script_flags.environment(recipe)
    variables |= {
        "PYTHONPATH": os.pathsep.join([str(Path(tree).resolve()), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RESULT": str(result),
        "STEPS": str(steps),
        # Timing what overlaps says nothing of what it costs.
        "TIMED_FROM": "0" if overlap else str(steps - TIMED),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), *command]
    with open(log, "w") as file:
        process = subprocess.Popen(launch, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
    if status or not result.is_file():
        print(f"{name}: exit status {status}\n" + "\n".join(log.read_text().splitlines()[-25:]), flush=True)
        return None
    measured = json.loads(result.read_text())
    expected = {"MoEAlltoAllTokenDispatcher"} if num_sms is None else {"EPTokenDispatcher"}
    if set(measured["dispatchers"]) != expected:
        print(f"{name}: ran with {measured['dispatchers']}", flush=True)
        return None
    rows = measured["steps"]
    plain = rows[WARM_UP : steps - TIMED]
    timed = [row for row in rows if row["dispatch"] is not None]
    seconds = statistics.median(row["seconds"] for row in plain)
    tokens = recipe.train.global_batch_size * recipe.dataset.seq_length
    dispatch = statistics.median(row["dispatch"] for row in timed) if timed else None
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "dispatch_ms": None if dispatch is None else 1e3 * dispatch,
        "dispatch_share": None if dispatch is None else dispatch / statistics.median(row["seconds"] for row in timed),
        "peak_gib": measured["peak_bytes"] / 2**30,
        "losses": [row["loss"] for row in rows],
        "norms": [row["norm"] for row in rows],
    }


HEAD = f"{'':32} {'step ms':>8} {'tokens/s':>9} {'dispatch + combine':>20} {'peak GiB':>9} {'first, last loss':>18}"


def line(name, row):
    share = "-" if row["dispatch_ms"] is None else f"{row['dispatch_ms']:.1f} ms, {row['dispatch_share']:.1%}"
    losses = f"{row['losses'][0]:.4f} {row['losses'][-1]:.4f}"
    return (
        f"{name:32} {row['step_ms']:8.1f} {row['tokens_per_second']:9,.0f} {share:>20} {row['peak_gib']:9.1f} "
        f"{losses:>18}"
    )


def judge(results):
    """What must hold between this dispatcher and all-to-all, and whether it does."""
    ours, theirs = results.get("ours, 24 SMs"), results.get("all-to-all")
    if ours is None or theirs is None:
        return ["no comparison: one of the two is missing"]
    pairs = [pair for key in ("losses", "norms") for pair in zip(ours[key][:COMPARED], theirs[key], strict=False)]
    apart = max(abs(a - b) / b for a, b in pairs)
    speed, share = theirs["step_ms"] / ours["step_ms"], ours["dispatch_ms"] / theirs["dispatch_ms"]
    same = f"same losses and norms in {COMPARED} steps, apart by at most {apart:.2%} (0.5 %)"
    return [
        f"{'holds' if apart < 5e-3 else 'FAILS'}: {same}",
        f"{'holds' if speed > 1 else 'FAILS'}: a faster step, {speed:.3f} times as fast",
        f"{'holds' if share <= 0.6 else 'FAILS'}: dispatch + combine at most 60 % of all-to-all's, {share:.0%}",
    ]


if __name__ == "__main__":
    main(sys.argv[1:])

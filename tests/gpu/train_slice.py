"""A slice of DeepSeek-V3 in Megatron-LM's pretrain_gpt.py with Transformer Engine: this dispatcher against Megatron's
all-to-all over NCCL with its fused permute, 1F1B overlap on and off, num_sms 24, 16, 8; both with the same load on all
experts, and in fp8; and DeepEP through Megatron's flex dispatcher, where `import deep_ep` finds one that fits. Prints a
table.

    PYTHONPATH=$PWD MEGATRON_LM=tree-of-0.19 python tests/gpu/train_slice.py [CASE ... | wires]

wires: the fp8 models (blockwise, e4m3 and hybrid) with rows and gradients that travel in bf16 and in fp8 (six cases).

Takes 4, 2 or 1 of the GPUs that are there, as many as EP. RECIPE and SET: another recipe and what it changes, as in

    export RECIPE=qwen3_30b_a3b SET="topology.nodes=1 model.num_layers=4 model.num_moe_experts=128"

A step's time is the host's, between synchronizations. Of the last step torch's profiler, whose own cost is in no other
figure, tells the ms in which the GPU computed, and those in which kernels between ranks ran, which also wait for the
other rank's host. On a fast host a step takes little more than these two.

megatron_ep (with CUDA kernels), megatron-core's compiled helpers and transformer_engine must be importable. OUT: folder
for slice.json and the logs (default: build/gpu). BUDGET: seconds for everything (470); cases that no longer fit are
said to be left out. STEPS: of each case (14).
"""

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu_script import ALLTOALL, ALLTOALL_WORDS, FLEX, OURS, ROOT, finish, gpus_taken, megatron_lm, start

from megatron_ep.megatron import flags
from megatron_ep.training import script_recipe

WARM_UP = 4  # steps whose time does not count
# Steps whose losses and norms are compared: later ones magnify roundings. Megatron's all-to-all with and without its
# fused permute are 0.3 % apart at the fifth.
COMPARED = 4
WIRE_STEP = 1.01  # of the time of a step with bf16 on the way
FP8_APART = 0.05  # what Megatron's functional tests allow between losses


@dataclass(frozen=True)
class Case:
    """ep_flags: options of megatron_ep.pretrain; None: Megatron's own dispatcher, with `words`. recipe: what it
    changes. variables: environment, as NAME=VALUE. fuses_gradients: as `gpu_script.start` has it."""

    num_sms: int = 24
    overlap: bool = False
    ep_flags: tuple = ()
    words: tuple = ()
    recipe: tuple = ()
    dispatcher: str = OURS
    variables: tuple = ()
    fuses_gradients: bool = False


def alltoall(words=(), **options):
    return Case(ep_flags=None, words=(*ALLTOALL_WORDS, *words), dispatcher=ALLTOALL, **options)


def fp8(recipe, number_format="hybrid"):
    settings = (f"fp8_format={number_format}", f"fp8_recipe={recipe}", "moe_router_padding_for_quantization=true")
    return tuple(f"precision.{setting}" for setting in settings)


FUSED_ROUTER = ("--ep-router", "fused")
MEGATRON_FUSED_ROUTER = ("--moe-router-fusion",)
CUTLASS = ("NVTE_USE_CUTLASS_GROUPED_GEMM=1",)  # one product for all experts, but for the gradients of weights
# Megatron's all-to-all with all that makes a step of it faster.
BEST = {"variables": CUTLASS, "fuses_gradients": True}
GROUPED = (*FUSED_ROUTER, "--ep-experts", "grouped")
RANKS_HOLD_ALL = 2  # at EP 2 a rank then has room for all rows


def without_wait(factor):
    """Rows have a fixed number, `factor` times those of an even load, and the host waits for no counts."""
    return (*GROUPED, "--ep-moe-expert-rank-capacity-factor", str(factor))


# One graph of the forward and backward passes of all micro-batches.
FULL_GRAPH = (
    *("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "3"),
    *("--no-check-for-nan-in-loss-and-grad", "--te-rng-tracker"),
)
DEEPEP = (flags.TYPE, "flex", flags.BACKEND, "deepep", "--moe-flex-dispatcher-num-sms", "24", "--moe-permute-fusion")
EVEN = ("--moe-router-force-load-balancing",)  # random choices: no rank waits for one with more rows
CASES = {
    "ours, 24 SMs": Case(),
    "all-to-all": alltoall(),
    "ours, 24 SMs, even load": Case(words=EVEN),
    "all-to-all, even load": alltoall(EVEN),
    "ours, 24 SMs, overlap": Case(overlap=True),
    "all-to-all, overlap": alltoall(overlap=True),
    "ours, 16 SMs": Case(16),
    "ours, 8 SMs": Case(8),
    "ours, 24 SMs, fused router": Case(ep_flags=FUSED_ROUTER),
    "ours, fused router, best": Case(ep_flags=FUSED_ROUTER, **BEST),
    "all-to-all, plain permute": Case(ep_flags=None, words=ALLTOALL_WORDS[:2], dispatcher=ALLTOALL),
    "all-to-all, fused router": alltoall(MEGATRON_FUSED_ROUTER),
    "all-to-all, CUTLASS": alltoall(variables=CUTLASS),
    "all-to-all, fused gradients": alltoall(fuses_gradients=True),
    "all-to-all, best": alltoall(MEGATRON_FUSED_ROUTER, **BEST),
    "all-to-all, grouped": alltoall(MEGATRON_FUSED_ROUTER, variables=("EXPERTS=grouped",), fuses_gradients=True),
    "ours, grouped": Case(ep_flags=GROUPED, fuses_gradients=True),
    "ours, grouped, plain gradients": Case(ep_flags=GROUPED),
    "ours, grouped, no wait": Case(ep_flags=without_wait(RANKS_HOLD_ALL), fuses_gradients=True),
    "ours, grouped, no wait, factor 1.5": Case(ep_flags=without_wait(1.5), fuses_gradients=True),
    "ours, grouped, one graph": Case(ep_flags=without_wait(RANKS_HOLD_ALL), words=FULL_GRAPH, fuses_gradients=True),
    "ours, 24 SMs, fp8 rows": Case(ep_flags=("--ep-moe-dispatch-fwd-dtype", "fp8")),
    "ours, 24 SMs, probs on combine": Case(ep_flags=("--ep-moe-apply-probs-on-combine",)),
    "ours, 16 SMs, overlap": Case(16, overlap=True),
    "ours, 8 SMs, overlap": Case(8, overlap=True),
    "DeepEP, 24 SMs": Case(ep_flags=None, words=DEEPEP, dispatcher=FLEX),
    "ours, fp8 tensorwise": Case(recipe=fp8("tensorwise")),
    "all-to-all, fp8 tensorwise": alltoall(recipe=fp8("tensorwise")),
    "ours, fp8 blockwise": Case(recipe=fp8("blockwise")),
    "all-to-all, fp8 blockwise": alltoall(recipe=fp8("blockwise")),
}
ROWS, GRADIENTS = ("--ep-moe-dispatch-fwd-dtype", "fp8"), ("--ep-moe-combine-bwd-dtype", "fp8")
WIRES = {
    f"ours, fp8 blockwise {number_format}{name}": Case(ep_flags=words, recipe=fp8("blockwise", number_format))
    for number_format in ("e4m3", "hybrid")
    for name, words in (("", ()), (", fp8 rows", ROWS), (", fp8 rows, gradients", ROWS + GRADIENTS))
}
CASES_BY_NAME = {**CASES, **WIRES}
PAIRS = {  # what must have the same losses and norms, and how far apart they may be
    ("ours, 24 SMs", "all-to-all"): 5e-3,
    ("ours, 24 SMs", "DeepEP, 24 SMs"): 5e-3,
    ("ours, grouped", "all-to-all"): 5e-3,
    ("ours, grouped", "all-to-all, grouped"): 5e-3,
    ("ours, grouped, no wait", "ours, grouped"): 5e-3,
    ("ours, grouped, one graph", "ours, grouped"): 5e-3,
    ("ours, fp8 tensorwise", "all-to-all, fp8 tensorwise"): FP8_APART,
    ("ours, fp8 blockwise", "all-to-all, fp8 blockwise"): FP8_APART,
    **{(name, name.partition(", fp8 rows")[0]): 1e-2 for name in WIRES if ", fp8 rows" in name},
}


def main(names):
    tree = megatron_lm()
    names = [*WIRES] if names == ["wires"] else names or [*CASES]
    unknown = [name for name in names if name not in CASES_BY_NAME]
    if unknown:
        sys.exit(f"no case {unknown[0]!r}; there are {', '.join(CASES_BY_NAME)}")
    out = Path(os.environ.get("OUT", ROOT / "build" / "gpu"))
    out.mkdir(parents=True, exist_ok=True)
    gpus = gpus_taken()
    if not gpus:
        sys.exit("torch finds no GPU")
    deadline = time.monotonic() + float(os.environ.get("BUDGET", 470))
    results, longest, missing = {}, 60.0, []
    for name in names:
        case = CASES_BY_NAME[name]
        if case.overlap and gpus == 1:
            print(f"{name}: left out, overlap needs EP over 1", flush=True)
        elif case.dispatcher == FLEX and find_spec("deep_ep") is None:
            print(f"{name}: left out, there is no module deep_ep", flush=True)
        elif deadline - time.monotonic() < longest:
            print(f"{name}: left out, no time", flush=True)
            missing.append(name)
        else:
            began = time.monotonic()
            row = run(name, case, gpus, tree, out, deadline - began)
            longest = max(longest, time.monotonic() - began)
            if row is None:
                missing.append(name)
            else:
                results[name] = row
                print(line(name, row), flush=True)
            report = {"gpus": gpus, "gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "cases": results}
            (out / "slice.json").write_text(json.dumps(report, indent=1))
    verdict = judge(results)
    print("\n".join(["", HEAD, *(line(name, row) for name, row in results.items()), "", *verdict]))
    sys.exit(1 if missing else 0)


def run(name, case, gpus, tree, out, limit):
    """The figures of one case, or None when it failed; its log says why."""
    recipe = script_recipe.load(
        ROOT / "recipes" / f"{os.environ.get('RECIPE', 'deepseek_v3_slice_4gpu')}.yaml",
        [
            f"topology.ranks_per_node={gpus}",
            f"parallel.expert_model_parallel_size={gpus}",
            f"parallel.overlap_moe_expert_parallel_comm={str(case.overlap).lower()}",
            f"train.train_iters={os.environ.get('STEPS', 14)}",
            f"train.global_batch_size={8 * gpus}",
            f"model.num_moe_experts={max(8 * gpus, 16)}",
            f"dispatcher.num_sms={case.num_sms}",
            "dispatcher.router=megatron",
            *os.environ.get("SET", "").split(),
            *case.recipe,
        ],
    )
    slug = "slice_" + name.replace(", ", "_").replace(" ", "_")
    options = {"words": case.words, "ep_flags": case.ep_flags, "dispatcher": case.dispatcher}
    options |= {"fuses_gradients": case.fuses_gradients, "PROFILED": str(recipe.train.train_iters - 1)}
    options |= dict(variable.split("=", 1) for variable in case.variables)
    try:
        measured = finish(start(recipe, tree, out, slug, **options), limit)
    except RuntimeError as error:
        print(f"{name}: {error}", flush=True)
        return None
    rows = measured["steps"]
    seconds = statistics.median(row["seconds"] for row in rows[WARM_UP:-1])  # the last one is profiled
    tokens = recipe.train.global_batch_size * recipe.dataset.seq_length
    return {
        "step_ms": 1e3 * seconds,
        "tokens_per_second": tokens / seconds,
        "peak_gib": measured["peak_bytes"] / 2**30,
        "gpu_ms": 1e3 * measured["gpu"]["seconds"],
        "between_ms": 1e3 * measured["gpu"]["between_ranks"],
        "launches": measured["gpu"]["launches"],
        "kernels": measured["gpu"]["kernels"],
        "losses": [row["loss"] for row in rows],
        "norms": [row["norm"] for row in rows],
    }


HEAD = (
    f"{'':44} {'step ms':>8} {'GPU ms':>8} {'between':>8} {'kernels':>8} {'tokens/s':>9} {'peak GiB':>9} "
    f"{'first, last loss':>18}"
)


def line(name, row):
    losses = f"{row['losses'][0]:.4f} {row['losses'][-1]:.4f}"
    times = f"{row['step_ms']:8.1f} {row['gpu_ms']:8.1f} {row['between_ms']:8.1f} {row['launches']:8}"
    return f"{name:44} {times} {row['tokens_per_second']:9,.0f} {row['peak_gib']:9.1f} {losses:>18}"


def judge(results):
    """What must hold between this dispatcher and others, and whether it does."""
    verdicts = []
    for (one, other), allowed in PAIRS.items():
        if one in results and other in results:
            apart = max(
                abs(a - b) / b
                for key in ("losses", "norms")
                for a, b in zip(results[one][key][:COMPARED], results[other][key], strict=False)
            )
            same = f"same losses and norms in {COMPARED} steps, apart by at most {apart:.2%} ({allowed:.1%})"
            verdicts.append(f"{'holds' if apart < allowed else 'FAILS'}: {one} and {other}: {same}")
    for name in WIRES:
        plain = name.partition(", fp8 rows")[0]
        if name != plain and name in results and plain in results:
            ours, theirs = results[name], results[plain]
            first = ours["losses"][0], theirs["losses"][0]
            verdicts.append(
                f"{'holds' if first[0] == first[1] else 'FAILS'}: {name}: the first loss of {plain}, {first}"
            )
            share, allowed = ours["step_ms"] / theirs["step_ms"], WIRE_STEP
            verdicts.append(
                f"{'holds' if share <= allowed else 'FAILS'}: {name}: a step takes {share:.3f} of that of {plain} "
                f"(at most {allowed})"
            )
    for load in ("", ", even load"):
        ours, theirs = results.get(f"ours, 24 SMs{load}"), results.get(f"all-to-all{load}")
        if ours is not None and theirs is not None:
            speed = theirs["step_ms"] / ours["step_ms"]
            verdicts.append(f"{'holds' if speed > 1 else 'FAILS'}{load}: a faster step, {speed:.3f} times as fast")
    return verdicts or ["no comparison: one of the two is missing"]


if __name__ == "__main__":
    main(sys.argv[1:])

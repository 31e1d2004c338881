"""What runs beside dispatch and combine on a GPU: traces of torch's profiler, pictures of them, and in figures how much
of the time of dispatch and combine has products beside it.

    PYTHONPATH=$PWD [MEGATRON_LM=tree-of-0.19] python tests/gpu/timeline.py [shared] [1f1b]

shared: a MoE layer of DeepSeek-V3's width with and without shared-expert overlap, a process a GPU. 1f1b: the last step
of `train_slice.py` with and without 1F1B overlap, on two GPUs or more, with Transformer Engine. Without a word: both,
or what can run here. OUT: folder for timeline.json, the traces (chrome://tracing, ui.perfetto.dev) and an .svg of each
(build/gpu). NUM_SMS: of dispatch and combine (24).
"""

import gzip
import html
import json
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

# The first that matches; kernels of cuBLAS and CUTLASS are products.
KINDS = {
    "dispatch": r"\b(notify|own_rows|(fused_)?dispatch|intra_rank_permute)_kernel<",
    "combine": r"\b(intra_rank_reduce|combine)_kernel<",
    "product": r"gemm|nvjet|cutlass|xmma|cublas|flash|fmha|attention",
}
GAP = 0.3  # units of a picture between kernels that are drawn as one
COLOURS = {"dispatch": "#d1495b", "combine": "#edae49", "product": "#00798c", "other": "#b0b0b0"}


def read(trace):
    """The kernels of a trace: (start, end, stream, kind) in microseconds, in the order of their starts."""
    events = json.loads(gzip.decompress(Path(trace).read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel" and event.get("ph") == "X"]
    return sorted((e["ts"], e["ts"] + e["dur"], e["args"].get("stream", e["tid"]), kind_of(e["name"])) for e in kernels)


def kind_of(name):
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def union(spans):
    """Spans that do not touch each other and cover the same time."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def length(spans):
    return sum(end - start for start, end in spans)


def common(some, others):
    """How long both of two unions last."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total


def summary(kernels):
    """Microseconds: of all, of each kind, and of dispatch and combine while a product runs."""
    spans = {kind: union((s, e) for s, e, _, k in kernels if k == kind) for kind in (*KINDS, "other")}
    figures = {"all": length(union((s, e) for s, e, *_ in kernels))}
    figures |= {kind: length(parts) for kind, parts in spans.items()}
    for kind in ("dispatch", "combine"):
        figures[f"{kind} beside products"] = common(spans[kind], spans["product"])
    return figures


def line(name, figures):
    moved = figures["dispatch"] + figures["combine"]
    beside = figures["dispatch beside products"] + figures["combine beside products"]
    share = beside / moved if moved else 0.0
    return (
        f"{name:24} {figures['all']:9,.0f} us on the GPU; products {figures['product']:9,.0f}, dispatch "
        f"{figures['dispatch']:8,.0f}, combine {figures['combine']:8,.0f}; beside products {beside:8,.0f} = {share:.0%}"
    )


def joined(kernels, gap):
    """Kernels of a kind that follow each other in a stream within `gap`, as one: a picture shows no more."""
    runs, last = [], {}
    for start, end, stream, kind in kernels:
        run = last.get(stream)
        if run is not None and run[3] == kind and start - run[1] <= gap:
            run[1] = max(run[1], end)
        else:
            last[stream] = run = [start, end, stream, kind]
            runs.append(run)
    return runs


def draw(kernels, path, title, window=None, width=1200, left=80):
    """An SVG with a row for each stream and an axis of milliseconds.

    window: (begin, end) in us since the first kernel; None: the middle 40 ms.
    """
    first, last = kernels[0][0], max(end for _, end, *_ in kernels)
    if window is None:
        begin = max(first, (first + last - 40_000.0) / 2)
        window = (begin - first, min(last, begin + 40_000.0) - first)
    start, end = first + window[0], first + window[1]
    shown = [kernel for kernel in kernels if kernel[1] > start and kernel[0] < end]
    rows = {stream: number for number, stream in enumerate(sorted({kernel[2] for kernel in shown}))}
    scale = (width - left - 24) / (end - start)
    parts = [f'<text x="0" y="14">{html.escape(title)}</text>']
    for number, (kind, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{500 + 110 * number}" y="4" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{516 + 110 * number}" y="14">{kind}</text>')
    foot = 34 + 30 * len(rows)
    tick = next(ms for ms in (0.01, 0.1, 1, 2, 5, 10, 50, 1000) if ms * 1e3 * 10 >= end - start)
    for number in range(int((end - start) / (tick * 1e3)) + 1):
        x = left + scale * number * tick * 1e3
        parts.append(f'<path d="M{x:.1f} 24V{foot}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{x:.1f}" y="{foot + 14}" text-anchor="middle">{number * tick:g} ms</text>')
    for stream, row in rows.items():
        parts.append(f'<text x="0" y="{44 + 30 * row}">stream {stream}</text>')
    for begin, stop, stream, kind in joined(shown, GAP / scale):
        x, size = left + scale * (max(begin, start) - start), scale * (min(stop, end) - max(begin, start))
        where = f'x="{x:.1f}" y="{28 + 30 * rows[stream]}" width="{max(size, 0.2):.1f}" height="22"'
        parts.append(f'<rect {where} fill="{COLOURS[kind]}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {foot + 20}" font-family="sans-serif" '
    Path(path).write_text(head + 'font-size="12">\n' + "\n".join(parts) + "\n</svg>\n")


def trace_layer(overlap, num_sms, trace):
    """A rank: a layer's forward and backward passes, three of them traced; seconds of one that is not."""
    import torch
    import torch.distributed as dist
    from gpu_layers import fresh, join, make_config, step
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    from megatron_ep.megatron import shared_buffers
    from megatron_ep.megatron.layer import ep_layer_spec

    join()
    shared_buffers.configure(num_sms=num_sms)
    config = make_config(
        hidden_size=7168,
        moe_ffn_hidden_size=2048,
        num_moe_experts=8 * dist.get_world_size(),
        moe_router_topk=8,
        moe_shared_expert_intermediate_size=2048,
        moe_shared_expert_overlap=overlap,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer = ep_layer_spec(spec)(config=config).cuda()
    x, grad = torch.randn(2, 4096, 1, 7168, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()

    def rounds(count):
        torch.cuda.synchronize()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            fresh(layer, x)
            step(layer, x, grad)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    rounds(3)
    seconds = rounds(5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rounds(3)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(trace)
    shared_buffers.close_buffers()
    shared_buffers.configure()
    return seconds


def layers(out, gpus, num_sms):
    """(name, trace, seconds of a forward and backward pass of the slowest rank)."""
    from megatron_ep.tools.local_ranks import LocalRanks

    with LocalRanks(gpus, 240.0) as ranks:
        for overlap in (False, True):
            name = f"shared experts {'beside' if overlap else 'before'}"
            trace = out / f"timeline_shared_{'on' if overlap else 'off'}.json.gz"
            yield name, trace, max(ranks.run(trace_layer, overlap, num_sms, str(trace)))


def slices(out, gpus, num_sms):
    """The same of steps of pretrain_gpt.py."""
    import megatron_trees
    import train_slice

    for overlap in (True, False):
        name, case = f"1F1B overlap {'on' if overlap else 'off'}", train_slice.Case(num_sms, overlap)
        trace = out / f"timeline_1f1b_{'on' if overlap else 'off'}.json.gz"
        row = train_slice.run(name, case, gpus, megatron_trees.INSTALLED, out, 240.0, TRACE=str(trace))
        if row is None:
            sys.exit(f"{name}: failed")
        yield name, trace, row["step_ms"] / 1e3


def main(wanted):
    import megatron_trees
    import torch

    out = Path(os.environ.get("OUT", ROOT / "build" / "gpu"))
    out.mkdir(parents=True, exist_ok=True)
    gpus = max((count for count in (1, 2, 4) if count <= torch.cuda.device_count()), default=0)
    num_sms = int(os.environ.get("NUM_SMS", "24"))
    unknown = [word for word in wanted if word not in ("shared", "1f1b")]
    can = megatron_trees.INSTALLED and gpus > 1
    lack = "" if can else "needs a tree of Megatron-LM, Transformer Engine and two GPUs"
    if not gpus:
        sys.exit("torch finds no GPU")
    if unknown or (lack and "1f1b" in wanted):
        sys.exit(f"no {unknown[0]!r}; there are shared and 1f1b" if unknown else f"1f1b {lack}")
    runs = [layers(out, gpus, num_sms)] if "shared" in wanted or not wanted else []
    if lack:
        print(f"1F1B overlap: left out, {lack}", flush=True)
    elif "1f1b" in wanted or not wanted:
        runs.append(slices(out, gpus, num_sms))
    report = {"gpus": gpus, "gpu": torch.cuda.get_device_name(0), "num_sms": num_sms, "cases": {}}
    for name, trace, seconds in (case for cases in runs for case in cases):
        kernels = read(trace)
        figures = {"seconds": seconds, **summary(kernels)}
        if not figures["dispatch"] or not figures["combine"] or not figures["product"]:
            sys.exit(f"{name}: {trace} lacks a kind of kernel: {figures}")
        report["cases"][name] = figures
        draw(kernels, str(trace).replace(".json.gz", ".svg"), name)
        print(line(name, figures) + f"; a step takes {1e3 * seconds:.2f} ms", flush=True)
        (out / "timeline.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

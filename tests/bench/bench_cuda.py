"""`tests/bench/run.py cuda`: dispatch and combine of all ranks of a LocalCluster on one GPU, by CUDA events.

Beside them, in the same run: a device-to-device copy of the bytes that dispatch writes, torch moving the same rows with
`index_select` and `index_add_`, and Megatron-Core's unfused permute and unpermute where it is installed. T tokens of a
rank, H hidden, K choices of a token, E experts, R rows received.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

import megatron_ep as ep
from megatron_ep import megatron as megatron_side
from megatron_ep.normal.api import SCALE_BLOCK
from megatron_ep.tools.arguments import require_topk, shape
from megatron_ep.tools.bench.gpu_case import Case, add_arguments, cases_of, require_gpu
from megatron_ep.tools.bench.report import EXTREMES, RATE, WHAT, Columns, Record, Report, make_record
from megatron_ep.tools.bench.timing import cuda_timer, time_rounds


class Tokens:
    """What all ranks dispatch, and where torch says that it goes."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        shape = (case.world_size, case.tokens)
        self.x = torch.randn(*shape, case.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(*shape, case.experts, generator=generator, device="cuda")
        self.weights, self.ids = scores.topk(case.topk, dim=2)
        by_expert = self.ids.flatten().sort(stable=True)
        self.token_of_row = by_expert.indices // case.topk  # of all ranks, grouped by expert
        rank_of_row = by_expert.values // (case.experts // case.world_size)
        self.rows = torch.bincount(rank_of_row, minlength=case.world_size).tolist()

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [part.contiguous() for part in tensor]


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see --help."""
    arguments = _parse(argv)
    require_gpu("run.py cuda")
    report = Report(arguments.json)
    if not megatron_side.is_installed():
        report.say("\nmegatron.core is not installed: its permute and unpermute are left out")
    failed = False
    on_gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    for case in (case for n, g in arguments.topology for case in cases_of(arguments, n, g, arguments.tokens)):
        sms = case.num_sms * case.world_size
        if sms > on_gpu:
            report.say(f"\n{case} is left out: its ranks need {sms} SMs at once, and there are {on_gpu}")
            continue
        title = f"{case}: {sms} SMs in all; every row counted once, where it is written"
        try:
            records = measure(case, arguments.warmup, arguments.iters)
            report.add(title, records, WHAT | EXTREMES | RATE | _of_copy(records))
        except (ep.EPError, ValueError) as error:  # a result too: the others are still worth having
            failed = True
            report.say(f"\n{case}: {type(error).__name__}: {error}")
            report.keep([{"case": str(case), "error": str(error), **asdict(case)}])
    return 1 if failed else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("run.py cuda", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--topology", nargs="+", type=shape, default=[(1, 8), (2, 4), (1, 4)], metavar="NxG", help="(1x8 2x4 1x4)"
    )
    add_arguments(parser, num_sms=[4, 8, 12, 16, 24], ring_slots=[2], network_slots=2, iters=10)
    arguments = parser.parse_args(argv)
    require_topk(parser, arguments)
    for nodes, ranks_per_node in arguments.topology:
        if arguments.experts % (nodes * ranks_per_node):
            parser.error(f"--experts {arguments.experts} is not a multiple of {nodes}x{ranks_per_node} ranks")
    return arguments


def _of_copy(records: Sequence[Record]) -> Columns:
    copy = next(record for record in records if record["implementation"] == "copy")["gigabytes_per_second"]
    return {"of copy": lambda record: f"{record['gigabytes_per_second'] / copy:.0%}"}


def measure(case: Case, warmup: int, iterations: int) -> list[Record]:
    """The records of one case. Raises AssertionError when dispatch does not give what torch gives."""
    tokens = Tokens(case)
    with ep.LocalCluster(case.nodes, case.ranks_per_node, case.config, device="cuda") as cluster, torch.no_grad():
        return _measure(case, tokens, cluster, warmup, iterations)


def _measure(case: Case, tokens: Tokens, cluster: ep.LocalCluster, warmup: int, iterations: int) -> list[Record]:
    x, ids, weights = tokens.split(tokens.x), tokens.split(tokens.ids), tokens.split(tokens.weights)
    received = ep.dispatch(x, ids, weights, buffer=cluster)
    handle = received.handle
    flat = tokens.x.flatten(0, 1)
    for rows, index in zip(received.x, tokens.token_of_row.split(tokens.rows), strict=True):
        assert torch.equal(rows, flat.index_select(0, index)), f"{case}: dispatch differs from torch's index_select"
    rows = received.x
    row_bytes = 2 * case.hidden
    moved = sum(tokens.rows) * row_bytes
    x8 = [part.to(torch.float8_e4m3fn) for part in x]
    blocks = -(-case.hidden // SCALE_BLOCK)
    scales = [torch.ones(case.tokens, blocks, device="cuda") for _ in x]
    most = max(tokens.rows)
    target = torch.empty(sum(tokens.rows), case.hidden, device="cuda", dtype=torch.bfloat16)
    source = torch.cat(rows)
    sums = torch.zeros(flat.shape, device="cuda", dtype=torch.float32)

    def torch_combine() -> None:
        sums.zero_()
        sums.index_add_(0, tokens.token_of_row, source.float())

    steps: dict[tuple[str, str], tuple[Callable[[], Any], int]] = {
        ("dispatch bf16", "ours"): (lambda: ep.dispatch(x, topk_weights=weights, handle=handle), moved),
        ("dispatch bf16", "ours_with_counts"): (
            lambda: ep.dispatch(x, ids, weights, buffer=cluster, max_recv_tokens=most),
            moved,
        ),
        ("dispatch bf16", "copy"): (lambda: target.copy_(source), moved),
        ("dispatch bf16", "torch_index_select"): (
            lambda: torch.index_select(flat, 0, tokens.token_of_row, out=target),
            moved,
        ),
        ("dispatch fp8", "ours"): (
            lambda: ep.dispatch(x8, topk_weights=weights, scales=scales, handle=handle),
            sum(tokens.rows) * (case.hidden + 4 * blocks),
        ),
        ("combine bf16", "ours"): (lambda: ep.combine(rows, handle), moved),
        ("combine bf16", "torch_index_add"): (torch_combine, moved),
    }
    if megatron_side.is_installed():
        from megatron.core.transformer.moe.moe_utils import permute, unpermute

        routing_map = torch.zeros(len(flat), case.experts, dtype=torch.bool, device="cuda")
        routing_map.scatter_(1, tokens.ids.flatten(0, 1), True)
        probs = torch.zeros(len(flat), case.experts, device="cuda")
        probs.scatter_(1, tokens.ids.flatten(0, 1), tokens.weights.flatten(0, 1))  # they travel too, as in training

        def megatron_permute() -> tuple[torch.Tensor, torch.Tensor]:
            permuted, _, token_of_row, *_ = permute(flat, routing_map, probs=probs, num_out_tokens=len(source))
            return permuted, token_of_row

        permuted, token_of_row = megatron_permute()
        assert torch.equal(permuted, source), f"{case}: Megatron's permute groups the rows in another way"
        del permuted
        steps["dispatch bf16", "megatron_permute"] = (megatron_permute, moved)
        steps["combine bf16", "megatron_unpermute"] = (lambda: unpermute(source, token_of_row, flat.shape), moved)
    if max(tokens.rows) * case.world_size * row_bytes > torch.cuda.mem_get_info()[0] / 2:
        del steps["dispatch bf16", "ours_with_counts"]
    records = []
    for (phase, implementation), (step, size) in steps.items():  # one by one: nobody meets another's cache
        [seconds] = time_rounds({0: cuda_timer(step)}, warmup, iterations, torch.cuda.synchronize).values()
        cluster.synchronize()
        records.append(make_record(case, phase, implementation, seconds, size, **asdict(case)))
    return records

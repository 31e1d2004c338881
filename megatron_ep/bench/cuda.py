"""`megatron-ep bench cuda`: dispatch and combine of all ranks of a LocalCluster on one GPU, by CUDA events.

Beside them, in the same run: a device-to-device copy of the bytes that dispatch writes, torch moving the same rows with
`index_select` and `index_add_`, and Megatron-Core's unfused permute and unpermute where it is installed. T tokens of a
rank, H hidden, K picks of a token, E experts, R rows received.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch

import megatron_ep as ep
from megatron_ep import env
from megatron_ep.backends.cuda import check_device
from megatron_ep.bench.common import positive, write_json
from megatron_ep.functional import SCALE_BLOCK

WARMUP, ITERATIONS = 3, 10


@dataclass(frozen=True)
class Case:
    nodes: int
    ranks_per_node: int
    num_sms: int  # of each rank
    channels: int | None
    ring_slots: int  # rows of bf16 that an NVLink ring holds
    network_slots: int  # and a network ring
    tokens: int
    hidden: int
    topk: int
    experts: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def config(self) -> ep.Config:
        slot_bytes = 2 * self.hidden + 1024  # generous for what travels beside a row
        return ep.Config(
            num_experts=self.experts,
            channels=self.channels,
            num_sms=self.num_sms,
            timeout=10,
            nvl_ring_bytes=self.ring_slots * slot_bytes,
            rdma_ring_bytes=self.network_slots * slot_bytes,
        )

    def __str__(self) -> str:
        sizes = f"T={self.tokens} H={self.hidden} K={self.topk} E={self.experts}"
        channels = f" channels={self.channels}" if self.channels else ""
        slots = f"{self.ring_slots}+{self.network_slots}" if self.nodes > 1 else f"{self.ring_slots}"
        return f"{self.nodes}x{self.ranks_per_node} sms={self.num_sms}{channels} slots={slots} {sizes}"


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
    arguments = _parse(argv)
    try:
        check_device("cuda")
    except ValueError as error:
        raise SystemExit(f"megatron-ep bench cuda: {error}") from None
    print(env.render(), flush=True)
    if _megatron() is None:
        print("\nmegatron.core is not installed: its permute and unpermute are left out", flush=True)
    records = []
    for case in _cases(arguments):
        try:
            measured = measure(case)
            print(_table(case, measured), flush=True)
        except (ep.EPError, ValueError) as error:  # a result too: the others are still worth having
            print(f"\n{case}: {type(error).__name__}: {error}", flush=True)
            measured = [{"case": str(case), "error": str(error), **asdict(case)}]
        records += measured
        write_json(arguments.json, records)
    return 1 if any("error" in record for record in records) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("megatron-ep bench cuda", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--topology", nargs="+", type=_shape, default=[(1, 8), (2, 4), (1, 4)], metavar="NxG", help="(1x8 2x4 1x4)"
    )
    add_arguments(parser, num_sms=[4, 8, 12, 16, 24], ring_slots=[2], network_slots=[2])
    return parser.parse_args(argv)


def _shape(text: str) -> tuple[int, int]:
    nodes, x, ranks_per_node = text.partition("x")
    if not x:
        raise argparse.ArgumentTypeError(f"{text!r} is not nodes x ranks of a node, such as 2x4")
    return positive(nodes), positive(ranks_per_node)


def add_arguments(
    parser: argparse.ArgumentParser, num_sms: list[int], ring_slots: list[int], network_slots: list[int]
) -> None:
    """What the benchmarks of GPUs have in common, with these defaults."""
    parser.add_argument("--num-sms", nargs="+", type=positive, default=num_sms, help="of a rank (%(default)s)")
    parser.add_argument("--channels", nargs="+", type=positive, default=[None], help="(those that fit the SMs)")
    parser.add_argument(
        "--ring-slots", nargs="+", type=positive, default=ring_slots, help="rows of a ring (%(default)s)"
    )
    parser.add_argument(
        "--network-slots", nargs="+", type=positive, default=network_slots, help="of one between nodes (%(default)s)"
    )
    parser.add_argument("--tokens", type=positive, default=4096, metavar="T", help="tokens of a rank (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=7168, metavar="H", help="(%(default)s)")
    parser.add_argument("--topk", type=positive, default=8, metavar="K", help="experts of a token (%(default)s)")
    parser.add_argument("--experts", type=positive, default=256, metavar="E", help="in all (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there")


def cases_of(arguments: argparse.Namespace, nodes: int, ranks_per_node: int) -> list[Case]:
    sizes = (arguments.tokens, arguments.hidden, arguments.topk, arguments.experts)
    return [
        Case(nodes, ranks_per_node, num_sms, channels, slots, network_slots, *sizes)
        for num_sms in arguments.num_sms
        for channels in arguments.channels
        for slots in arguments.ring_slots
        for network_slots in (arguments.network_slots if nodes > 1 else arguments.network_slots[:1])
    ]


def _cases(arguments: argparse.Namespace) -> list[Case]:
    """Those whose ranks fit on the GPU together."""
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    cases = [case for shape in arguments.topology for case in cases_of(arguments, *shape)]
    return [case for case in cases if case.num_sms * case.world_size <= sms]


def _megatron() -> ModuleType | None:
    try:
        return importlib.import_module("megatron_ep.megatron.permute")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        return None


def measure(case: Case) -> list[dict[str, Any]]:
    """The records of one case. Raises AssertionError when dispatch does not give what torch gives."""
    tokens = Tokens(case)
    with ep.LocalCluster(case.nodes, case.ranks_per_node, case.config, device="cuda") as cluster, torch.no_grad():
        return _measure(case, tokens, cluster)


def _measure(case: Case, tokens: Tokens, cluster: ep.LocalCluster) -> list[dict[str, Any]]:
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
    megatron = _megatron()
    if megatron is not None:
        permutation = megatron.Permutation(tokens.ids.flatten(0, 1), tokens.weights.flatten(0, 1), case.experts)
        permuted, token_of_row = permutation.permute(flat)
        assert torch.equal(permuted, source), f"{case}: Megatron's permute groups the rows in another way"
        del permuted
        steps["dispatch bf16", "megatron_permute"] = (lambda: permutation.permute(flat), moved)
        steps["combine bf16", "megatron_unpermute"] = (lambda: permutation.unpermute(source, token_of_row), moved)
    if max(tokens.rows) * case.world_size * row_bytes > torch.cuda.mem_get_info()[0] / 2:
        del steps["dispatch bf16", "ours_with_counts"]
    records = []
    for (phase, implementation), (step, size) in steps.items():
        seconds = timed(step)
        cluster.synchronize()
        records.append(
            {
                "case": f"{case} {phase}",
                "implementation": implementation,
                "phase": phase,
                **seconds,
                "bytes": size,
                "gigabytes_per_second": size / seconds["seconds"] / 1e9,
                **asdict(case),
            }
        )
    return records


def timed(step: Callable[[], Any], meet: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Seconds on the GPU of an iteration, for a record: the median, the least and the most. `meet` is called once
    everything is warm."""
    for _ in range(WARMUP):
        step()
    torch.cuda.synchronize()
    meet()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(ITERATIONS)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
    return {"seconds": median(seconds), "seconds_min": min(seconds), "seconds_max": max(seconds)}


def milliseconds(record: dict[str, Any]) -> str:
    """Of what `timed` gives, as three columns of a table."""
    return " ".join(f"{record[key] * 1e3:7.3f}ms" for key in ("seconds_min", "seconds", "seconds_max"))


def _table(case: Case, records: list[dict[str, Any]]) -> str:
    copy = next(r for r in records if r["implementation"] == "copy")["gigabytes_per_second"]
    sms = case.num_sms * case.world_size
    lines = [f"\n{case}: {sms} SMs in all; every row counted once, where it is written"]
    lines.append(
        f"  {'phase':14} {'implementation':20} {'min':>9} {'median':>9} {'max':>9} {'GB/s':>8}  {'of copy':>7}"
    )
    for r in records:
        rate = r["gigabytes_per_second"]
        lines.append(f"  {r['phase']:14} {r['implementation']:20} {milliseconds(r)} {rate:8.1f}  {rate / copy:7.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))

"""`megatron-ep bench gpus`: dispatch and combine between the GPUs of this machine, a process a GPU, by CUDA events.

Beside them, in the same run: NCCL's all-to-all with the copies that Megatron-Core's all-to-all dispatcher makes around
it (rows into the order of their ranks, then into that of their experts, and back), and a copy to a neighbouring GPU.
T tokens of a rank, H hidden, K picks of a token, E experts. A rank's bytes: its tokens, once for each rank that they go
to, which is what an expert-parallel dispatch must move at least; all-to-all moves a row for each expert.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import env
from megatron_ep.backends.cuda import check_device
from megatron_ep.bench.common import positive, write_json
from megatron_ep.bench.cuda import Case, add_arguments, cases_of, milliseconds, timed
from megatron_ep.bench.local_ranks import LocalRanks


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    try:
        check_device("cuda")
    except ValueError as error:
        raise SystemExit(f"megatron-ep bench gpus: {error}") from None
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise SystemExit(f"megatron-ep bench gpus: this machine has {gpus} GPU, must have at least 2")
    nodes = arguments.nodes
    if gpus % nodes:
        raise SystemExit(f"megatron-ep bench gpus: --nodes is {nodes}, must divide the {gpus} GPUs")
    if arguments.experts % gpus:
        raise SystemExit(f"megatron-ep bench gpus: --experts is {arguments.experts}, must be a multiple of {gpus} GPUs")
    print(env.render(), flush=True)
    cases = cases_of(arguments, nodes, gpus // nodes)
    ranks = LocalRanks(gpus, timeout=60.0 + 10.0 * len(cases))
    try:
        everyone = ranks.run(measure, cases)
    finally:
        ranks.close()
    records = [slowest(list(same)) for same in zip(*everyone, strict=True)]
    for case in cases:
        print(_table(case, [r for r in records if r["case"] in (str(case), "all")]), flush=True)
    write_json(arguments.json, records)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("megatron-ep bench gpus", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--nodes", type=positive, default=1, help="nodes that the GPUs are dealt to (1)")
    add_arguments(parser, num_sms=[4, 8, 16, 24], ring_slots=[4], network_slots=[8])
    return parser.parse_args(argv)


class Tokens:
    """What this rank dispatches, and where torch says that it goes: the rows of all-to-all, one for each expert."""

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        generator = torch.Generator("cuda").manual_seed(rank)
        self.x = torch.randn(case.tokens, case.hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
        scores = torch.rand(case.tokens, case.experts, generator=generator, device="cuda")
        self.weights, self.ids = scores.topk(case.topk, dim=1)
        by_expert = self.ids.flatten().sort(stable=True)
        self.token_of_row = by_expert.indices // case.topk
        local_experts = case.experts // world_size
        ranks = self.ids // local_experts
        self.distinct_rows = sum(int((ranks == r).any(dim=1).sum()) for r in range(world_size))
        counts = torch.bincount(by_expert.values, minlength=case.experts).view(world_size, local_experts).cpu()
        gathered: list[Any] = [None] * world_size
        dist.all_gather_object(gathered, counts)
        self.sent = counts.sum(dim=1).tolist()
        incoming = torch.stack([counts[rank] for counts in gathered])  # [W, L]
        self.received = incoming.sum(dim=1).tolist()
        expert_of_row = torch.arange(local_experts).repeat(world_size).repeat_interleave(incoming.flatten())
        self.grouped = expert_of_row.sort(stable=True).indices.cuda()
        self.ungrouped = self.grouped.argsort()


def measure(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The records of this rank. Raises AssertionError when dispatch does not give what all-to-all gives."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    nccl = dist.new_group(backend="nccl")
    tokens = Tokens(cases[0], rank, world_size)
    size = tokens.distinct_rows * 2 * cases[0].hidden
    sums = torch.zeros(tokens.x.shape, device="cuda", dtype=torch.float32)

    def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = torch.empty(sum(received), rows.shape[1], device="cuda", dtype=rows.dtype)
        dist.all_to_all_single(out, rows, received, sent, group=nccl)
        return out

    def nccl_dispatch() -> torch.Tensor:
        rows = exchange(tokens.x.index_select(0, tokens.token_of_row), tokens.sent, tokens.received)
        return rows.index_select(0, tokens.grouped)

    def nccl_combine() -> torch.Tensor:
        rows = exchange(expected.index_select(0, tokens.ungrouped), tokens.received, tokens.sent)
        return sums.zero_().index_add_(0, tokens.token_of_row, rows.float()).to(rows.dtype)

    with torch.no_grad():
        expected = nccl_dispatch()
        neighbour = torch.empty(tokens.distinct_rows, cases[0].hidden, device=f"cuda:{(rank + 1) % world_size}")
        neighbour = neighbour.to(torch.bfloat16)
        source = torch.randn(neighbour.shape, device="cuda").to(torch.bfloat16)
        records = [
            _record("all", "dispatch", "nccl_all_to_all", nccl_dispatch, size),
            _record("all", "combine", "nccl_all_to_all", nccl_combine, size),
            _record("all", "copy", "to_a_neighbour", lambda: neighbour.copy_(source), size),
        ]
        for case in cases:
            topology = ep.Topology(case.nodes, case.ranks_per_node)
            with ep.Buffer(None, case.config, topology, device="cuda") as buffer:
                steps = _steps(tokens, buffer, expected)
                records += [
                    _record(str(case), phase, name, step, size) | asdict(case) for (phase, name), step in steps.items()
                ]
                buffer.synchronize()
    return records


def _steps(tokens: Tokens, buffer: ep.Buffer, expected: torch.Tensor) -> dict[tuple[str, str], Callable[[], Any]]:
    received = ep.dispatch(tokens.x, tokens.ids, tokens.weights, buffer=buffer)
    assert torch.equal(received.x, expected), "dispatch differs from all-to-all"
    handle, most = received.handle, len(received.x)

    def with_counts() -> Any:
        return ep.dispatch(tokens.x, tokens.ids, tokens.weights, buffer=buffer, max_recv_tokens=most)

    return {
        ("dispatch", "ours"): lambda: ep.dispatch(tokens.x, topk_weights=tokens.weights, handle=handle),
        ("dispatch", "ours_with_counts"): with_counts,
        ("combine", "ours"): lambda: ep.combine(expected, handle),
    }


def _record(case: str, phase: str, implementation: str, step: Callable[[], Any], size: int) -> dict[str, Any]:
    seconds = timed(step, meet=dist.barrier)
    return {"case": case, "phase": phase, "implementation": implementation, **seconds, "bytes": size}


def slowest(same: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the records that the ranks made of one thing."""
    record = max(same, key=lambda record: record["seconds"])
    return record | {"gigabytes_per_second": record["bytes"] / record["seconds"] / 1e9}


def _table(case: Case, records: list[dict[str, Any]]) -> str:
    lines = [f"\n{case}, a GPU each: the slowest rank, its tokens counted once for each rank that they go to"]
    lines.append(f"  {'phase':9} {'implementation':16} {'min':>9} {'median':>9} {'max':>9} {'GB/s':>8}")
    for record in sorted(records, key=lambda record: record["phase"]):
        rate = record["gigabytes_per_second"]
        lines.append(f"  {record['phase']:9} {record['implementation']:16} {milliseconds(record)} {rate:8.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))

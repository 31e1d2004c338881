"""Runs examples/adapters/flashinfer_ep.py over stand-ins of FlashInfer's classes, as its layer does: checks the rows,
their experts and weights, and the sums. One process per rank."""

import enum
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from collectivex_ranks import EXPERTS, HIDDEN, TOKENS, TOPK, problem_of

Algorithm = enum.Enum("EpAlgorithm", "LOW_LATENCY HIGH_THROUGHPUT")
Layout = enum.Enum("EpLayout", "EXPERT_MAJOR RANK_MAJOR")


@dataclass
class Weights:
    weights: torch.Tensor


@dataclass
class DispatchOutput:
    expert_tensors: torch.Tensor
    num_tokens: int
    recv_topk_idx: Any = None
    recv_topk_weights: Any = None
    expert_counts: Any = None


REGISTERED = {}
STAND_IN = SimpleNamespace(
    Fleet=object,
    Handle=object,
    EpAlgorithm=Algorithm,
    EpLayout=Layout,
    HandleAlgoKnobTopKWeights=Weights,
    DispatchOutput=DispatchOutput,
    CombineOutput=lambda x: SimpleNamespace(x=x),
    register_fleet=lambda name: lambda fleet: REGISTERED.setdefault(name, fleet),
)


def fleet_of(adapter, algorithm, layout=Layout.EXPERT_MAJOR):
    params = SimpleNamespace(
        num_experts=EXPERTS,
        max_tokens_per_rank=TOKENS,
        token_hidden_size=HIDDEN,
        dtype_bytes=2,
        algorithm=algorithm,
        layout=layout,
    )
    bootstrap = SimpleNamespace(world_size=dist.get_world_size(), process_group=None)
    return adapter.MegatronFleet(bootstrap, params)


def check(adapter, algorithm):
    rank, local = dist.get_rank(), EXPERTS // dist.get_world_size()
    fleet, mine = fleet_of(adapter, algorithm), problem_of(rank)
    handle = fleet.create_handle(SimpleNamespace(topk_ids=mine.topk_idx.flip(0)), [Weights(mine.topk_weights)])
    handle.update(SimpleNamespace(topk_ids=mine.topk_idx))
    for out in (None, torch.empty_like(mine.dispatch_x)):
        found = handle.dispatch(SimpleNamespace(x=[mine.dispatch_x]))
        rows = found.expert_tensors
        if algorithm is Algorithm.LOW_LATENCY:
            assert rows.shape == (local, fleet.most_rows, HIDDEN) and found.num_tokens == fleet.most_rows
            ids = torch.cat([problem_of(source).topk_idx for source in range(dist.get_world_size())])
            assert (
                found.expert_counts.tolist()
                == ids.flatten().bincount(minlength=EXPERTS)[rank * local :][:local].tolist()
            )
            factor = torch.arange(local).view(-1, 1, 1) + rank * local + 1
        else:
            assert rows.shape == (dist.get_world_size(), TOKENS, HIDDEN)
            assert found.recv_topk_idx.shape == found.recv_topk_weights.shape == (fleet.most_rows, TOPK)
            is_local = found.recv_topk_idx >= 0
            factor = (found.recv_topk_idx + rank * local + 1) * found.recv_topk_weights.where(is_local, 0)
            factor = factor.sum(1).view(*rows.shape[:2], 1)
        summed = handle.combine(SimpleNamespace(x=[(rows * factor).bfloat16()], out=out)).x
        assert out is None or summed is out
        expected = mine.dispatch_x.float() * (mine.topk_weights * (mine.topk_idx + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(summed.float(), expected, rtol=0.02, atol=0.05)
    handle.complete()
    fleet.destroy()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    package = sys.modules["flashinfer"] = ModuleType("flashinfer")
    package.moe_ep = STAND_IN
    file = Path(__file__).parents[2] / "examples/adapters/flashinfer_ep.py"
    spec = importlib.util.spec_from_file_location("flashinfer_ep", file)
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    for algorithm in Algorithm:
        check(adapter, algorithm)
    try:
        fleet_of(adapter, Algorithm.LOW_LATENCY, Layout.RANK_MAJOR)
    except ValueError as error:
        assert "must be expert_major" in str(error)
    else:
        raise AssertionError("a layout that it has not is refused")
    print("all rows and sums are right", flush=True)
    dist.destroy_process_group()

"""`python adapter_ranks.py ADAPTER`: a rank that runs one of examples/adapters over stand-ins of its harness's classes,
and checks what the harness's oracle checks: which rows arrive, their experts and weights, and the sums."""

import enum
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

TOPK, EXPERTS, HIDDEN, TOKENS = 3, 8, 256, 12


def problem_of(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    x[:, 0] = torch.arange(TOKENS) + TOKENS * rank  # which token it is; exact in bfloat16
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    return SimpleNamespace(dispatch_x=x, topk_idx=ids, topk_weights=weights, T=TOKENS)


class EPBackend:
    def __init__(self, args, rank, world_size, local_rank, device):
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
        self.mode, self.precision = args.mode, args.precision

    def finalize(self, rc):
        return rc


def check_backend(backend_class, mode, precision):
    rank, world = dist.get_rank(), dist.get_world_size()
    args = SimpleNamespace(mode=mode, precision=precision, experts=EXPERTS, topk=TOPK, hidden=HIDDEN)
    backend = backend_class(args, rank, world, rank, torch.device("cpu"))
    backend.create_buffer(SimpleNamespace(max_tokens_per_rank=TOKENS))
    problems = [problem_of(source) for source in range(world)]
    mine = problems[rank]
    ids, weights = (torch.cat([getattr(p, name) for p in problems]) for name in ("topk_idx", "topk_weights"))
    sent = torch.cat([backend.semantic_payload(p.dispatch_x) for p in problems])
    is_local = ids // (EXPERTS // world) == rank

    handle = backend.dispatch(mine)
    view = backend.inspect_dispatch(mine, handle)
    assert backend.recv_tokens(handle) == len(view.payload)
    assert (
        view.local_expert_counts.tolist()
        == ids[is_local].bincount(minlength=EXPERTS)[backend.first_expert :][: EXPERTS // world].tolist()
    )
    if mode == "normal":  # rows are ordered by source rank and token
        tokens = is_local.any(dim=1).nonzero().flatten()
        assert view.expert_ids.sort().values.equal(ids.where(is_local, -1)[tokens].sort().values)
        assert view.weights.sort().values.equal((weights * is_local)[tokens].sort().values)
        factor = (view.weights * (view.expert_ids + 1)).sum(dim=1, keepdim=True)
    else:
        pairs = [(e, t) for e in range(EXPERTS) for t in (ids == e).any(dim=1).nonzero().flatten().tolist()]
        here = [(e, t) for e, t in pairs if e // (EXPERTS // world) == rank]
        tokens = torch.tensor([t for _, t in here])
        assert view.expert_ids.tolist() == [e for e, _ in here]
        factor = view.expert_ids[:, None] + 1  # combine multiplies by the weights
    assert view.payload.equal(sent[tokens])

    y = backend.combine_transformed(mine, handle, view.payload * factor)
    expected = sent[rank * TOKENS :][:TOKENS].float() * (mine.topk_weights * (mine.topk_idx + 1)).sum(1, keepdim=True)
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.05)
    backend.stage(mine, handle)
    assert backend.combine(mine, handle).shape == mine.dispatch_x.shape
    assert backend.finalize(0) == 0


Algorithm = enum.Enum("EpAlgorithm", "LOW_LATENCY HIGH_THROUGHPUT")
Layout = enum.Enum("EpLayout", "EXPERT_MAJOR RANK_MAJOR")


class Weights(SimpleNamespace):
    """Known by its class."""


STAND_IN = SimpleNamespace(
    Fleet=object,
    Handle=object,
    EpAlgorithm=Algorithm,
    EpLayout=Layout,
    HandleAlgoKnobTopKWeights=Weights,
    DispatchOutput=lambda rows, **more: SimpleNamespace(expert_tensors=rows, **more),
    CombineOutput=lambda x: SimpleNamespace(x=x),
    register_fleet=lambda name: lambda fleet: fleet,
)


def fleet_of(fleet_class, algorithm, layout=Layout.EXPERT_MAJOR):
    params = SimpleNamespace(
        num_experts=EXPERTS,
        max_tokens_per_rank=TOKENS,
        token_hidden_size=HIDDEN,
        dtype_bytes=2,
        algorithm=algorithm,
        layout=layout,
    )
    bootstrap = SimpleNamespace(world_size=dist.get_world_size(), process_group=None)
    return fleet_class(bootstrap, params)


def check_fleet(fleet_class, algorithm):
    rank, local = dist.get_rank(), EXPERTS // dist.get_world_size()
    fleet, mine = fleet_of(fleet_class, algorithm), problem_of(rank)
    handle = fleet.create_handle(SimpleNamespace(topk_ids=mine.topk_idx.flip(0)), [Weights(weights=mine.topk_weights)])
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


def adapter_of(harness, stand_in):
    """What the adapter of a harness defines, where this module stands for the harness's."""
    sys.modules[stand_in.__name__] = stand_in
    return runpy.run_path(str(Path(__file__).parents[2] / "examples" / "adapters" / f"{harness}.py"))


def check_collectivex():
    module = ModuleType("ep_backend")
    module.EPBackend = EPBackend
    backend = adapter_of("collectivex", module)["MegatronEPBackend"]
    for mode in backend.SUPPORTED_MODES:
        for precision in backend.SUPPORTED_PRECISIONS:
            check_backend(backend, mode, precision)


def check_flashinfer():
    module = ModuleType("flashinfer")
    module.moe_ep = STAND_IN
    fleet = adapter_of("flashinfer_ep", module)["MegatronFleet"]
    for algorithm in Algorithm:
        check_fleet(fleet, algorithm)
    try:
        fleet_of(fleet, Algorithm.LOW_LATENCY, Layout.RANK_MAJOR)
    except ValueError as error:
        assert "must be expert_major" in str(error)
    else:
        raise AssertionError("a layout that it has not is refused")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"collectivex": check_collectivex, "flashinfer_ep": check_flashinfer}[sys.argv[1]]()
    print("all rows and sums are right", flush=True)
    dist.destroy_process_group()

"""Runs examples/adapters/collectivex.py over a stand-in of CollectiveX's base class, and checks what its oracle checks:
which rows arrive, their experts and weights, and the sums. One process per rank."""

import importlib.util
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

TOPK, EXPERTS, HIDDEN, TOKENS = 3, 8, 256, 12


class EPBackend:
    def __init__(self, args, rank, world_size, local_rank, device):
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
        self.mode, self.precision = args.mode, args.precision

    def finalize(self, rc):
        return rc


def problem_of(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    x[:, 0] = torch.arange(TOKENS) + TOKENS * rank  # which token it is; exact in bfloat16
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    return types.SimpleNamespace(dispatch_x=x, topk_idx=ids, topk_weights=weights, T=TOKENS)


def check(backend_class, mode, precision):
    rank, world = dist.get_rank(), dist.get_world_size()
    args = types.SimpleNamespace(mode=mode, precision=precision, experts=EXPERTS, topk=TOPK, hidden=HIDDEN)
    backend = backend_class(args, rank, world, rank, torch.device("cpu"))
    backend.create_buffer(types.SimpleNamespace(max_tokens_per_rank=TOKENS))
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


if __name__ == "__main__":
    dist.init_process_group("gloo")
    sys.modules["ep_backend"] = types.ModuleType("ep_backend")
    sys.modules["ep_backend"].EPBackend = EPBackend
    file = Path(__file__).parents[2] / "examples/adapters/collectivex.py"
    spec = importlib.util.spec_from_file_location("collectivex", file)
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    for mode in adapter.MegatronEPBackend.SUPPORTED_MODES:
        for precision in adapter.MegatronEPBackend.SUPPORTED_PRECISIONS:
            check(adapter.MegatronEPBackend, mode, precision)
    print("all rows and sums are right", flush=True)
    dist.destroy_process_group()

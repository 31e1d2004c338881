"""Dispatches that are launched before the host knows their counts, of processes that share a GPU or have one each."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import reference
from megatron_ep.normal import plan

W = 2
FEW, MANY = 300, 1500  # rows for rank 0


def inputs(rows_for_rank_0, seed, hidden=1032):
    """Rank 1 gets as many rows each time."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.rand(t, 4, generator=generator).topk(2, dim=1).indices for t in (MANY, 400)]
    ids[0][rows_for_rank_0:] = -1
    ids[1] += 4
    x = [torch.randint(-8, 9, (len(i), hidden), generator=generator).bfloat16() for i in ids]
    x[0][rows_for_rank_0:] = 0
    return x, ids, [torch.rand(i.shape, generator=generator) for i in ids]


def run_steps(nodes, local_pass, layout):
    config = ep.Config(num_experts=8, timeout=20.0, num_sms=4, tuning=ep.Tuning(local_pass=local_pass))
    device = f"cuda:{torch.distributed.get_rank() % torch.cuda.device_count()}"
    with ep.Buffer(None, config, ep.Topology(nodes, W // nodes), device=device) as buffer:
        torch.cuda.set_device(device)
        rank, backend, guesses = buffer.rank, buffer._group.live_backend(), []
        launch = backend.launch

        def noted(launcher, call, phase, *values, part=None):
            told = launch(launcher, call, phase, *values, part=part)
            if phase == plan.SPECULATIVE:
                guesses.append(told[1])
            return told

        backend.launch = noted
        for step, rows_for_rank_0 in enumerate([FEW, FEW, MANY, MANY, FEW, FEW + 10]):
            x, ids, weights = inputs(rows_for_rank_0, step)
            leaf = x[rank].to(device).requires_grad_()
            rows = ep.dispatch(leaf, ids[rank].to(device), weights[rank].to(device), buffer=buffer, layout=layout)
            if layout == "flat":
                expected, flat_ids, probs, counts = reference.flat_dispatch(x, ids, weights, 8)
                assert torch.equal(rows.topk_idx.cpu(), flat_ids[rank])
            else:
                expected, probs, counts = reference.dispatch(x, ids, weights, 8)
            assert torch.equal(rows.x.cpu(), expected[rank]) and torch.equal(rows.probs.cpu(), probs[rank])
            assert torch.equal(rows.tokens_per_expert.cpu(), counts[rank])
            y = ep.combine(rows.x, rows.handle)
            copies = 1 if layout == "flat" else 2
            assert torch.equal(y, copies * leaf)
            y.sum().backward()
            is_sent = (ids[rank] >= 0).any(dim=1, keepdim=True).to(device)
            assert torch.equal(leaf.grad, copies * is_sent.to(leaf.dtype).expand_as(leaf))
            again = ep.dispatch(leaf.detach(), handle=rows.handle)
            assert torch.equal(again.x, rows.x)
        buffer.synchronize()
        return guesses


@pytest.mark.parametrize("layout", ["grouped", "flat"])
@pytest.mark.parametrize(("nodes", "local_pass"), [(1, False), (1, True), (2, True)])
def test_a_rank_whose_guess_is_wrong_dispatches_later_than_others(ranks, nodes, local_pass, layout):
    guesses = ranks.run(run_steps, nodes, local_pass, layout)
    assert guesses == [[True, False, True, False, True], [True] * 5]

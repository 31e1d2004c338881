"""Under recompute_modules=["moe"] the replay of a layer takes the layout of its forward pass, and combines nothing."""

from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from configured import configured
from counted_experts import make_layer

import megatron_ep as ep
from megatron_ep.megatron import shared_buffers
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.router import fused_router
from megatron_ep.normal import launches, row_counts

pytestmark = pytest.mark.numerical

W = 4
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CAPACITY = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True}


class Calls:
    """What the layers send: how often counts are asked for, rows dispatched and combined."""

    def __enter__(self):
        places = [(row_counts, "exchange"), (launches, "launch_dispatch"), (launches, "launch_combine")]
        self._patches = [mock.patch.object(place, name, wraps=getattr(place, name)) for place, name in places]
        self._mocks = [patch.start() for patch in self._patches]
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()

    @property
    def counts(self):
        return [one.call_count for one in self._mocks]


def _inputs(config, passes):
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = 12 if config.moe_pad_expert_input_to_capacity else 11 + dist.get_rank()
    return torch.randn(2, passes, tokens, 1, config.hidden_size, generator=generator).to(config.params_dtype)


def _backward(layer, x, grad, between=lambda: None):
    """All forward passes come first. Outputs and gradients, and the calls of both."""
    leaves = [part.clone().requires_grad_() for part in x]
    layer.zero_grad()
    with Calls() as calls:
        outputs = [layer(leaf)[0] for leaf in leaves]
        between()
        for output, part in zip(outputs, grad, strict=True):
            output.backward(part)
    return [*outputs, *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in layer.parameters())], calls.counts


def _same_bits(settings, options, router):
    join_layout(1, W)
    with configured(**options):
        plain = make_layer(make_config(**settings), router=router)
        replayed = make_layer(make_config(**settings, **RECOMPUTE), router=router)
        replayed.load_state_dict(plain.state_dict())
        x, grad = _inputs(plain.config, 2)
        expected, (counts, dispatches, combines) = _backward(plain, x, grad)
        actual, calls = _backward(replayed, x, grad)
        assert calls == [counts, dispatches + 2, combines], "of two passes: no counts and no combine more"
        for ours, theirs in zip(actual, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert not replayed.token_dispatcher._replays._layouts
        ep.raise_if_failed()


@pytest.mark.parametrize(
    ("settings", "options", "router"),
    [
        ({}, {}, None),
        ({}, {}, fused_router),
        ({}, {"moe_apply_probs_on_combine": True}, None),
        ({}, {"moe_expert_rank_capacity_factor": 4.0}, fused_router),
        ({"params_dtype": torch.float32, "hidden_size": 128}, {"moe_dispatch_fwd_dtype": "fp8"}, None),
        (SHARED, {}, None),
        (CAPACITY, {}, None),
    ],
)
def test_a_replay_asks_for_no_counts_and_combines_nothing(four_ranks, settings, options, router):
    four_ranks.run(_same_bits, settings, options, router)


def _asks_anew():
    join_layout(1, W)
    layer = make_layer(make_config(**RECOMPUTE))
    x, grad = _inputs(layer.config, 2)
    expected, [counts, *_] = _backward(layer, x, grad)
    assert counts == 2
    closed, [counts, *_] = _backward(layer, x, grad, shared_buffers.close_buffers)
    assert counts == 4, "the layouts were those of a buffer that is closed"
    for ours, theirs in zip(closed, expected, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():  # of which there is no replay
        layer(x[0])
    with Calls() as calls:  # of the same input twice
        leaf = x[0].clone().requires_grad_()
        (layer(leaf)[0] * grad[0] + layer(leaf)[0] * grad[1]).sum().backward()
    assert calls.counts[0] == 4
    layer.token_dispatcher.trusts_router = False  # ranks may then split tokens or not
    _, [counts, *_] = _backward(layer, x, grad)
    assert counts == 4


def test_where_the_forward_pass_is_not_known_the_replay_asks(four_ranks):
    four_ranks.run(_asks_anew)


def _chooses_otherwise():
    join_layout(1, W)
    layer = make_layer(make_config(**RECOMPUTE))
    x, grad = _inputs(layer.config, 1)

    def another_router():
        layer.router.weight.data.neg_()

    gradients, _ = _backward(layer, x, grad, another_router)
    assert gradients[1].isnan().any(), "gradients of other experts than the output's are no number"


def test_a_replay_that_chooses_other_experts_is_no_number(four_ranks):
    four_ranks.run(_chooses_otherwise)

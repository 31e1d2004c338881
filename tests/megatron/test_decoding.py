"""Megatron's inference: decoding steps go in one hop.

A test is a function that runs on all four ranks.
"""

import contextlib
from unittest import mock

import pytest
from nightly import at_night
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from generation import MODEL, counted, generate, make_engine, make_model
from megatron.core.inference import utils
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from shared_settings import configured

import megatron_ep as ep
from megatron_ep.buffer.host import HostBackend
from megatron_ep.megatron import shared_buffers
from megatron_ep.megatron.equivalence import join_layout, make_config, make_dispatcher
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router
from megatron_ep.tools.local_ranks import LocalRanks

pytestmark = pytest.mark.numerical

W, MOST = 4, "moe_low_latency_max_tokens"


@pytest.mark.parametrize("pads", [True, at_night(False)])
@run_on("four_ranks")
def test_generates_the_same_tokens_as_megatrons_all_to_all(pads):
    join_layout(1, W)
    options = {**MODEL, "params_dtype": torch.float32, "moe_router_dtype": "fp32"}
    config, rank = make_config(**options), dist.get_rank()
    prompts = [" ".join(str((7 * i + 3 * rank + j) % 64) for j in range(9)) for i in range(3)]
    theirs = make_model(config, ours=False)
    expected = generate(make_engine(theirs, len(prompts), pads), prompts, 6)
    assert all(len(tokens) == 6 for tokens in expected)
    steps = 5  # the first token is the prefill's
    for most, low_latency, more in (
        (None, 0, {}),
        (2, 0, {}),  # a step has three tokens
        (3, steps if pads else 0, {"flash_decode": True}),
    ):
        with configured(**{MOST: most}), counted() as calls:
            ours = make_model(make_config(**options, **more), ours=True, weights=theirs.state_dict())
            assert generate(make_engine(ours, len(prompts), pads), prompts, 6) == expected
        modes = (calls.rings // config.num_layers, calls.one_hop // config.num_layers)
        assert modes == (1 + steps - low_latency, low_latency)


# ---- one layer


def make_layer(config, router=None, weights=None):
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer = ep_layer_spec(spec, router=router)(config=config).to(config.params_dtype).eval()
    if weights is not None:
        layer.load_state_dict(weights)
    utils.moe_layer_cache = None  # Megatron looks for the layers of one model only
    return layer


def decode(layer, x):
    """The output of a step with Megatron's padding for decoding, and the dispatches that it took: through rings and in
    one hop."""
    output, calls = step(layer, x)
    ep.raise_if_failed()
    return output, calls


def step(layer, x):
    factor = layer.config.num_moe_experts / layer.config.moe_router_topk
    with torch.inference_mode(), counted() as calls:
        utils.set_decode_expert_padding(layer, True, capacity_factor=factor)
        output, _ = layer(x)
        utils.set_decode_expert_padding(layer, False)
    return output, (calls.rings, calls.one_hop)


@contextlib.contextmanager
def used_memory():
    """Rows that nothing writes to hold NaN."""
    new_output = HostBackend.new_output

    def used(*arguments):
        rows = new_output(*arguments)
        rows.view(torch.uint8).fill_(0xFF)
        return rows

    with mock.patch.object(HostBackend, "new_output", used):
        yield


def tokens(config, count, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(count, 1, config.hidden_size, generator=generator).to(config.params_dtype)


def _compare_modes(tp, dtype, router, settings, topology):
    ranks = dist.get_world_size()
    join_layout(tp, ranks // tp)
    config = make_config(params_dtype=dtype, moe_router_dtype="fp32", moe_router_topk=3, num_moe_experts=3 * ranks)
    x = tokens(config, 8)
    with configured(topology=topology, **settings):
        layer = make_layer(config, router)
        expected, calls = decode(layer, x)
        assert calls == (1, 0)
    with configured(topology=topology, **settings, **{MOST: 8}):
        layer = make_layer(config, router, layer.state_dict())
        for _ in range(2):
            with used_memory():
                actual, calls = decode(layer, x)
            assert calls == (0, 1)
    assert actual.abs().sum() > 0
    if topology is None:  # one node
        assert torch.equal(actual, expected)
    else:  # rings round the sum of each node
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("tp", "dtype", "router", "settings", "topology"),
    [
        (1, torch.bfloat16, None, {}, None),
        (1, torch.float64, fused_router, {}, None),
        (1, torch.float32, None, {}, None),
        (2, torch.float32, None, {}, None),
        (1, torch.bfloat16, None, {"moe_apply_probs_on_combine": True}, None),
        (1, torch.bfloat16, fused_router, {"moe_dispatch_fwd_dtype": "fp8"}, None),
        (1, torch.bfloat16, None, {}, ep.Topology(2, 2)),
    ],
)
def test_gives_the_bits_of_the_rings(four_ranks, tp, dtype, router, settings, topology):
    four_ranks.run(_compare_modes, tp, dtype, router, settings, topology)


@pytest.mark.nightly
def test_gives_the_bits_of_the_rings_on_three_ranks():
    with LocalRanks(3, 60.0) as ranks:
        ranks.run(_compare_modes, 1, torch.float32, None, {}, None)


@run_on("four_ranks")
def test_the_host_waits_for_nothing_in_a_captured_step():
    """As while a CUDA graph captures it, which no wait of the host may interrupt."""
    join_layout(1, W)
    config = make_config()
    with configured(**{MOST: 6}):
        layer, x = make_layer(config), tokens(config, 6)
        expected, _ = decode(layer, x)
        waits = mock.patch.object(HostBackend, "finish_launches", side_effect=AssertionError)
        with waits, mock.patch.object(HostBackend, "is_capturing", return_value=True):
            output, calls = step(layer, x)
        assert calls == (0, 1) and torch.equal(output, expected)
        with waits, pytest.raises(AssertionError):
            ep.raise_if_failed()


@run_on("four_ranks")
def test_chooses_the_mode_by_what_all_ranks_share():
    join_layout(1, W)
    config = make_config()
    with configured(**{MOST: 6}):
        layer = make_layer(config)
        full, calls = decode(layer, tokens(config, 6))
        assert calls == (0, 1)
        assert decode(layer, tokens(config, 7))[1] == (1, 0), "longer than the largest step"
        with counted() as calls, torch.no_grad():
            expected, _ = layer(tokens(config, 6))
        assert (calls.rings, calls.one_hop) == (1, 0), "no padding for decoding"
        assert torch.allclose(full, expected, rtol=1e-12, atol=1e-12)
        # what has no gradient in inference may have one later
        leaf = tokens(config, 6).requires_grad_()
        with counted() as calls:
            layer.train()(leaf)[0].sum().backward()
        assert (calls.rings, calls.one_hop) == (1, 0) and leaf.grad.abs().sum() > 0
        layer.token_dispatcher.trusts_router = False  # to choose no more experts than moe_router_topk
        assert decode(layer.eval(), tokens(config, 6))[1] == (1, 0)


@pytest.mark.parametrize("fp8", [None, "e4m3"])
@run_on("four_ranks")
def test_a_rank_without_tokens_takes_part(fp8):
    """Its experts are wanted. Megatron's router itself cannot do without tokens. fp8: experts read padding, too."""
    join_layout(1, W)
    config = make_config()
    config.fp8 = fp8
    with configured(**{MOST: 6}), used_memory():
        dispatcher = make_dispatcher("ours", config)
        dispatcher.drop_and_pad, dispatcher.trusts_router = True, True
        dispatcher.moe_expert_capacity_factor = config.num_moe_experts / config.moe_router_topk
        x = tokens(config, 0 if dist.get_rank() == 2 else 6).squeeze(1)
        routing_map = torch.zeros(len(x), 8, dtype=torch.bool)
        routing_map[:, 4:6] = True  # those of rank 2
        with torch.no_grad():
            sent, weights = dispatcher.dispatch_preprocess(x, routing_map, routing_map.double())
            rows, counts, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(sent, weights))
            assert rows.shape == (48, 32) and counts.tolist() == [24, 24]
            assert rows[probs == 0].isnan().all() or (fp8 and not rows[probs == 0].any())
            output = dispatcher.combine_postprocess(dispatcher.token_combine(rows * probs.unsqueeze(1)))
        assert torch.equal(output, 2 * x)
        ep.raise_if_failed()


@run_on("four_ranks")
def test_ranks_that_disagree_get_an_error():
    """Which Megatron's own all-to-all would never end."""
    join_layout(1, W)
    config = make_config()
    with configured(timeout=0.5, **{MOST: 6}):
        layer = make_layer(config)
        x = tokens(config, 6)
        decode(layer, x)
        dist.barrier()
        with pytest.raises(ep.EPError, match=r"one_hop_receiver|notify"), torch.inference_mode():
            if dist.get_rank() == 0:
                layer(x)
            else:
                decode(layer, x)
        dist.barrier()


def _too_many_rows():
    """A rank has more tokens than the others made room for."""
    join_layout(1, W)
    config = make_config(num_moe_experts=4)
    with configured(**{MOST: 8}):
        layer = make_layer(config)
        x = torch.ones(8 if dist.get_rank() == 3 else 1, 1, config.hidden_size, dtype=config.params_dtype)
        try:
            decode(layer, x)
        except ep.EPError as error:
            return type(error).__name__
        finally:
            dist.barrier()


def test_more_rows_than_fit_are_told(four_ranks):
    told = four_ranks.run(_too_many_rows)
    assert "EPOverflowError" in told, told


@pytest.mark.parametrize("value", [0, 1025, 2.0])
def test_the_option_is_checked(value):
    with pytest.raises(ValueError, match=f"{MOST} is {value}, must be"):
        shared_buffers.configure(**{MOST: value})

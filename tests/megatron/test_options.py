"""The dispatcher's options: a fixed number of rows, probabilities applied in combine, rows that travel as fp8. Layers
with them are in test_dispatcher.py, too.

A test is a function that runs on all four ranks.
"""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import pytest
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from counted_experts import CountedExperts, make_layer
from dispatcher_steps import run_dispatcher
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from shared_settings import configured
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_ep as ep
from megatron_ep.diagnosis import failures
from megatron_ep.megatron import options, shared_buffers
from megatron_ep.megatron.dispatcher import counts_on_device
from megatron_ep.megatron.equivalence import join_layout, make_config, make_dispatcher
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router
from megatron_ep.normal import row_limit

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("no_other_buffers")]

W = 4
FACTOR = "moe_expert_rank_capacity_factor"
PAD = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}


def run_layer(layer, x, grad):
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    output, _ = layer(leaf)
    output.backward(grad)
    return [output.detach(), leaf.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def inputs(config, tokens=24):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(2, tokens, 1, config.hidden_size, generator=generator, dtype=config.params_dtype)


# ---- a fixed number of rows


RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


@pytest.mark.parametrize(
    ("tp", "ep_size", "router", "settings", "topology"),
    [
        (1, 4, None, {}, None),
        (2, 2, None, {}, None),
        (1, 4, fused_router, {}, None),
        (1, 4, None, RECOMPUTE, None),
        (1, 4, None, {}, ep.Topology(2, 2)),
    ],
)
@run_on("four_ranks")
def test_same_layer_with_rows_enough(tp, ep_size, router, settings, topology):
    join_layout(tp, ep_size)
    config = make_config(num_moe_experts=8, moe_router_topk=3, **settings)
    plain = make_layer(config, router=router)
    x, grad = inputs(config)
    expected = run_layer(plain, x, grad)
    with configured(topology=topology, **{FACTOR: 3.5}):
        fixed = make_layer(config, router=router)
        fixed.load_state_dict(plain.state_dict())
        assert fixed.token_dispatcher.check_over_budget() is None
        actual = run_layer(fixed, x, grad)
        assert fixed.token_dispatcher._max_rows() == int(24 * 3 * tp * 3.5)
        assert not fixed.token_dispatcher.check_over_budget()
        ep.raise_if_failed()
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_megatrons", [False, True])
@run_on("four_ranks")
def test_too_few_rows_are_told(is_megatrons):
    """All tokens want the experts of rank 0, and one of each rank's those of rank 3."""
    join_layout(1, W)
    config = make_config()
    if is_megatrons:
        setattr(config, FACTOR, 1.0)
    with configured(**({} if is_megatrons else {FACTOR: 1.0})):
        dispatcher = make_dispatcher("ours", config)
        x = torch.randn(10, 32, dtype=torch.float64)
        routing_map = torch.zeros(10, 8, dtype=torch.bool)
        routing_map[:, :2] = True
        routing_map[0] = torch.arange(8) > 5
        sent, weights = dispatcher.dispatch_preprocess(x, routing_map, routing_map.double())
        rows, counts, probs = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(sent, weights))
        assert rows.shape == (20, 32) and probs.shape == (20,) and counts.sum() <= 20
        over = dist.get_rank() == 0
        assert bool(dispatcher.check_over_budget()) is over
        required = dispatcher.check_required_capacity()
        assert required.tolist() == [2 * 36 if over else counts.sum()] if is_megatrons else required is None
        assert bool(probs.isnan().all()) is (over and not is_megatrons)
        assert not rows.isnan().any() and not rows[counts.sum() :].any(), "whether or not they need a gradient"
        output = dispatcher.combine_postprocess(dispatcher.token_combine(rows * probs.unsqueeze(1)))
        # what has lost a row is no number
        lost = (output.detach() != 2 * x).any(dim=1)
        assert lost[1:].any() or dist.get_rank() < 2
        assert is_megatrons or output[lost].isnan().all() or dist.get_rank() > 1
        dist.barrier()  # or a rank is told in its combine
        if over:
            with pytest.raises(ep.EPOverflowError, match="room for, and tokens lost experts; raise it"):
                ep.raise_if_failed()
            assert not dispatcher.check_over_budget(), "told once"
        dist.barrier()
        if not over:
            with pytest.raises(ep.EPAbortError, match="moe_expert_rank_capacity_factor makes room for"):
                ep.raise_if_failed()


def received_by_one(cluster, most):
    """Of three rows so many, as a rank by itself has them."""
    ids = [torch.tensor([[0], [1], [1]])]
    received = ep.dispatch([torch.ones(3, 4)], ids, [torch.ones(3, 1)], buffer=cluster, max_recv_tokens=most)
    parts = {name: getattr(received, name)[0] for name in ("x", "probs", "tokens_per_expert", "overflow")}
    return dataclasses.replace(received, **parts)


def test_an_overflow_that_nobody_asked_for_is_logged_at_the_end(caplog):
    limit = row_limit.RowLimit("the rows were too few")
    with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:
        received = received_by_one(cluster, 2)
        assert limit.admit(received).isnan().all()
        assert row_limit.counts_within(received.tokens_per_expert, 2).tolist() == [1, 1]
        with pytest.raises(ep.EPOverflowError, match="the rows were too few") as caught, row_limit.explained():
            raise ValueError("NaN in the loss")
        assert str(caught.value.__cause__) == "NaN in the loss"
        rows = torch.full((3, 4), torch.nan)
        row_limit.clear_behind(rows, torch.tensor([1, 1]))
        assert rows[:2].isnan().all() and not rows[2].any()
        failures.report_unseen()
        assert "overflowed and no call has raised it: the rows were too few" in caplog.text
        with pytest.raises(ep.EPOverflowError, match="the rows were too few: nothing of this step is to be kept"):
            ep.raise_if_failed()
        ep.raise_if_failed()
        with pytest.raises(ValueError, match="anything"), row_limit.explained():
            raise ValueError("anything else")


def test_all_layers_are_asked_at_once(monkeypatch):
    """However many layers there are, the host waits once for all launches and once for the flags."""
    waits = []
    limits = [row_limit.RowLimit(f"layer {number} has too few rows") for number in range(6)]
    with ep.LocalCluster(1, 1, ep.Config(num_experts=2)) as cluster:
        monkeypatch.setattr(cluster._group, "synchronize", lambda: waits.append("launches"))
        for most, limit in enumerate(limits):
            limit.admit(received_by_one(cluster, most + 1))

        class Reads(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function in (torch.ops.aten.cat.default, torch.ops.aten._local_scalar_dense.default):
                    waits.append("flags")
                return function(*args, **(kwargs or {}))

        with Reads(), pytest.raises(ep.EPOverflowError) as caught:
            ep.raise_if_failed()
        assert waits == ["launches", "flags"]
        assert [f"layer {number} " in str(caught.value) for number in range(6)] == [True] * 2 + [False] * 4
        ep.raise_if_failed()  # told once, of all layers


@run_on("four_ranks")
def test_megatrons_trainer_repeats_a_step_without_a_budget():
    """What Megatron's trainer does with a step that was over budget."""
    join_layout(1, W)
    config = make_config()
    setattr(config, FACTOR, 0.25)
    layer = make_layer(config)
    x, grad = inputs(config)
    run_layer(layer, x, grad)
    dispatcher, manager = layer.token_dispatcher, layer.token_dispatcher._comm_manager
    assert dispatcher.check_over_budget()
    manager.moe_expert_rank_capacity_factor = None
    dispatcher.invalidate_ep_bootstrap()
    required = int(dispatcher.check_required_capacity())
    dispatcher.reset_over_budget()
    assert not dispatcher.check_required_capacity()
    repeated = run_layer(layer, x, grad)
    assert not dispatcher.check_over_budget()
    manager.moe_expert_rank_capacity_factor = 0.25  # with room for what the step before needed
    dispatcher.grow_ep_recv_capacity(required)
    dispatcher.grow_ep_recv_capacity(1)
    torch.testing.assert_close(run_layer(layer, x, grad), repeated, rtol=1e-12, atol=1e-12)
    assert not dispatcher.check_over_budget() and dispatcher._max_rows() == required
    setattr(config, FACTOR, None)
    plain = make_layer(config)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(repeated, run_layer(plain, x, grad), rtol=0, atol=0)
    ep.raise_if_failed()


@run_on("four_ranks")
def test_experts_that_ask_the_host_are_refused():
    spec = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    with configured(**{FACTOR: 4.0}):
        join_layout(1, 2)
        with pytest.raises(ValueError, match=r"moe_expert_rank_capacity_factor is 4.0, but SequentialMLP wants"):
            ep_layer_spec(spec)(config=make_config())
        join_layout(1, W)
        config = make_config(num_moe_experts=4, moe_router_topk=1, moe_router_pre_softmax=True)
        layer = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=4, moe_grouped_gemm=False))(config=config)
        x, grad = inputs(config)
        run_layer(layer, x, grad)  # one expert a rank: all rows are its
        config = make_config(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
        with pytest.raises(ValueError, match=r"is 4\.0 with moe_pad_expert_input_to_capacity"):
            make_dispatcher("ours", config)


@pytest.mark.parametrize(
    ("settings", "is_padded", "on_device"),
    [
        ({}, True, False),
        ({"use_transformer_engine_op_fuser": True}, False, True),  # before 0.20
        ({"moe_use_grouped_tensor": False}, True, False),
        ({"moe_use_grouped_tensor": True}, True, True),
        # they pad on the host
        ({"moe_use_grouped_tensor": True, "use_transformer_engine_op_fuser": True}, False, False),
    ],
)
def test_where_megatrons_experts_read_their_counts(monkeypatch, settings, is_padded, on_device):
    monkeypatch.setattr(moe_utils, "skip_routed_expert_padding", lambda _: is_padded, raising=False)
    assert counts_on_device(SimpleNamespace(**settings)) is on_device


# ---- what the host waits for


class Asked(TorchDispatchMode):
    """Operations whose result the host needs before it can go on."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "item", "is_nonzero"):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("router", "factor", "padding"), [(None, None, {}), (None, 4.0, {}), (fused_router, 4.0, {}), (None, None, PAD)]
)
@run_on("four_ranks")
def test_the_router_tells_the_host_nothing(router, factor, padding):
    join_layout(1, W)
    config = make_config(num_moe_experts=8, moe_router_topk=3, **padding)
    with configured(**({FACTOR: factor} if factor else {})):
        layer = make_layer(config, router=router)
        x, grad = inputs(config)
        with Asked() as asked, mock.patch.object(ep, "dispatch", wraps=ep.dispatch) as dispatch:
            run_layer(layer, x, grad)
        assert asked.names == [], "between the router and combine nothing but notify tells the host anything"
        waits = [call.kwargs["max_recv_tokens"] is None for call in dispatch.call_args_list]
        assert waits == [factor is None and not padding], "nor does notify where the number of rows is fixed"
        layer.token_dispatcher.trusts_router = False
        with Asked() as asked:
            run_layer(layer, x, grad)
        assert asked.names == ["_local_scalar_dense"] * (router is None)


@run_on("four_ranks")
def test_a_router_that_chose_too_many_is_refused():
    join_layout(1, W)
    dispatcher = make_dispatcher("ours", make_config())
    dispatcher.trusts_router = True
    x = torch.randn(5, 32, dtype=torch.float64)
    routing_map = torch.zeros(5, 8, dtype=torch.bool)
    routing_map[:, 0] = True
    routing_map[3, :3] = dist.get_rank() == 2
    says = r"topk_idx is \[8, 8\] at token 3, must hold distinct ids" if dist.get_rank() == 2 else "rank 2"
    with pytest.raises((ValueError, ep.EPAbortError), match=says):
        run_dispatcher(dispatcher, x, routing_map, routing_map.double(), x)
    shared_buffers.close_buffers()


# ---- probabilities in combine


@run_on("four_ranks")
def test_experts_are_given_ones():
    join_layout(1, W)
    seen = []

    class Experts(CountedExperts):
        def forward(self, rows, tokens_per_expert, probs):
            seen.append(probs)
            return super().forward(rows, tokens_per_expert, probs)

    config = make_config()
    with configured(moe_apply_probs_on_combine=True):
        run_layer(make_layer(config, Experts), *inputs(config))
        (probs,) = seen
        assert bool((probs == 1).all()) and not probs.requires_grad
        for name in ("moe_apply_probs_on_input", "overlap_moe_expert_parallel_comm"):
            config = make_config(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
            setattr(config, name, True)
            with pytest.raises(ValueError, match=f"moe_apply_probs_on_combine is True with {name}"):
                make_dispatcher("ours", config)


# ---- rows as fp8


@pytest.mark.parametrize(
    ("dtype", "hidden", "settings"),
    [(torch.bfloat16, 256, {}), (torch.float32, 200, {}), (torch.float32, 200, RECOMPUTE)],
)
@run_on("four_ranks")
def test_float8_rows_change_little(dtype, hidden, settings):
    """e4m3 has 3 bits behind the point: an element is off by at most 1/16, and by about 0.027 in the mean square."""
    join_layout(1, W)
    config = make_config(
        hidden_size=hidden,
        num_attention_heads=1,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **settings,
    )
    plain = make_layer(config)
    x, grad = inputs(config, 64)
    expected = run_layer(plain, x, grad)
    with configured(moe_dispatch_fwd_dtype="fp8"):
        rounded = make_layer(config)
        rounded.load_state_dict(plain.state_dict())
        actual = run_layer(rounded, x, grad)
    torch.testing.assert_close(actual[:2], expected[:2], rtol=0.2, atol=0.2)  # Megatron's own bounds for rows of mxfp8
    off = [float((a - e).double().norm() / e.double().norm()) for a, e in zip(actual, expected, strict=True)]
    assert 1e-3 < off[0] < 0.06 and max(off) < 0.08, off


# ---- where options come from


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({FACTOR: 0}, f"{FACTOR} is 0, must be a number over 0"),
        ({FACTOR: float("nan")}, f"{FACTOR} is nan"),
        ({"moe_apply_probs_on_combine": 1}, "moe_apply_probs_on_combine is 1, must be a bool"),
        ({"moe_dispatch_fwd_dtype": "mxfp8"}, "moe_dispatch_fwd_dtype is 'mxfp8', must be 'fp8' or None"),
        ({"moe_combine_bwd_dtype": "mxfp8"}, "moe_combine_bwd_dtype is 'mxfp8', must be 'fp8' or None"),
    ],
)
def test_options_out_of_range(settings, words):
    with pytest.raises(ValueError) as error:
        options.Options(**settings)
    assert words in str(error.value)


@pytest.mark.parametrize("scope", [{"cuda_graph_impl": "full_iteration"}, {"cuda_graph_scope": ["full_iteration"]}])
@run_on("four_ranks")
def test_a_graph_of_the_full_iteration_needs_fixed_shapes(scope):
    """And one stage: what has never run is refused."""
    join_layout(1, W)
    config = make_config()
    for name, value in scope.items():  # which of the two there is depends on Megatron's version
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match="moe_expert_rank_capacity_factor is None with a CUDA graph of the full"):
        make_dispatcher("ours", config)
    with configured(**{FACTOR: 2.0}):
        make_dispatcher("ours", config)
        config.pipeline_model_parallel_size = 2
        with pytest.raises(ValueError, match="pipeline_model_parallel_size is 2, must be 1 with a CUDA graph"):
            make_dispatcher("ours", config)
    config.pipeline_model_parallel_size = 1
    config.moe_pad_expert_input_to_capacity, config.moe_expert_capacity_factor = True, 1.0
    make_dispatcher("ours", config)


def test_options_of_megatrons_config(monkeypatch):
    class Config:
        moe_expert_rank_capacity_factor = 1.5
        moe_dispatch_fwd_dtype = "bf16"

    def merged(*ours):
        monkeypatch.setattr(shared_buffers, "_options", options.Options(*ours))
        return shared_buffers.options_for(Config())

    assert merged() == options.Options(1.5)
    assert merged(1.5, True, "fp8") == options.Options(1.5, True, "fp8")
    with pytest.raises(ValueError, match=f"{FACTOR} is 2.0 for the dispatcher and 1.5 in Megatron's config"):
        merged(2.0)
    Config.moe_dispatch_fwd_dtype = "mxfp8"
    with pytest.raises(ValueError, match="moe_dispatch_fwd_dtype is 'mxfp8', must be 'fp8'"):
        merged()

"""Our dispatcher against Megatron's own: same rows, same outputs, same gradients, for what Megatron asks of one.

A test is a function that runs on all four ranks.
"""

import contextlib
import functools
from unittest import mock

import pytest
import router_accuracy
from host_backends import AheadBackend, with_backend
from nightly import a_third
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from dispatcher_steps import assert_small, compare_configured, run_dispatcher
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping

import megatron_ep as ep
from megatron_ep.megatron import dispatcher, shared_buffers, step_state
from megatron_ep.megatron.equivalence import join_layout, make_config, make_dispatcher
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import fused_router

pytestmark = pytest.mark.numerical

W = 4


# ---- whole layers, router included, in fp64 unless they say otherwise

ONE_EXPERT = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
MANY_CHOICES = {"num_moe_experts": 64, "moe_router_topk": 17}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
EXPERT_BIAS = {"moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
AUX_LOSS = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.01}
SHARED = {"moe_shared_expert_intermediate_size": 40}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
DROP = {"moe_expert_capacity_factor": 0.7}
PAD = {**DROP, "moe_pad_expert_input_to_capacity": True}
BY_POSITION = {"moe_token_drop_policy": "position"}
RECOMPUTE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
QUANTIZED = {"fp8": "e4m3", "fp8_recipe": "delayed", "moe_router_padding_for_quantization": True}
# Megatron's all-to-all gathers unequal counts over TP ranks, which gloo cannot; its all-gather dispatcher stands in.
TP_BASELINE = {"moe_token_dispatcher_type": "allgather"}
TP = dict(tp=2, ep_size=2)


def fused_router_without_near_ties(*args, **options):
    return router_accuracy.refuse_near_ties(fused_router(*args, **options))


FUSED = dict(router=fused_router, tolerance=1e-6)  # Megatron's scores are fp32
PICKS = dict(router=fused_router_without_near_ties, tolerance=1e-6)
ON_COMBINE = dict(settings={"moe_apply_probs_on_combine": True})
BOTH_ROUTERS = {
    # Of packed sequences every rank has as many tokens as it happens to have, and padding behind them.
    "uneven": dict(tokens=[24, 1, 5, 60]),
    "uneven, padding, auxiliary loss": dict(tokens=[24, 8, 9, 60], padding=7, options=AUX_LOSS),
    "uneven, padding, groups": dict(tokens=[24, 8, 12, 60], padding=7, options={**SIGMOID, **GROUPS}),
    "experts padded for quantization": dict(tokens=50, options=QUANTIZED),
}
LAYERS = {
    "one expert a token": dict(options=ONE_EXPERT),
    "many experts": dict(options={"num_moe_experts": 32, "moe_router_topk": 8}),
    "more choices than fit beside a row": dict(options={"num_moe_experts": 36, "moe_router_topk": 33}),
    "one expert a rank": dict(options={"num_moe_experts": 4, "moe_router_topk": 3}),
    "two expert-parallel groups": dict(ep_size=2),
    "one rank": dict(ep_size=1),
    "odd hidden size": dict(options={"hidden_size": 37, "num_attention_heads": 1}),
    "sigmoid, groups, bias, auxiliary loss": dict(options={**SIGMOID, **GROUPS, **EXPERT_BIAS, **AUX_LOSS}),
    "probs on the input": dict(options={**ONE_EXPERT, "moe_apply_probs_on_input": True}),
    "capacity drops": dict(options=DROP),
    "capacity drops by position": dict(options={"moe_expert_capacity_factor": 0.5, **BY_POSITION}),
    "drop and pad": dict(options=PAD),
    "drop and pad by position": dict(options={**PAD, **BY_POSITION}),
    "drop and pad on two nodes": dict(options=PAD, settings={"topology": ep.Topology(2, 2)}),
    "recompute": dict(options=RECOMPUTE),
    "recompute, drop and pad": dict(ep_size=2, options={**PAD, **RECOMPUTE}),
    "shared expert": dict(options=SHARED),
    "shared expert overlapped": dict(options=OVERLAPPED),
    "shared expert overlapped, gated": dict(options={**OVERLAPPED, "moe_shared_expert_gate": True}),
    "TP 2 in EP 2": dict(**TP, options=TP_BASELINE),
    "TP 2, no EP": dict(tp=2, ep_size=1, options=TP_BASELINE),
    "TP 2 in EP 2, capacity drops": dict(**TP, options={**TP_BASELINE, **DROP}),
    "TP 2 in EP 2, more choices than fit beside a row": dict(**TP, options={**TP_BASELINE, **MANY_CHOICES}),
    "TP 2 in EP 2, drop and pad": dict(**TP, options=PAD),
    "TP 2 in EP 2, shared expert overlapped": dict(**TP, options={**PAD, **OVERLAPPED}),
    **BOTH_ROUTERS,
    **{f"{name}, fused router": {**layer, **FUSED} for name, layer in BOTH_ROUTERS.items()},
    "picks": dict(options={**SIGMOID, "num_moe_experts": 16, "moe_router_topk": 4}, **PICKS),
    "picks, TP 2 in EP 2": dict(**TP, options=TP_BASELINE, **PICKS),
    "picks, more than fit beside a row": dict(**TP, options={**TP_BASELINE, **MANY_CHOICES}, **PICKS),
    "picks, capacity drops are dense": dict(options=DROP, **PICKS),
    "probs on combine": ON_COMBINE,
    "probs on combine, TP 2 in EP 2": dict(**TP, options=TP_BASELINE, **ON_COMBINE),
    "probs on combine, recompute": dict(options=RECOMPUTE, **ON_COMBINE),
    "probs on combine, drop and pad": dict(options=PAD, **ON_COMBINE),
    "probs on combine, bf16": dict(
        options={"params_dtype": torch.bfloat16, "bf16": True}, tolerance=0.03, **ON_COMBINE
    ),
    **{
        f"{dtype}, router in {router_dtype}": dict(
            options={"params_dtype": dtype, "moe_router_dtype": router_dtype, "bf16": dtype is torch.bfloat16},
            tolerance=tolerance,
        )
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.02))
        for router_dtype in (None, "fp32", "fp64")
    },
}
# Two chunks of a layer's tokens; the rest of that is in test_chunks.py.
IN_TWO_CHUNKS = (
    *("many experts", "sigmoid, groups, bias, auxiliary loss", "capacity drops", "recompute", "shared expert"),
    *("uneven", "uneven, padding, auxiliary loss", "uneven, fused router", "probs on combine"),
)
for name in IN_TWO_CHUNKS:
    settings = {**LAYERS[name].get("settings", {}), "moe_chunks": 2}
    LAYERS[f"{name}, in two chunks"] = {**LAYERS[name], "settings": settings}
LAYERS["recompute, on two nodes, in two chunks"] = dict(
    options={**RECOMPUTE, "moe_router_topk": 3}, settings={"moe_chunks": 2, "topology": ep.Topology(2, 2)}
)


def _compare(tp=1, ep_size=4, tokens=24, options=None, router=None, padding=0, settings=None):
    with contextlib.ExitStack() as stack:
        if "fp8" in (options or {}):  # the local spec's products stay fp64 all the same
            version = "megatron.core.transformer.transformer_config.is_te_min_version"
            stack.enter_context(mock.patch(version, lambda *_: True))
        return compare_configured(settings or {}, tp, ep_size, tokens, 1, options or {}, router, padding)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layer_equals_megatrons(four_ranks, layer):
    layer = dict(layer)
    tolerance = layer.pop("tolerance", 1e-12)
    assert_small(four_ranks.run(functools.partial(_compare, **layer)), tolerance)


# ---- the dispatcher alone, on routing maps that no router makes


def _run_both(config, *inputs):
    """The results of Megatron's dispatcher and of ours."""
    return [run_dispatcher(make_dispatcher(name, config), *inputs) for name in ("megatron_alltoall", "ours")]


def _drawn(tokens, topk):
    """Of this rank: x, a routing map that a router could make, probs, and a gradient."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, grad = torch.randn(2, tokens, 32, generator=generator, dtype=torch.float64)
    routing_map = torch.rand(tokens, 8, generator=generator).argsort(dim=1) < topk
    return x, routing_map, torch.rand(tokens, 8, generator=generator, dtype=torch.float64), grad


@pytest.mark.parametrize("first", a_third(range(0, 39, 13)))
@run_on("four_ranks")
def test_any_routing_map(first):
    join_layout(1, W)
    for seed in range(first, first + 13):
        common = torch.Generator().manual_seed(seed)
        num_experts = W * int(torch.randint(1, 12, (), generator=common))
        hidden = int(torch.randint(1, 80, (), generator=common))
        widest = int(torch.randint(0, num_experts + 1, (), generator=common))
        empty_ranks = int(torch.randint(0, W + 1, (), generator=common))
        config = make_config(hidden_size=hidden, num_attention_heads=1, num_moe_experts=num_experts)
        config.moe_expert_capacity_factor = 1.0  # or Megatron takes it that every token has moe_router_topk experts

        own = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        tokens = 0 if dist.get_rank() < empty_ranks else int(torch.randint(0, 40, (), generator=own))
        x, grad = torch.randn(2, tokens, hidden, generator=own, dtype=torch.float64)
        probs = torch.randn(tokens, num_experts, generator=own, dtype=torch.float64)  # nonzero off the map as well
        choices_of_token = torch.randint(0, widest + 1, (tokens, 1), generator=own)
        ranks_of_experts = torch.rand(tokens, num_experts, generator=own).argsort(dim=1)
        routing_map = ranks_of_experts < choices_of_token

        expected, actual = _run_both(config, x, routing_map, probs, grad)
        for name in ("rows", "counts", "row_probs"):
            assert torch.equal(expected[name], actual[name]), (seed, name)
        for name in ("output", "x_grad", "probs_grad"):
            torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-12, msg=f"{seed} {name}")
        shared_buffers.close_buffers()


@pytest.mark.parametrize(("recipe", "alignment"), [("delayed", 16), ("mxfp8", 32)])
@run_on("four_ranks")
def test_padding_for_quantization(recipe, alignment):
    join_layout(1, W)
    config = make_config(num_moe_experts=8, moe_router_topk=3)
    config.moe_router_padding_for_quantization, config.fp8, config.fp8_recipe = True, "e4m3", recipe
    x, routing_map, probs, grad = _drawn(50, 3)
    probs = probs * routing_map
    expected, actual = _run_both(config, x, routing_map, probs, grad)
    for name in ("output", "x_grad"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual["probs_grad"], expected["probs_grad"] * routing_map, rtol=1e-12, atol=1e-12)
    assert torch.all(actual["counts"] % alignment == 0)
    assert actual["counts"].sum() == len(actual["rows"]) == len(actual["row_probs"])
    config.moe_router_padding_for_quantization, config.fp8 = False, None
    plain = run_dispatcher(make_dispatcher("ours", config), x, routing_map, probs, grad)
    for padded, exact in zip(
        actual["row_probs"].split(actual["counts"].tolist()),
        plain["row_probs"].split(plain["counts"].tolist()),
        strict=True,
    ):
        assert torch.equal(padded[: len(exact)], exact)
        assert len(padded) - len(exact) < alignment
        assert not padded[len(exact) :].any()


@pytest.mark.parametrize(("tp", "ep_size"), [(1, 4), (2, 2)])
@run_on("four_ranks")
def test_drop_and_pad_gives_every_expert_its_capacity(tp, ep_size):
    join_layout(tp, ep_size)
    config = make_config(**PAD)
    x, topk_map, scores, grad = _drawn(50, 2)
    probs, routing_map = apply_router_token_dropping(scores * topk_map, topk_map, 2, 0.7, pad_to_capacity=True)
    expected, actual = _run_both(config, x, routing_map, probs, grad)
    capacity = 9 * tp * ep_size  # ceil(50 * 2 / 8 * 0.7) of each rank
    assert expected["counts"].tolist() == actual["counts"].tolist() == [capacity] * len(actual["counts"])
    assert expected["rows"].shape == actual["rows"].shape and expected["row_probs"].shape == actual["row_probs"].shape
    for name in ("output", "x_grad"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-12)
    taken = probs != 0  # the router passes no gradient on for the choices it only pads with
    torch.testing.assert_close(actual["probs_grad"], expected["probs_grad"] * taken, rtol=1e-12, atol=1e-12)


@run_on("four_ranks")
def test_drop_and_pad_without_tokens():
    join_layout(1, W)
    x = torch.empty(0, 32, dtype=torch.float64)
    routing_map = torch.zeros(0, 8, dtype=torch.bool)
    expected, actual = _run_both(make_config(**PAD), x, routing_map, routing_map.double(), x)
    for name in ("output", "x_grad", "probs_grad"):
        assert actual[name].shape == expected[name].shape
    assert not actual["rows"].any() and not actual["row_probs"].any()
    ep.raise_if_failed()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@run_on("four_ranks")
def test_probs_keep_their_dtype(dtype):
    join_layout(1, W)
    config = make_config(params_dtype=torch.float32)
    routing_map = torch.zeros(6, 8, dtype=torch.bool)
    routing_map[:, :2] = True
    probs = torch.rand(6, 8).to(dtype)
    result = run_dispatcher(make_dispatcher("ours", config), torch.randn(6, 32), routing_map, probs, torch.randn(6, 32))
    assert result["row_probs"].dtype == result["probs_grad"].dtype == dtype
    assert result["counts"].dtype == torch.int64


# ---- launches ahead of the counts


@run_on("four_ranks")
def test_a_layer_expects_as_many_rows_as_it_had_last_time():
    join_layout(1, W)
    config = make_config()
    with with_backend(AheadBackend):
        layers = [make_dispatcher("ours", config) for _ in range(2)]
        for _ in range(3):
            for layer, tokens in zip(layers, (40, 600), strict=True):
                routing_map = torch.zeros(tokens, 8, dtype=torch.bool)
                routing_map[:, :2] = True
                x = torch.randn(tokens, 32, dtype=torch.float64)
                result = run_dispatcher(layer, x, routing_map, routing_map / 2, torch.ones_like(x))
                assert result["counts"].sum() == (8 * tokens if dist.get_rank() == 0 else 0)
    [buffer] = shared_buffers._buffers.values()
    assert buffer._group.live_backend().guesses == [True] * 4, "the first two are not guessed"
    shared_buffers.close_buffers()


# ---- Megatron's 1F1B overlap: every step its own graph, inputs freed behind it


def _step(*inputs):
    return [tensor.detach().requires_grad_() for tensor in inputs]


@pytest.mark.parametrize("options", [{}, {"moe_expert_rank_capacity_factor": 4.0}], ids=["exact", "fixed rows"])
@run_on("four_ranks")
def test_step_by_step_as_1f1b_overlap_runs_it(options):
    join_layout(1, W)
    shared_buffers.configure(**options)
    config = make_config()
    config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", "hybridep"
    config.overlap_moe_expert_parallel_comm = True
    x, routing_map, probs, grad = _drawn(30, 2)
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)

    def experts(rows, row_probs):
        return torch.tanh(rows @ weight) * row_probs.unsqueeze(1)

    plain = make_dispatcher("ours", config)
    leaf, leaf_probs = _step(x, probs)
    rows, counts, row_probs = plain.dispatch_postprocess(
        *plain.token_dispatch(*plain.dispatch_preprocess(leaf, routing_map, leaf_probs))
    )
    output = plain.combine_postprocess(plain.token_combine(plain.combine_preprocess(experts(rows, row_probs))))
    output.backward(grad)

    overlapped = make_dispatcher("ours", config)
    manager = overlapped._comm_manager
    x_in, probs_in = _step(x, probs)
    tokens, weights = overlapped.dispatch_preprocess(x_in, routing_map, probs_in)
    tokens_in, weights_in = _step(tokens, weights)
    manager.token_probs = weights_in
    sent, sent_probs = overlapped.token_dispatch(tokens_in, weights_in)
    rows_in, row_probs_in = _step(sent, sent_probs)
    manager.dispatched_probs = row_probs_in
    rows, counts_again, row_probs = overlapped.dispatch_postprocess(rows_in, row_probs_in)
    assert torch.equal(counts, counts_again) and torch.equal(counts, manager.get_number_of_tokens_per_expert())
    expert_output = overlapped.combine_preprocess(experts(rows, row_probs))
    (expert_output_in,) = _step(expert_output)
    result = overlapped.combine_postprocess(overlapped.token_combine(expert_output_in))
    for outputs, inputs in (((sent, sent_probs), (tokens, weights)), ((result,), (expert_output,))):
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        assert not storages & {tensor.untyped_storage().data_ptr() for tensor in outputs}, "an output aliases an input"
    expert_output.untyped_storage().resize_(0)
    assert torch.equal(result, output)

    result.backward(grad)
    expert_output.backward(expert_output_in.grad)
    torch.autograd.backward([sent, sent_probs], [rows_in.grad, row_probs_in.grad])
    torch.autograd.backward([tokens, weights], [tokens_in.grad, weights_in.grad])
    assert torch.equal(x_in.grad, leaf.grad) and torch.equal(probs_in.grad, leaf_probs.grad)


# ---- inference switches capacity padding on and off at run time


# Megatron's softmax is fp32
@pytest.mark.parametrize(("router", "tolerance"), [(None, 1e-12), (fused_router_without_near_ties, 1e-9)])
@run_on("four_ranks")
def test_inference_flips_drop_and_pad(router, tolerance):
    from megatron.core.inference import utils

    join_layout(1, W)
    options = {"num_moe_experts": 8, "moe_router_topk": 2}
    spec = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    theirs = spec(config=make_config(**options))
    ours = ep_layer_spec(spec, router=router)(config=make_config(**options))
    ours.load_state_dict(theirs.state_dict())
    outputs = []
    for layer in (theirs, ours):
        layer.eval()
        x = torch.randn(12, 1, 32, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
        utils.moe_layer_cache = None
        with torch.no_grad():
            results = [layer(x)[0]]
            utils.set_decode_expert_padding(layer, True, capacity_factor=4)
            results.append(layer(x)[0])
            utils.set_decode_expert_padding(layer, False)
            results.append(layer(x)[0])
        outputs.append(results)
    torch.testing.assert_close(*outputs, rtol=0, atol=tolerance)


# ---- buffers and mistakes


@run_on("four_ranks")
def test_layers_share_one_buffer():
    join_layout(1, 2)
    config = make_config()
    before = shared_buffers.comm_seconds()
    for _ in range(2):
        dispatcher = make_dispatcher("ours", config)
        x = torch.randn(5, 32, dtype=torch.float64)
        routing_map = torch.ones(5, 8, dtype=torch.bool)
        run_dispatcher(dispatcher, x, routing_map, routing_map.double(), x)
    assert len(shared_buffers._buffers) == 1, "layers over one group share a buffer"
    during = shared_buffers.comm_seconds()
    assert before < during < before + 60
    with pytest.raises(RuntimeError, match="close_buffers"):
        shared_buffers.configure(timeout=5.0)
    shared_buffers.close_buffers()
    assert shared_buffers.comm_seconds() == during, "closing forgets no time"
    shared_buffers.configure(ep.Topology(2, 1), timeout=30.0)
    buffer = shared_buffers.shared_buffer(dispatcher.tp_ep_group, 8, torch.device("cpu"))
    assert buffer.topology == ep.Topology(2, 1) and buffer.config.timeout == 30.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(num_sm=2), r"no setting num_sm; did you mean num_sms\?; allowed: topology, .*num_sms, .*tuning"),
        (dict(num_smss=3), r"no setting num_smss; did you mean num_sms\?"),
        (dict(qqqq=3), "no setting qqqq; allowed"),
        (dict(timeout="20"), "Config.timeout is '20', must be a number of seconds"),
        (dict(num_sms=0), "Config.num_sms is 0"),
    ],
)
def test_configure_names_what_is_wrong(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        shared_buffers.configure(**settings)
    assert shared_buffers._config == {}, "and sets nothing"


@run_on("four_ranks")
def test_what_1f1b_overlap_needs_is_asked_before_a_model_is_built():
    join_layout(1, W)
    config = make_config()
    config.overlap_moe_expert_parallel_comm = True
    with pytest.raises(ValueError, match=r"needs moe_token_dispatcher_type='flex'.*'hybridep', got 'alltoall'"):
        make_dispatcher("ours", config)
    config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = "flex", "hybridep"
    with (
        mock.patch.object(step_state, "SCHEDULE", "nowhere"),
        pytest.raises(ValueError, match="sets no dispatched_probs"),
    ):
        make_dispatcher("ours", config)
    config.moe_flex_dispatcher_backend = "ncclep"
    make_dispatcher("ours", config)
    config.moe_ncclep_zero_copy = True
    with pytest.raises(ValueError, match="moe_ncclep_zero_copy is True with overlap_moe_expert_parallel_comm"):
        make_dispatcher("ours", config)


@run_on("four_ranks")
def test_values_that_pretrain_refuses_are_refused_in_a_config():
    join_layout(1, W)
    for name, value in {"moe_combine_bwd_dtype": "mxfp8", "moe_megakernel_backend": "mok"}.items():
        config = make_config()
        setattr(config, name, value)
        with pytest.raises(ValueError, match=f"{name} is '{value}': "):
            make_dispatcher("ours", config)
    config.moe_megakernel_backend, config.moe_combine_bwd_dtype = None, "bf16"  # the defaults
    make_dispatcher("ours", config)


@pytest.mark.parametrize("keeps_order", [True, False])
@run_on("four_ranks")
def test_sums_in_the_order_of_inference_are_refused_where_megatron_keeps_it(keeps_order):
    join_layout(1, W)
    config = make_config()
    config.batch_invariant_mode = True
    refused = pytest.raises(ValueError, match=r"batch_invariant_mode is True: .* leave it out")
    with mock.patch.object(dispatcher, "HAS_INVARIANT_SUMS", keeps_order):  # noqa: SIM117
        with refused if keeps_order else contextlib.nullcontext():
            make_dispatcher("ours", config)


@run_on("four_ranks")
def test_a_routing_map_of_another_shape_is_refused():
    join_layout(1, W)
    dispatcher = make_dispatcher("ours", make_config())
    x = torch.randn(5, 32, dtype=torch.float64)
    for routing_map in (
        torch.ones(5, 2, dtype=torch.bool),
        torch.ones(4, 8, dtype=torch.bool),
        torch.ones(5, 8).long(),
    ):
        with pytest.raises(ValueError, match=r"routing_map is torch\.\w+ of shape .* must be \(5, [28]\)"):
            dispatcher.dispatch_preprocess(x, routing_map, routing_map.double())
    routing_map = torch.ones(5, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"probs is torch\.float64 of shape \(5, 2\), must be \(5, 8\)"):
        dispatcher.dispatch_preprocess(x, routing_map, torch.ones(5, 2).double())


@pytest.mark.parametrize(
    ("tp", "options"),
    [(1, {}), (2, {}), (2, MANY_CHOICES)],
    ids=["TP 1", "TP 2", "TP 2, more choices than fit beside a row"],
)
@run_on("four_ranks")
def test_only_minus_one_is_no_expert(tp, options):
    """A sparse router's choices, the last of them an id that is neither an expert nor none."""
    join_layout(tp, W // tp)
    config = make_config(**options)
    ids = torch.arange(config.moe_router_topk).unsqueeze(0)
    x, weights = torch.randn(1, 32, dtype=torch.float64), torch.ones(ids.shape, dtype=torch.float64)
    dispatcher = make_dispatcher("ours", config)
    ids[0, -1] = -1
    dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, ids, weights))
    dist.barrier()
    ids[0, -1] = -2
    with pytest.raises((ValueError, ep.EPAbortError), match="must hold distinct ids in"):
        dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(x, ids, weights))
    with contextlib.suppress(ep.EPAbortError):  # of another rank, that it refused the same
        shared_buffers.close_buffers()


@pytest.mark.parametrize("in_dispatcher", [False, True])
@run_on("four_ranks")
def test_the_others_hear_of_a_failure_at_once(in_dispatcher):
    """Rank 1 fails, with a wrong argument or somewhere else, once the buffers are there."""
    join_layout(1, W)
    dispatcher = make_dispatcher("ours", make_config())
    x = torch.randn(5, 32, dtype=torch.float64)
    routing_map = torch.ones(5, 8, dtype=torch.bool)
    run_dispatcher(dispatcher, x, routing_map, routing_map.double(), x)
    dist.barrier()
    fails = dist.get_rank() == 1
    own, of_others = ("routing_map is", "refused its arguments") if in_dispatcher else ("anything", "failed for a")
    says = own if fails else f"^rank 1 {of_others}"
    with pytest.raises((ValueError, RuntimeError), match=says), shared_buffers.abort_peers_on_error():
        if fails and not in_dispatcher:
            raise RuntimeError("anything")
        run_dispatcher(dispatcher, x, routing_map[: 4 if fails else 5], routing_map.double(), x)
        run_dispatcher(dispatcher, x, routing_map, routing_map.double(), x)
    shared_buffers.close_buffers()


@run_on("four_ranks")
def test_rows_over_capacity_are_never_lost_silently():
    join_layout(1, W)
    dispatcher = make_dispatcher("ours", make_config(**PAD))
    x = torch.randn(20, 32, dtype=torch.float64)
    routing_map = torch.zeros(20, 8, dtype=torch.bool)
    routing_map[:, 0] = True  # no router that keeps to the capacity does this
    result = run_dispatcher(dispatcher, x, routing_map, routing_map.double(), x)
    assert result["output"].isnan().any() or dist.get_rank(), "tokens of rank 0 come first, and expert 0 takes them"
    for turn, kind in enumerate((ep.EPOverflowError, ep.EPAbortError)):
        dist.barrier()
        if turn == min(dist.get_rank(), 1):
            with pytest.raises(kind, match="an expert was sent more rows than its capacity"):
                ep.raise_if_failed()
    shared_buffers.close_buffers()

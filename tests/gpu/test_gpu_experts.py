"""`GroupedExperts` on one GPU: every bit of Transformer Engine's experts, without a wait of the host, in a CUDA graph,
and by each function that adds weight gradients."""

from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from graphs import captured
from run_on import run_on
from skips import missing


def lack():
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return "grouped experts need a GPU of compute capability 9.0"
    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    return missing("megatron.core")


pytestmark = pytest.mark.needs(lack())

W, L, H, FFN, BEHIND = 1, 8, 512, 256, 300
COUNTS = [(300, 0, 511, 1, 128, 0, 64, 777), (0, 0, 0, 0, 0, 0, 0, 900), (1500, 3, 0, 0, 5, 7, 9, 0), (0,) * L]
BIASED = {"add_bias_linear": True, "bias_activation_fusion": False}


def make_experts(kind, **options):
    """Experts of a layer: "te": Transformer Engine's; "grouped": ours in their place, with the same initial values."""
    from gpu_layers import join, make_config
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    from megatron_ep.megatron.experts import GroupedExperts
    from megatron_ep.megatron.layer import ep_layer_spec

    join()
    defaults = dict(hidden_size=H, moe_ffn_hidden_size=FFN, num_moe_experts=L, moe_grouped_gemm=True)
    config = make_config(**{**defaults, "params_dtype": torch.bfloat16, "bf16": True, **options})
    has_te = find_spec("transformer_engine") is not None
    spec = get_moe_module_spec(use_te=has_te, num_experts=L, moe_grouped_gemm=has_te)
    if kind == "grouped":
        spec = ep_layer_spec(spec, experts="grouped")
    experts = spec(config=config).cuda().experts
    assert isinstance(experts, GroupedExperts) is (kind == "grouped")
    return experts


def given(counts, behind=0, seed=0):
    """Rows, counts on the GPU, probs and a gradient; those of nobody are NaN."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts) + behind
    x, grad = torch.randn(2, rows, H, generator=generator)
    probs = torch.rand(rows, generator=generator)
    for tensor in (x, grad, probs):
        tensor[sum(counts) :] = float("nan")
    return x.bfloat16().cuda(), torch.tensor(counts, device="cuda"), probs.cuda(), grad.bfloat16().cuda()


def run(experts, x, counts, probs, grad):
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    experts.zero_grad()
    output, _ = experts(x, counts, probs)
    output.backward(grad)
    return [output.detach(), x.grad, probs.grad, *(parameter.grad for parameter in experts.parameters())]


def assert_equal(actual, expected, rows, names=("output", "rows", "probs", "fc1", "fc2")):
    for name, ours, theirs in zip(names, actual, expected, strict=True):
        if name in ("output", "rows", "probs"):
            ours, theirs = ours[:rows], theirs[:rows]
        assert ours.isfinite().all() and torch.equal(ours, theirs), (name, (ours - theirs).abs().max())


@pytest.mark.needs(missing("transformer_engine"))
@pytest.mark.parametrize("fused", [True, False])
@run_on("ranks")
def test_every_bit_is_transformer_engines(fused):
    theirs, ours = (make_experts(kind, bias_activation_fusion=fused) for kind in ("te", "grouped"))
    torch._dynamo.config.disable = False  # grouped experts round as Megatron's compiled function does
    for name in ("linear_fc1", "linear_fc2"):
        weights = [getattr(getattr(theirs, name), f"weight{i}") for i in range(L)]
        assert torch.equal(getattr(ours, name).weight, torch.stack(weights)), "initial values"
    for counts in COUNTS[:3]:
        rows = sum(counts)
        x, on_gpu, probs, grad = given(counts, BEHIND)
        output, of_x, of_probs, *_ = run(theirs, x[:rows], on_gpu.cpu(), probs[:rows], grad[:rows])
        joined = [
            torch.stack([getattr(getattr(theirs, name), f"weight{i}").grad for i in range(L)])
            for name in ("linear_fc1", "linear_fc2")
        ]
        actual, expected = run(ours, x, on_gpu, probs, grad), [output, of_x, of_probs, *joined]
        sums = [result.pop(2)[:rows] for result in (actual, expected)]  # over a row, in another order
        torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)
        assert_equal(actual, expected, rows, ("output", "rows", "fc1", "fc2"))


@pytest.mark.needs(missing("transformer_engine"))
@run_on("ranks")
def test_biases_as_transformer_engines():
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    clamped = {"activation_func": quick_gelu, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0}
    theirs, ours = (make_experts(kind, **BIASED, **clamped) for kind in ("te", "grouped"))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if ".bias" in name:
                parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    rows = sum(COUNTS[0])
    x, counts, probs, grad = given(COUNTS[0], BEHIND)
    expected = run(theirs, x[:rows], counts.cpu(), probs[:rows], grad[:rows])[:3]
    of = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, _ in ours.named_parameters():
        expected.append(torch.stack([of[f"{name}{i}"] for i in range(L)]))
    for number, (mine, other) in enumerate(zip(run(ours, x, counts, probs, grad), expected, strict=True)):
        mine, other = (mine[:rows], other[:rows]) if number < 3 else (mine, other)
        scale = other.float().abs().max().item()  # biases are rounded once more than in Transformer Engine's product
        torch.testing.assert_close(mine.float(), other.float(), rtol=2e-2, atol=2e-2 * scale)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize(
    "options", [{}, BIASED, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}]
)
@run_on("ranks")
def test_the_host_waits_for_nothing(where, options):
    from megatron_ep.megatron import grouped_products

    experts = make_experts("grouped", **options)
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
        parameter.grad_added_to_main_grad = False
    x, counts, probs, grad = given(COUNTS[0], BEHIND)
    counts = counts if where == "device" else counts.cpu()
    for how in ("autograd", "add", "triton"):
        with mock.patch.object(grouped_products, "OVERRIDE", how):
            run(experts, x, counts, probs, grad)
            torch.cuda.set_sync_debug_mode("error")
            try:
                run(experts, x, counts, probs, grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, BIASED])
@run_on("ranks")
def test_a_graph_is_replayed_with_other_counts(options):
    experts, R = make_experts("grouped", **options), 2048
    x, counts, probs, grad = given(COUNTS[0], R - sum(COUNTS[0]))
    x.requires_grad_(), probs.requires_grad_()

    def step():
        experts.zero_grad()
        x.grad = probs.grad = None
        output, _ = experts(x, counts, probs)
        output.backward(grad)
        return [output, x.grad, probs.grad, *(parameter.grad for parameter in experts.parameters())]

    graph, found = captured(step)
    for seed, others in enumerate(COUNTS):
        new = given(others, R - sum(others), seed)
        with torch.no_grad():
            for old, value in zip((x, counts, probs, grad), new, strict=True):
                old.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        actual = [part.detach().clone() for part in found]
        names = ("output", "rows", "probs", *(name for name, _ in experts.named_parameters()))
        assert_equal(actual, run(experts, *new), sum(others), names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@run_on("ranks")
def test_what_adds_weight_gradients(dtype):
    from megatron_ep.megatron import grouped_products

    names = ["add", *(["triton"] if dtype is torch.float32 else [])]
    for counts in COUNTS:
        rows = sum(counts)
        x, on_gpu, _, _ = given(counts, BEHIND)
        grad = torch.randn(rows + BEHIND, 2 * FFN, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
        grad[rows:] = float("nan")
        offsets = on_gpu.cumsum(0, dtype=torch.int32)
        exact = torch.ones(L, 2 * FFN, H, device="cuda", dtype=torch.float64)
        for i, (begin, end) in enumerate(zip([0, *offsets.tolist()], offsets.tolist(), strict=False)):
            exact[i] += grad[begin:end].double().t() @ x[begin:end].double()
        for name in names:
            found = []
            for _ in range(2):
                main_grad = torch.ones(L, 2 * FFN, H, device="cuda", dtype=dtype)
                grouped_products.ADDERS[name](main_grad, grad, x, offsets)
                found.append(main_grad)
            assert torch.equal(*found), f"{name}: two runs, the same bits"
            off = ((found[0] - exact).abs().max() / exact.abs().max()).item()
            assert off < (1e-5 if name != "add" else 1e-2), (name, counts, off)
            if not rows:
                assert (found[0] == 1).all()


@run_on("ranks")
def test_main_grad_of_the_whole_backward_pass():
    """What is added by default is, up to the rounding of a gradient in bf16, what autograd returns."""
    from megatron_ep.megatron import grouped_products

    experts = make_experts("grouped")
    args = given(COUNTS[0], BEHIND)
    expected = run(experts, *args)[3:]
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
        parameter.grad_added_to_main_grad = False
    run(experts, *args)
    for parameter, gradient in zip(experts.parameters(), expected, strict=True):
        assert parameter.grad_added_to_main_grad
        scale = gradient.float().abs().max().item()
        torch.testing.assert_close(parameter.main_grad, gradient.float(), rtol=1e-2, atol=1e-2 * scale)
    assert grouped_products.adder(experts.linear_fc1.weight.main_grad, args[3]) is not grouped_products._add

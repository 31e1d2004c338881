"""A MoE layer whose experts are Transformer Engine's, in fp8: this dispatcher against Megatron's all-to-all; rows that
arrive padded against experts that pad for themselves; rows and gradients that travel as fp8 against those in bf16.
Ranks share a GPU where there are too few."""

import contextlib

import pytest
import torch
from skips import missing

pytestmark = pytest.mark.needs(missing("megatron.core", "transformer_engine"))

W, ALIGNMENT = (4 if torch.cuda.device_count() >= 4 else 2), 16
HYBRIDEP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
ROUTER_PADS = {"moe_router_padding_for_quantization": True}


def make_layer(ours, **options):
    """Megatron's MoE layer with TEGroupedMLP, in bf16 or, by the options, fp8."""
    from gpu_layers import make_config
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from megatron_ep.megatron.layer import ep_layer_spec

    config = make_config(
        **{
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "moe_ffn_hidden_size": 512,
            "moe_grouped_gemm": True,
            "params_dtype": torch.bfloat16,
            "bf16": True,
            **options,
        }
    )
    spec = get_moe_module_spec(use_te=True, num_experts=config.num_moe_experts, moe_grouped_gemm=True)
    layer = (ep_layer_spec(spec) if ours else spec)(config=config).cuda()
    assert isinstance(layer.experts, TEGroupedMLP)
    return layer, config


def run(ours, x, grad, weights=None, **options):
    """Forward and backward with these weights (None: new ones): the output and gradients by name; how many rows this
    rank's experts had, padding included (ours alone); the weights."""
    from megatron.core.fp8_utils import get_fp8_context

    layer, config = make_layer(ours, **options)
    parameters = dict(layer.named_parameters())
    for name, value in (weights or {}).items():
        parameters[name].data.copy_(value)
    leaf = x.clone().requires_grad_()
    with get_fp8_context(config) if config.fp8 else contextlib.nullcontext():
        output, _ = layer(leaf)
    output.backward(grad)
    torch.cuda.synchronize()
    results = {"output": output.detach(), "input": leaf.grad}
    results |= {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    assert all(part.isfinite().all() for part in results.values())
    rows = layer.token_dispatcher._comm_manager.tokens_per_expert.tolist() if ours else None
    return results, rows, {name: parameter.detach() for name, parameter in parameters.items()}


def distance(some, others):
    """|a - b| / |b|, the largest of all parts."""
    assert some.keys() == others.keys()
    parts = {key: ((some[key] - others[key]).float().norm() / others[key].float().norm()).item() for key in some}
    return max(value for value in parts.values() if value == value)  # 0 / 0: an expert without tokens


def compare(recipe):
    """Distances between layers that compute the same; rows of the experts where the dispatcher pads."""
    import torch.distributed as dist
    from gpu_layers import join

    from megatron_ep.megatron import shared_buffers

    join()
    shared_buffers.configure(num_sms=4, timeout=60.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = 150 + 37 * dist.get_rank()  # no rank has as many as another, nor a multiple of what fp8 needs
    x, grad = torch.randn(2, tokens, 1, 1024, generator=generator).to("cuda", torch.bfloat16)
    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe}

    bf16, _, weights = run(True, x, grad)
    theirs, *_ = run(False, x, grad, weights, **fp8)
    alltoall_padded, *_ = run(False, x, grad, weights, **fp8, **ROUTER_PADS)
    ours, own_rows, _ = run(True, x, grad, weights, **fp8)
    padded, rows, _ = run(True, x, grad, weights, **fp8, **ROUTER_PADS)
    declared, declared_rows, _ = run(True, x, grad, weights, **fp8, **HYBRIDEP)
    shared_buffers.close_buffers()
    shared_buffers.configure()
    return {
        "fp8": distance(ours, bf16),
        "dispatcher": distance(ours, theirs),
        "who pads": distance(padded, ours),
        "who pads, hybridep": distance(declared, ours),
        "padded, from bf16": distance(padded, bf16),
        "padding routers": distance(padded, alltoall_padded),
        "padding routers, from bf16": distance(alltoall_padded, bf16),
        "rows": (own_rows, rows, declared_rows),
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_experts_in_fp8(ranks, recipe):
    found = ranks.run(compare, recipe)
    print(found)
    for rank in found:
        own, padded, declared = rank.pop("rows")
        assert all(count % ALIGNMENT == 0 for count in padded) and declared == padded
        assert padded == [-(-count // ALIGNMENT) * ALIGNMENT for count in own] != own
        assert 0.005 < rank["fp8"] < 0.3, "the products were in fp8"
        # The same rows in the same order, so experts compute the same; sums of a token's rows are rounded elsewhere.
        assert rank["dispatcher"] < 1e-2
        # Rows of zeros behind an expert's own, by the dispatcher or by the experts: the same bits, in the same places.
        assert rank["who pads"] < 1e-3 and rank["who pads, hybridep"] < 1e-3
        # Megatron's routers pad with tokens of probability 0, which may widen what an expert's rows are scaled by, and
        # move the blocks that are scaled together: two roundings of the same numbers.
        assert rank["padding routers"] < 0.3
        assert rank["padded, from bf16"] < 1.2 * rank["padding routers, from bf16"]


ROWS, GRADIENTS = {"moe_dispatch_fwd_dtype": "fp8"}, {"moe_combine_bwd_dtype": "fp8"}
WIRES = {"rows": ROWS, "gradients": GRADIENTS, "both": {**ROWS, **GRADIENTS}}


def compare_wires(fp8, recompute):
    """Of each wire: whether output and gradient of the input have the bits of the bf16 wire; and its distance."""
    import torch.distributed as dist
    from gpu_layers import join

    from megatron_ep.megatron import shared_buffers

    join()
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = 150 + 37 * dist.get_rank()
    x, grad = torch.randn(2, tokens, 1, 1024, generator=generator)
    sizes = torch.exp(3 * torch.randn(2, tokens, 1, 1, generator=generator))  # of rows
    x, grad = (torch.stack([x, grad]) * sizes).to("cuda", torch.bfloat16)
    x[3], grad[5] = 0, 0
    settings = {"fp8": fp8, "fp8_recipe": "blockwise"}
    if recompute:
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    found, plain, weights = {}, None, None
    for name, options in {"bf16": {}, **WIRES}.items():
        shared_buffers.close_buffers()
        shared_buffers.configure(num_sms=4, timeout=60.0, **options)
        results, _, weights = run(True, x, grad, weights, **settings)
        plain = plain or results
        equal = [torch.equal(results[part], plain[part]) for part in ("output", "input")]
        found[name] = (equal, distance(results, plain))
    shared_buffers.close_buffers()
    shared_buffers.configure()
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_rows_and_gradients_in_fp8_lose_nothing(ranks, fp8, recompute):
    for rank in ranks.run(compare_wires, fp8, recompute):
        print(rank)
        assert all(all(equal) for equal, _ in rank.values()), rank
        # Columns that are made of the rows are rounded once more where a power of two makes a number subnormal, which
        # the wider range of e5m2 avoids: then the gradients of weights have the same bits, too.
        for wire, (_, apart) in rank.items():
            is_rounded = wire in ("rows", "both") or (fp8 == "e4m3" and wire == "gradients")
            assert apart < 0.1 and (apart > 0) is is_rounded, (wire, apart)

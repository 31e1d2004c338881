"""`DispatchedCoreAttention`: attention on whatever rank has time is attention at home, in a module and in a model."""

import contextlib
import dataclasses
import re
from unittest import mock

import pytest
from nightly import at_night
from run_on import run_on

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import te_attention
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

import megatron_ep as ep
from megatron_ep.megatron import attention, equivalence, shared_buffers
from megatron_ep.megatron.attention import (
    DispatchedCoreAttention,
    VarlenAttention,
    packed_sequences,
    sequence_spec,
    shards_of,
    varlen_spec,
)
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import ep_layer_spec

pytestmark = pytest.mark.numerical

W = 4
TE = "Transformer Engine"
# Of each rank's documents: rank 0 has most attention to compute, and one of rank 2's is longer than a block.
LENGTHS = ([600], [40, 3, 130, 1], [300, 60], [9] * 12)


def config_of_one(**options):
    """Where this process has no ranks."""
    with mock.patch.object(equivalence, "_layout", (1, 1)):
        return make_config(**options)


def make_model(config, spec):
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    return GPTModel(config, spec, vocab_size=50, max_sequence_length=640, position_embedding_type="rope")


def packed(lengths):
    return packed_sequences(torch.tensor([0, *lengths]).cumsum(0).int())


def furthest(ours, theirs):
    """The largest difference of two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def moved_rows(params):
    """Rows of Q that went to another rank."""
    return params._ep_sequences.plan.q_rows.clone().fill_diagonal_(0).sum().item()


DTYPES = pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "v_width"),
    [(4, 4, 8, 8), (6, 2, 8, 8), (3, 3, 12, 8)],
    ids=["MHA", "GQA", "MLA"],
)
@DTYPES
@run_on("four_ranks")
def test_attention(dtype, most, heads, kv_heads, width, v_width):
    join_layout(1, 1)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    rows = sum(LENGTHS[rank])
    shapes = ((heads, width), (kv_heads, width), (kv_heads, v_width))
    leaves = [torch.randn(rows, *shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]
    weight = torch.randn(rows, heads * v_width, dtype=dtype, generator=generator)
    config, params = make_config(), packed(LENGTHS[rank])
    at_home = VarlenAttention(config)(*leaves, None, packed_seq_params=params)
    expected = [at_home, *torch.autograd.grad((at_home * weight).sum(), leaves)]
    dispatched = DispatchedCoreAttention(config)
    for _ in range(2):  # two layers of one micro-batch
        out = dispatched(*leaves, None, packed_seq_params=params)
        ours = [out, *torch.autograd.grad((out * weight).sum(), leaves)]
        assert furthest(ours, expected) < most
    assert moved_rows(params) > 50


@run_on("four_ranks")
def test_with_context_parallelism():
    """Two ranks share the documents of a micro-batch: chunks 0 and 3 of each on one, 1 and 2 on the other."""
    join_layout(1, 1)
    shared_buffers.close_buffers()
    equivalence._destroy_groups()
    equivalence._layout = None
    parallel_state.initialize_model_parallel(context_parallel_size=2, create_gloo_process_groups=False)
    context_rank, data_rank = parallel_state.get_context_parallel_rank(), parallel_state.get_data_parallel_rank()
    lengths = ([400, 8], [4, 120, 12])[data_rank]
    generator = torch.Generator().manual_seed(data_rank)
    whole = [torch.randn(sum(lengths), 2, 4, dtype=torch.float64, generator=generator) for _ in range(4)]

    def own(rows):
        chunks = [document.chunk(4) for document in rows.split(lengths)]
        return torch.cat([part for chunk in chunks for part in (chunk[context_rank], chunk[3 - context_rank])])

    leaves = [rows.clone().requires_grad_() for rows in whole[:3]]
    parts = [own(rows).clone().requires_grad_() for rows in whole[:3]]
    config = config_of_one()
    expected = VarlenAttention(config)(*leaves, None, packed_seq_params=packed(lengths))
    (expected * whole[3].flatten(1)).sum().backward()
    parallel = dataclasses.replace(config, context_parallel_size=2)
    out = DispatchedCoreAttention(parallel)(*parts, None, packed_seq_params=packed(lengths))
    (out * own(whole[3]).flatten(1)).sum().backward()
    ours = [out, *(part.grad for part in parts)]
    assert furthest(ours, [own(expected), *(own(leaf.grad) for leaf in leaves)]) < 1e-12
    shared_buffers.close_buffers()
    equivalence._destroy_groups()


@DTYPES
@run_on("four_ranks")
def test_with_tensor_parallelism(dtype, most):
    """A GPT of two layers whose heads two ranks share: each moves its own heads among the ranks with other data. Losses
    and gradients."""
    join_layout(2, 1)
    data_rank = parallel_state.get_data_parallel_rank()
    config = make_config(
        num_layers=2,
        num_moe_experts=None,
        moe_ffn_hidden_size=None,
        sequence_parallel=False,
        ffn_hidden_size=48,
        num_query_groups=2,
        params_dtype=dtype,
    )
    lengths = ([600, 8], [40, 5, 130, 1])[data_rank]
    tokens = torch.randint(0, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(data_rank))
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    results, steps = [], []
    for make_spec in (varlen_spec, sequence_spec):
        model = make_model(config, make_spec(spec))
        model.to(dtype)  # torch's norms have one of their own
        params = packed(lengths)
        losses = model(tokens, None, None, labels=(tokens * 7 + 3) % 50, packed_seq_params=params)
        losses.mean().backward()
        results.append([losses.detach(), *(parameter.grad for parameter in model.parameters())])
        steps.append(params)
    assert furthest(*results) < most and moved_rows(steps[1]) > 50


def _losses(spec, recompute):
    config = make_config(
        num_layers=2,
        num_moe_experts=4,
        num_query_groups=2,
        params_dtype=torch.float32,
        moe_router_dtype="fp32",
        recompute_granularity="selective" if recompute else None,
    )
    model = make_model(config, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(4):
        rank = (dist.get_rank() + step) % W  # other lengths in each step
        lengths = LENGTHS[rank]
        tokens = torch.randint(0, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(rank))
        labels = (tokens * 7 + 3) % 50
        loss = model(tokens, None, None, labels=labels, packed_seq_params=packed(lengths)).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(
    ("by", "recompute"), [("spec", True), ("enable", False), at_night("spec", False), (TE, True), at_night(TE, False)]
)
@run_on("four_ranks")
def test_a_model_has_the_losses_of_attention_at_home(by, recompute):
    """A GPT of two layers."""
    join_layout(1, 1)
    spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    with contextlib.ExitStack() as stack:
        kind, at_home = DispatchedCoreAttention, varlen_spec(spec)
        if by == TE:
            kind = stack.enter_context(te_attention.installed())
            at_home = spec = with_te(spec, kind)
        expected, theirs = _losses(at_home, False)
        if by == "enable":
            attention.enable()
            stack.callback(attention.disable)
        else:
            spec = sequence_spec(ep_layer_spec(spec))
        ours, model = _losses(spec, recompute)
    layers = [module for module in model.modules() if isinstance(module, kind)]
    assert len(layers) == 2
    if by == TE:
        assert [type(layer).__name__ for layer in layers] == ["DispatchedTEDotProductAttention"] * 2
        names = [{name for name in of.state_dict() if ".core_attention" in name} for of in (theirs, model)]
        assert names[0] == names[1] and len(names[0]) == 2, "a checkpoint of one is one of the other"
    assert ours == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.1, "the model learns"


@pytest.mark.parametrize("by", ["spec", "enable"])
@run_on("four_ranks")
def test_latent_attention(by):
    """MLA of one layer, which is built in another way than other attention: output and gradients."""
    join_layout(1, 1)
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        attention_dropout=0.0,
        rope_type="rope",
        qk_layernorm=True,
        add_bias_linear=False,
        params_dtype=torch.float64,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=True)
    results, weights = [], None
    for make_spec in (varlen_spec, sequence_spec if by == "spec" else lambda spec: spec):
        if by == "enable" and results:
            attention.enable()
        try:
            model_parallel_cuda_manual_seed(1)
            # Megatron 0.16 takes itself to have Transformer Engine here
            with mock.patch.object(multi_latent_attention, "HAVE_TE", False, create=True):
                layer = make_spec(spec).submodules.self_attention(config=config, layer_number=1)
        finally:
            attention.disable()
        layer.load_state_dict(weights or layer.state_dict())
        weights = layer.state_dict()
        lengths = LENGTHS[dist.get_rank()]
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(sum(lengths), 1, 32, dtype=torch.float64, generator=generator).requires_grad_()
        out, _ = layer(x, attention_mask=None, packed_seq_params=packed(lengths))
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    assert isinstance(layer.core_attention, DispatchedCoreAttention)
    assert furthest(*results) < 1e-9


@pytest.mark.parametrize(("how", "number"), [("another tensor", 2), ("padded", 2), ("in place", 2), ("inference", 4)])
@run_on("four_ranks")
def test_other_documents_in_the_same_params(how, number):
    """They take other documents for a second micro-batch of as many tokens, of two layers each: how many plans are
    made."""
    join_layout(1, 1)
    config, rank = make_config(), dist.get_rank()
    dispatched = DispatchedCoreAttention(config)
    at_home, plans = VarlenAttention(config), []
    generator = torch.Generator().manual_seed(rank)
    with torch.inference_mode(how == "inference"):
        params = packed([500, 8, 92])
        for lengths in ([500, 8, 92], [30, 560, 10]):
            made = packed(lengths)
            if how == "padded":
                params.cu_seqlens_q_padded = made.cu_seqlens_q
            elif how == "another tensor":
                params.cu_seqlens_q = params.cu_seqlens_kv = made.cu_seqlens_q
            else:
                params.cu_seqlens_q.copy_(made.cu_seqlens_q)
            q, k, v = torch.randn(3, 600, 2, 4, dtype=torch.float64, generator=generator)
            for _ in range(2):
                out = dispatched(q, k, v, None, packed_seq_params=params)
                assert furthest([out], [at_home(q, k, v, None, packed_seq_params=made)]) < 1e-12
                plans.append(params._ep_sequences)
    assert len(set(map(id, plans))) == number


MISTAKES = {
    "rows": ({"rows": 12}, "packed_seq_params has 9 tokens, must have the 12 of the micro-batch"),
    "format": (
        {"packed_seq_params": PackedSeqParams(qkv_format="sbhd")},
        "packed_seq_params is of format 'sbhd', must describe packed sequences: qkv_format 'thd'",
    ),
    "nothing": (
        {"packed_seq_params": None},
        "packed_seq_params is None, must describe packed sequences: qkv_format 'thd'",
    ),
    "no cu_seqlens": (
        {"packed_seq_params": PackedSeqParams(qkv_format="thd")},
        "packed_seq_params.cu_seqlens_q is None, must be a tensor [sequences + 1]",
    ),
    "bias": ({"attention_bias": torch.zeros(1)}, "attention_bias is given, must be None with packed sequences"),
}


@pytest.mark.parametrize(
    ("mistake", "message", "in_second_layer"),
    [*((*case, False) for case in MISTAKES.values()), (*MISTAKES["bias"], True)],
    ids=[*MISTAKES, "bias in a later layer"],
)
@run_on("four_ranks")
def test_a_mistake_of_one_rank_is_refused_by_all(mistake, message, in_second_layer):
    """Of rank 2, which all others get rows of; where they have a plan, their waits end."""
    join_layout(1, 1)
    rows = 2000 if in_second_layer and dist.get_rank() == 2 else 9
    call = {"packed_seq_params": packed([rows]), "attention_bias": None, "rows": rows}
    dispatched = DispatchedCoreAttention(make_config())
    if in_second_layer:
        x = torch.randn(rows, 2, 4)
        dispatched(x, x, x, None, packed_seq_params=call["packed_seq_params"])
        dist.barrier()
    if dist.get_rank() == 2:
        call |= mistake
    x = torch.randn(call.pop("rows"), 2, 4)
    kind, says = ValueError, f"^{re.escape(message)}$"
    if not in_second_layer:
        says = f"^rank 2 of data parallelism: {re.escape(message)}$"
    elif dist.get_rank() != 2:
        kind, says = ep.EPAbortError, "^rank 2 "
    with pytest.raises(kind, match=says):
        dispatched(x, x, x, None, **call)
    shared_buffers.close_buffers()


# ---- Transformer Engine's


def with_te(spec, kind):
    """The spec with Megatron's wrapper of Transformer Engine's attention."""
    return attention._with_core_attention(spec, lambda _: kind)


def run_te_attention(lengths):
    """The largest difference of output and gradients from attention at home; there and on other ranks, the calls of
    Transformer Engine's and the names in state dicts."""
    join_layout(1, 1)
    lengths = lengths[dist.get_rank()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    options = dict(layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
    params, rows = packed(lengths), sum(lengths)
    leaves = [torch.randn(rows, n, 4, dtype=torch.float64, generator=generator).requires_grad_() for n in (4, 2, 2)]
    weight = torch.randn(rows, 16, dtype=torch.float64, generator=generator)
    config = make_config(num_attention_heads=4, num_query_groups=2, hidden_size=16)
    results, layers = [], []
    with te_attention.installed() as kind:
        spec = with_te(gpt_layer_specs.get_gpt_layer_local_spec(), kind)
        for made in (spec, sequence_spec(spec)):
            layer = build_module(made.submodules.self_attention.submodules.core_attention, config=config, **options)
            out = layer(
                *leaves, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, packed_seq_params=params
            )
            results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
            layers.append(layer)
    return furthest(*results), *(layer.calls for layer in layers), *(list(layer.state_dict()) for layer in layers)


def test_transformer_engine(four_ranks):
    """Whole sequences, and ends of them with all earlier keys."""
    has_earlier_keys = []
    for difference, at_home, moved, *names in four_ranks.run(run_te_attention, LENGTHS):
        assert difference < 1e-12 and names[0] == names[1] == ["_extra_state"]
        [(mask, q_sizes, k_sizes)] = at_home
        assert mask == "padding_causal" and q_sizes == k_sizes
        [(mask, q_sizes, k_sizes)] = moved
        assert mask == "padding_causal_bottom_right"
        has_earlier_keys += [q < k for q, k in zip(q_sizes, k_sizes, strict=True)]
    assert any(has_earlier_keys) and not all(has_earlier_keys)


@run_on("four_ranks")
def test_transformer_engine_without_rows():
    """A rank without any has nothing to compute, and takes part."""
    join_layout(1, 1)
    rank = dist.get_rank()
    config = make_config(num_attention_heads=2, num_query_groups=2, hidden_size=8)
    lengths = [] if rank == 1 else [3 + rank]
    x = torch.randn(sum(lengths), 2, 4, requires_grad=True)
    with te_attention.installed() as kind:
        layer = attention._dispatched_te(kind)(
            config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
        )
        out = layer(x, x, x, None, packed_seq_params=packed(lengths))
        out.sum().backward()
    assert out.shape == (sum(lengths), 8) and len(layer.calls) == (rank != 1)
    assert (x.grad.abs().sum() > 0) == (rank != 1)


def test_specs_with_transformer_engine():
    with te_attention.installed() as kind:
        for options in ({}, {"num_experts": 4, "moe_grouped_gemm": True}, {"multi_latent_attention": True}):
            spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
            theirs = spec.submodules.self_attention.submodules.core_attention
            assert theirs is kind
            ours = sequence_spec(spec)
            mine = ours.submodules.self_attention.submodules.core_attention.module
            assert issubclass(mine, kind) and mine is not kind
            again = sequence_spec(ours).submodules.self_attention.submodules.core_attention
            assert again.module is mine
        options = dict(layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")
        mine(config_of_one(context_parallel_size=2), **options)  # the stand-in refuses a group of context parallelism
        with pytest.raises(ValueError, match="attn_mask_type is padding, must be causal"):
            mine(config_of_one(), layer_number=1, attn_mask_type=AttnMaskType.padding, attention_type="self")


# ---- one process


def test_specs():
    layer = gpt_layer_specs.get_gpt_layer_local_spec()
    ours = sequence_spec(layer)
    mine = ours.submodules.self_attention.submodules.core_attention
    assert mine.module is DispatchedCoreAttention
    assert layer.submodules.self_attention.submodules.core_attention is DotProductAttention
    assert ours.submodules.mlp is layer.submodules.mlp
    again = sequence_spec(ours).submodules.self_attention.submodules.core_attention
    assert again.module is DispatchedCoreAttention and again.params == mine.params
    latent = sequence_spec(gpt_layer_specs.get_gpt_layer_local_spec(multi_latent_attention=True))
    assert latent.submodules.self_attention.submodules.core_attention.module is DispatchedCoreAttention
    with pytest.raises(ValueError, match="no self-attention in this ModuleSpec"):
        sequence_spec(ModuleSpec(module=torch.nn.Linear))


class TEDotProductAttention:
    pass


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: attention._dispatched(TEDotProductAttention),
            "core_attention is TEDotProductAttention, must be DotProductAttention",
        ),
        (lambda: VarlenAttention(config_of_one(attention_dropout=0.1)), "attention_dropout is 0.1, must be 0"),
        (
            lambda: VarlenAttention(config_of_one(), attn_mask_type=AttnMaskType.padding),
            "attn_mask_type is padding, must be causal",
        ),
        (lambda: VarlenAttention(config_of_one(context_parallel_size=2)), "context_parallel_size is 2, must be 1"),
        (lambda: VarlenAttention(config_of_one(window_size=(4, 0))), r"window_size is \(4, 0\), must be None"),
        (lambda: VarlenAttention(config_of_one())(*[torch.zeros(2, 1, 4)] * 3), "packed_seq_params is None, must"),
        (
            lambda: VarlenAttention(config_of_one())(*[torch.zeros(2, 1, 4)] * 3, packed_seq_params=packed([1, 2])),
            r"cu_seqlens_q has sequences of \[1, 2\] tokens, must be of the 2 rows",
        ),
        (
            lambda: VarlenAttention(config_of_one())(*[torch.zeros(2, 1, 4)] * 3, packed_seq_params=packed([3, -1])),
            r"cu_seqlens_q has sequences of \[3, -1\] tokens, must be of the 2 rows",
        ),
    ],
)
def test_what_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_enabling_twice():
    attention.enable()
    try:
        with pytest.raises(RuntimeError, match="already enabled"):
            attention.enable()
    finally:
        attention.disable()


def test_chunks_of_context_parallelism():
    told = [attention._Own(data, context, [8, 4]) for data in range(2) for context in range(2)]
    homes = [(s.document, s.index, s.home_rank, s.length) for s in shards_of(told, 2)]
    assert homes[:4] == [(0, 0, 0, 2), (0, 1, 1, 2), (0, 2, 1, 2), (0, 3, 0, 2)]
    assert homes[12:] == [(3, 0, 2, 1), (3, 1, 3, 1), (3, 2, 3, 1), (3, 3, 2, 1)]

"""Transformer Engine's attention on other ranks, between two GPUs: output, gradients and losses are those of attention
at home, but for the rounding of bf16."""

import pytest
import torch
import torch.distributed as dist
from skips import missing

W = 2
LACK = None if torch.cuda.device_count() >= W else "there is no second GPU"
pytestmark = pytest.mark.needs(missing("megatron.core", "transformer_engine") or LACK)

# Rank 0 has most attention to compute: of its longest document it gives the end.
LENGTHS = ([2500, 36, 512], [300, 7, 640, 1000, 101])
VOCABULARY = 256


def make_config(**options):
    from gpu_layers import make_config

    return make_config(
        num_layers=2,
        hidden_size=512,
        ffn_hidden_size=512,
        num_attention_heads=8,
        num_query_groups=2,
        num_moe_experts=None,
        moe_ffn_hidden_size=None,
        moe_router_enable_expert_bias=False,
        expert_model_parallel_size=1,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **options,
    )


def packed(lengths):
    from megatron_ep.megatron.attention import packed_sequences

    return packed_sequences(torch.tensor([0, *lengths]).cumsum(0).int().cuda())


def specs():
    """With attention at home, and with it on other ranks."""
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_ep.megatron.attention import sequence_spec

    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    return spec, sequence_spec(spec)


def distance(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def run_model():
    """How far the first step's gradients are from those with attention at home, the losses of both, and how many rows
    of Q have moved in a step."""
    from gpu_layers import join
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_ep.megatron.shared_buffers import close_buffers

    join()
    curves, gradients, names = [], [], []
    for spec in specs():
        model_parallel_cuda_manual_seed(1)
        torch.manual_seed(1)
        model = GPTModel(
            make_config(), spec, vocab_size=VOCABULARY, max_sequence_length=4096, position_embedding_type="rope"
        )
        model.cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
        losses = []
        for step in range(8):
            number = (dist.get_rank() + step) % W  # other lengths in each step
            lengths = LENGTHS[number]
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=generator).cuda()
            labels = (tokens * 7 + 3) % VOCABULARY
            params = packed(lengths)
            loss = model(tokens, None, None, labels=labels, packed_seq_params=params).float().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                total = parameter.grad.float().cpu()
                dist.all_reduce(total)
                parameter.grad.copy_(total)
            if step == 0:
                gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
            optimizer.step()
            losses.append(loss.item())
        curves.append(losses)
        names.append(list(model.state_dict()))
    assert names[0] == names[1], "a checkpoint of one is one of the other"
    close_buffers()
    at_home, dispatched = gradients
    moved = params._ep_sequences.plan.q_rows.clone().fill_diagonal_(0).sum().item()
    return {name: distance(dispatched[name], at_home[name]) for name in at_home}, *curves, moved


def test_a_model_learns_the_same(ranks):
    for distances, at_home, dispatched, moved in ranks.run(run_model):
        assert max(distances.values()) < 0.05 and moved > 500, (distances, moved)
        assert dispatched == pytest.approx(at_home, abs=0.03)
        assert at_home[-1] < at_home[0] - 0.1, "the model learns"

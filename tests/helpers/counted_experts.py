"""Experts of a MoE layer that read on the device how many rows are whose: no count is asked of it, so that a CUDA graph
may hold them."""

import dataclasses
import functools

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

from megatron_ep.megatron.layer import ep_layer_spec


class CountedExperts(torch.nn.Module):
    """Every expert on all R rows, and of each row the result of its expert; rows behind the last one's are nobody's."""

    def __init__(self, num_local_experts, config, pg_collection=None, **_):
        super().__init__()
        shape = (num_local_experts, config.hidden_size, config.moe_ffn_hidden_size)
        generator = torch.Generator().manual_seed(pg_collection.ep.rank())
        first, second = torch.randn(2, *shape, generator=generator, dtype=torch.float64) / shape[1] ** 0.5
        device = "cuda" if torch.cuda.is_available() and not config.use_cpu_initialization else "cpu"
        self.first = torch.nn.Parameter(first.to(device, config.params_dtype))
        self.second = torch.nn.Parameter(second.mT.contiguous().to(device, config.params_dtype))

    def forward(self, rows, tokens_per_expert, probs):
        tokens_per_expert = tokens_per_expert.to(rows.device)  # on the host where it waited for them
        ends = tokens_per_expert.cumsum(0)
        place = torch.arange(rows.shape[0], device=rows.device)
        belongs = (place < ends.unsqueeze(1)) & (place >= (ends - tokens_per_expert).unsqueeze(1))
        out = torch.tanh(rows @ self.first) @ self.second
        out = (out * belongs.unsqueeze(2)).sum(dim=0)
        return (out * probs.unsqueeze(1)).to(rows.dtype), None


def make_layer(config, experts=CountedExperts, router=None):
    """An EPMoELayer with such experts."""
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    submodules = spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
    submodules = dataclasses.replace(submodules, experts=experts)
    if isinstance(spec, functools.partial):
        spec = functools.partial(spec.func, *spec.args, **{**spec.keywords, "submodules": submodules})
    else:
        spec = dataclasses.replace(spec, submodules=submodules)
    return ep_layer_spec(spec, router=router)(config=config)

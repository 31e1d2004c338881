"""What routers on a GPU have chosen, as it is recorded: without a wait of the host. Two ranks, a process each."""

import numpy as np
import pytest
import torch
from skips import missing

from megatron_ep.tools.balance import trace
from megatron_ep.tools.local_ranks import LocalRanks

pytestmark = pytest.mark.needs(missing("megatron.core"))

W, STEPS = 2, 4


def record(directory, fused):
    """What the dispatcher of this rank was given, by step."""
    from gpu_layers import join, make_config
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from shared_settings import configured

    from megatron_ep.megatron import routing_trace
    from megatron_ep.megatron.layer import ep_layer_spec
    from megatron_ep.megatron.router import fused_router

    join()
    config = make_config()
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    with configured(num_sms=4, timeout=30.0):
        routing_trace.enable(directory)
        layer = ep_layer_spec(spec, router=fused_router if fused else None)(config=config).to("cuda")
        layer.set_layer_number(1)
        expected = []
        for step in range(STEPS):
            layer(torch.randn(20 + step, 1, config.hidden_size, device="cuda"))
            expected.append(layer.token_dispatcher.topk_idx.flatten())
            torch.cuda.set_sync_debug_mode("error")
            try:
                routing_trace.end_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        routing_trace.disable()
    return [np.bincount(ids.cpu(), minlength=config.num_moe_experts) for ids in expected]


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_recorded_is_what_was_chosen(tmp_path, fused):
    with LocalRanks(W, 180) as ranks:
        results = ranks.run(record, tmp_path, fused)
    found = trace.read(tmp_path)
    assert (found.recorded_steps, found.expert_ranks) == (STEPS, W)
    [group] = found.groups
    for rank, expected in enumerate(results):
        assert np.array_equal(group.counts[:, group.sources.index(rank)], expected)

"""megatron_ep.overlap without a GPU: what it refuses."""

import pytest
import torch

import megatron_ep as ep
from megatron_ep import overlap


def test_tensors_of_the_host_are_refused() -> None:
    with (
        ep.LocalCluster(1, 1, ep.Config(num_experts=1)) as cluster,
        pytest.raises(ValueError, match="args holds no tensor on a GPU"),
    ):
        overlap.start(ep.dispatch, [torch.ones(1, 1)], [torch.zeros(1, 1, dtype=torch.int64)], buffer=cluster)

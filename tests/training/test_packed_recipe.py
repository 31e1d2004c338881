"""Recipes whose documents are packed: attention at home and on other ranks learn the same."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from run_on import run_on

from megatron_ep.megatron.attention import DispatchedCoreAttention, VarlenAttention
from megatron_ep.megatron.equivalence import join_layout
from megatron_ep.megatron.shared_buffers import close_buffers
from megatron_ep.training import data, recipe
from megatron_ep.training.loop import _forward_step
from megatron_ep.training.model import build_model, build_optimizer

TINY = Path(__file__).parents[2] / "recipes" / "tiny_moe_cpu.yaml"
PACKED = ("train.global_batch_size=4", "train.micro_batch_size=1", "dataset.packed=true")


def test_documents_end_with_their_token():
    end = data.END_OF_DOCUMENT
    assert data.document_bounds(torch.tensor([1, end, 2, 3, end, 4])).tolist() == [0, 2, 5, 6]
    assert data.document_bounds(torch.tensor([1, 2, end])).tolist() == [0, 3]
    assert data.document_bounds(torch.tensor([1, 2])).tolist() == [0, 2]
    assert data.document_bounds(torch.tensor([end])).tolist() == [0, 1]


@pytest.mark.numerical
@run_on("four_ranks")
def test_the_same_losses():
    """With attention at home, and on other ranks."""
    join_layout(1, 4)
    results = []
    for dispatched in (False, True):
        loaded = recipe.load(TINY, [*PACKED, f"dispatcher.sequences={dispatched}"])
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        samples = data.Samples(loaded, data.prepare(loaded), dist.get_rank())
        model = build_model(loaded, data.VOCAB_SIZE)
        kind = DispatchedCoreAttention if dispatched else VarlenAttention
        assert any(type(layer) is kind for layer in model.modules())
        optimizer, _ = build_optimizer(loaded, model)
        losses = []
        for step in range(3):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            per_token, reduce = _forward_step(iter([samples.batch(step, 0)]), model)
            loss, _ = reduce(per_token)
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
        close_buffers()
    assert results[1] == pytest.approx(results[0], abs=1e-5)

"""The parts of training that need no second process."""

from pathlib import Path

import numpy as np
import pytest
import rank_processes
import torch

pytest.importorskip("megatron.core")

from megatron_ep.training import data, recipe

TINY = Path(__file__).parents[2] / "recipes" / "tiny_moe_cpu.yaml"
TEXT = "".join(f"{i} is a number; {i * i} is its square.\n" for i in range(2000))


def test_default_corpus_is_text_of_a_useful_size():
    corpus = data.read(None)
    text = bytes(corpus.tokens[corpus.tokens != data.END_OF_DOCUMENT].astype(np.uint8))
    assert len(text) > 300_000 and text.decode() and text.count(b" ") > 30_000
    assert (corpus.tokens == data.END_OF_DOCUMENT).sum() == corpus.documents > 10


def test_every_byte_is_kept(tmp_path):
    source = tmp_path / "text.txt"
    source.write_bytes(TEXT.encode() + "naïve ☃\n".encode())
    corpus = data.read(str(source))
    stored = corpus.tokens
    assert bytes(stored[:-1].astype(np.uint8)) == source.read_bytes() and stored[-1] == data.END_OF_DOCUMENT
    assert corpus.documents == 1 and stored.dtype == np.uint16
    counts = np.bincount(stored)
    assert corpus.unigram_entropy == pytest.approx(-sum(c / len(stored) * np.log(c / len(stored)) for c in counts if c))


def _prepare(texts):
    path = texts[torch.distributed.get_rank()]
    try:
        return data.prepare(recipe.load(TINY, [f"dataset.path={path}"])).fingerprint
    except ValueError as error:
        return str(error)


def test_all_ranks_read_one_text(four_ranks, tmp_path):
    texts = [tmp_path / f"{rank}.txt" for rank in range(4)]
    for text in texts:
        text.write_text(TEXT)
    assert four_ranks.run(_prepare, texts) == [data.read(str(texts[0])).fingerprint] * 4
    texts[2].write_text(TEXT + ".")
    assert all("rank 2 reads another text than rank 0" in said for said in four_ranks.run(_prepare, texts))
    texts[1].unlink()
    assert four_ranks.run(_prepare, texts) == [f"dataset.path {texts[1]}: No such file or directory"] * 4


@pytest.mark.parametrize(("content", "word"), [(None, "No such file"), (" \n", "empty")])
def test_corpus_mistakes(tmp_path, content, word):
    source = tmp_path / "text.txt"
    if content is not None:
        source.write_text(content)
    with pytest.raises(ValueError, match=word):
        data.read(str(source))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_an_epoch_shows_every_sequence_once_in_an_order_that_no_rank_count_changes(tmp_path, micro_batch_size):
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    corpus = data.read(str(source))

    def steps(nodes, micro_batch_size, count, first=0):
        tiny = recipe.load(TINY, [f"topology.nodes={nodes}", f"train.micro_batch_size={micro_batch_size}"])
        ranks = [data.Samples(tiny, corpus, rank) for rank in range(2 * nodes)]
        microbatches = tiny.train.global_batch_size // (micro_batch_size * len(ranks))
        for step in range(first, first + count):
            batches = [rank.batch(step, m) for m in range(microbatches) for rank in ranks]
            yield torch.cat([batch["tokens"] for batch in batches]), torch.cat([batch["labels"] for batch in batches])

    epoch = data.Samples(recipe.load(TINY), corpus, 0).steps_per_epoch
    seen = list(steps(2, micro_batch_size, epoch + 1))
    for tokens, labels in seen:
        assert tokens.shape == labels.shape == (16, 128) and tokens.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
    rows = torch.cat([tokens for tokens, _ in seen[:epoch]])
    assert len(torch.unique(rows, dim=0)) == len(rows) == 16 * epoch
    assert not torch.equal(seen[0][0], seen[epoch][0]), "the next epoch is shuffled anew"
    for (tokens, _), (other, _) in zip(seen, steps(1, 4, 3), strict=False):
        assert torch.equal(tokens, other)
    [(again, _)] = steps(2, micro_batch_size, 1, first=epoch)
    assert torch.equal(again, seen[epoch][0]), "a batch depends on its step alone"


def test_a_corpus_shorter_than_a_batch(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("short")
    with pytest.raises(ValueError, match="6 tokens, a global batch needs 16 x 128"):
        data.Samples(recipe.load(TINY), data.read(str(source)), 0)


HOST_RUNTIME = """
import importlib, os, torch
from megatron_ep.megatron.stand_ins import host_runtime
optimizers = [importlib.import_module(f"megatron.core.optimizer{name}")
              for name in ("", ".clip_grads", ".distrib_optimizer", ".optimizer")]
for module in optimizers:
    for name in ("Adam", "SGD", "multi_tensor_applier", "multi_tensor_scale_impl", "l2_norm_impl"):
        if hasattr(module, name):
            setattr(module, name, "a kernel of Transformer Engine")
host_runtime.enable(); host_runtime.enable()
assert not any("a kernel of Transformer Engine" in map(str, vars(module).values()) for module in optimizers)
assert torch.zeros(2, device="cuda").device.type == "cpu" and torch.ones(1).cuda().device.type == "cpu"
assert torch.empty(1, device=torch.device("cuda", 0)).device.type == "cpu"
assert torch.ones(1).to("cuda").device.type == torch.ones(1).to(device="cuda:1").device.type == "cpu"
assert torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu"
assert torch.ones(1).to(torch.int64).dtype == torch.ones(1).to(torch.ones(1, dtype=torch.int64)).dtype == torch.int64
assert torch.ones(1).type() == "torch.cuda.FloatTensor" and torch.ones(1).type(torch.int64).dtype == torch.int64
torch.cuda.manual_seed(3); a = torch.rand(2); torch.manual_seed(3)
assert torch.equal(a, torch.rand(2))
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
from megatron_ep.megatron.stand_ins import host_script
host_script.enable(); host_script.enable()
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
assert torch.cuda.memory_stats()["anything"] == torch.cuda.memory_allocated() == 0
"""
GPU_RUNTIME = """
import os, torch
import torch.distributed as dist
from megatron_ep.megatron.stand_ins import gpu_runtime
chosen, issued = [], []
torch.cuda.device_count, torch.cuda.set_device = lambda: 4, chosen.append
os.environ["LOCAL_RANK"] = "6"
gpu_runtime.enable()
assert chosen == [2]
assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
from megatron.core.distributed import param_and_grad_buffer
dist.all_reduce = lambda tensor, **_: issued.append(tensor)
with param_and_grad_buffer._coalescing_manager(None, async_ops=False):
    dist.all_reduce(torch.ones(1))
    assert issued, "held back until the context ends, to be merged with others"
"""
NOTHING = """
import torch, megatron_ep.megatron.stand_ins.host_runtime, megatron_ep.training.loop
assert torch.cuda.current_device.__module__ == "torch.cuda" and torch.ones(1).type() == "torch.FloatTensor"
"""


@pytest.mark.parametrize("program", [HOST_RUNTIME, GPU_RUNTIME, NOTHING], ids=["host", "gpu", "import"])
def test_what_is_replaced(program):
    done = rank_processes.run_one(["-c", program])
    assert done.returncode == 0, done.stderr[-2000:]

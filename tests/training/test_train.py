"""The parts of training that need no second process."""

import time
from pathlib import Path

import forks
import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ep.training import data, recipe
from megatron_ep.training.dispatch_timer import DispatchTimer

TINY = Path(__file__).parents[2] / "recipes" / "tiny_moe_cpu.yaml"
TEXT = "".join(f"{i} is a number; {i * i} is its square.\n" for i in range(2000))


def test_default_corpus_is_text_of_a_useful_size():
    text = b"".join(data.read_documents(None))
    assert len(text) > 300_000 and text.decode() and text.count(b" ") > 30_000


def test_tokenize_keeps_every_byte(tmp_path):
    source = tmp_path / "text.txt"
    source.write_bytes(TEXT.encode() + "naïve ☃\n".encode())
    corpus = data.tokenize(str(source), tmp_path / "cache")
    dataset = IndexedDataset(corpus.prefix)
    stored = np.concatenate([dataset[i] for i in range(len(dataset))])
    assert bytes(stored[:-1].astype(np.uint8)) == source.read_bytes() and stored[-1] == data.END_OF_DOCUMENT
    assert corpus.tokens == len(stored) and corpus.documents == 1
    counts = np.bincount(stored)
    assert corpus.unigram_entropy == pytest.approx(-sum(c / len(stored) * np.log(c / len(stored)) for c in counts if c))


def test_unigram_entropy_of_known_distributions():
    assert data.unigram_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(np.log(4))
    assert data.unigram_entropy(np.array([7, 0])) == 0


def test_cache_is_keyed_by_the_text(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text(TEXT)
    second.write_text(TEXT)
    corpus = data.tokenize(str(first), tmp_path / "cache")
    written = Path(corpus.prefix + ".bin").stat().st_mtime_ns
    assert data.tokenize(str(second), tmp_path / "cache") == corpus
    assert Path(corpus.prefix + ".bin").stat().st_mtime_ns == written
    second.write_text(TEXT + ".")
    assert data.tokenize(str(second), tmp_path / "cache").fingerprint != corpus.fingerprint


def test_tokenize_after_an_interrupted_one(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    corpus = data.tokenize(str(source), tmp_path / "cache")
    directory = Path(corpus.prefix).parent
    (directory / "corpus.json").unlink()
    Path(corpus.prefix + ".bin").write_bytes(b"half")
    assert data.tokenize(str(source), tmp_path / "cache") == corpus
    assert Path(corpus.prefix + ".bin").stat().st_size == 2 * corpus.tokens
    assert not list(directory.glob("*.tmp"))


@pytest.mark.parametrize("summary", ["{not JSON", "[]", '{"name": "a"}', "null"])
def test_a_cache_that_somebody_else_has_written(tmp_path, summary):
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    corpus = data.tokenize(str(source), tmp_path / "cache")
    Path(corpus.prefix).with_name("corpus.json").write_text(summary)
    with pytest.raises(ValueError, match=r"corpus\.json was not written by megatron-ep, remove it"):
        data.tokenize(str(source), tmp_path / "cache")


@pytest.mark.parametrize(("content", "word"), [(None, "No such file"), (" \n", "empty")])
def test_corpus_mistakes(tmp_path, content, word):
    source = tmp_path / "text.txt"
    if content is not None:
        source.write_text(content)
    with pytest.raises(ValueError, match=word):
        data.tokenize(str(source), tmp_path / "cache")


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_an_epoch_shows_every_sequence_once_in_an_order_that_no_rank_count_changes(tmp_path, micro_batch_size):
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    corpus = data.tokenize(str(source), tmp_path / "cache")

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
        data.Samples(recipe.load(TINY), data.tokenize(str(source), tmp_path), 0)


class _Slow(torch.autograd.Function):
    """Identity that takes a while in both directions and keeps account."""

    @staticmethod
    def forward(ctx, x, seconds, account):
        ctx.seconds, ctx.account = seconds, account
        _Slow._sleep(seconds, account)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _Slow._sleep(2 * ctx.seconds, ctx.account)
        return grad, None, None

    @staticmethod
    def _sleep(seconds, account):
        began = time.perf_counter()
        time.sleep(seconds)
        account.append(time.perf_counter() - began)


class _Dispatcher:
    def __init__(self, account):
        self.account = account

    def _step(self, x):
        return _Slow.apply(x, 0.005, self.account)

    def dispatch_preprocess(self, x, routing_map, probs):
        return self._step(x), probs

    def token_dispatch(self, x, probs):
        return self._step(x), probs

    def dispatch_postprocess(self, x, probs):
        return self._step(x), [1, 2], probs

    combine_preprocess = token_combine = combine_postprocess = _step


class _Layer(torch.nn.Module):
    def __init__(self, dispatching, computing):
        super().__init__()
        self.token_dispatcher, self.computing = _Dispatcher(dispatching), computing

    def forward(self, x, probs):
        dispatcher = self.token_dispatcher
        x, probs = dispatcher.dispatch_preprocess(_Slow.apply(x, 0.1, self.computing), None, probs)
        x, probs = dispatcher.token_dispatch(x, probs)
        x, _, probs = dispatcher.dispatch_postprocess(x, probs)
        x = _Slow.apply(x * probs, 0.1, self.computing)
        return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(x)))


@pytest.mark.parametrize("layers", [1, 2])
def test_dispatch_timer_counts_the_steps_and_nothing_else(layers):
    dispatching, computing = [], []
    model = torch.nn.ModuleList([_Layer(dispatching, computing) for _ in range(layers)])
    timer = DispatchTimer(model, "cpu")
    x, probs = torch.randn(4, 3, requires_grad=True), torch.rand(4, 1, requires_grad=True)
    y = x * 1
    for layer in model:
        y = layer(y, probs)
    assert len(dispatching) == 6 * layers
    assert sum(dispatching) <= timer.seconds < sum(dispatching) + sum(computing) / 2
    y.square().sum().backward()
    assert len(dispatching) == 12 * layers
    assert sum(dispatching) <= timer.seconds < sum(dispatching) + sum(computing) / 2
    torch.testing.assert_close(y, x * probs**layers)
    torch.testing.assert_close(x.grad, 2 * y * probs**layers)
    torch.testing.assert_close(probs.grad, (2 * y * x * layers * probs ** (layers - 1)).sum(1, keepdim=True))


HOST_RUNTIME = """
import importlib, os, re, sys, torch, types
kernels = sys.modules["transformer_engine.pytorch.optimizers"] = types.ModuleType("optimizers")
vars(kernels).update(dict.fromkeys(("FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm",
    "multi_tensor_scale", "multi_tensor_scale_tensor"), kernels))
from megatron_ep.megatron.stand_ins import host_runtime as h
modules = [torch, torch.Tensor, torch.cuda, *map(importlib.import_module, (
    "megatron.core.tensor_parallel.random", "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.token_dispatcher", "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer", "megatron.core.optimizer.distrib_optimizer", "megatron.core.optimizer.optimizer",
    "megatron.core.distributed", "megatron.core.pipeline_parallel.schedules"))]
before = [dict(vars(module)) for module in modules]
h.enable(); h.enable()
listed = " ".join(h.REPLACED)
changed = [name for module, old in zip(modules, before) for name, value in vars(module).items()
           if name not in old or old[name] is not value]
assert len(changed) > 10
for name in changed:
    assert re.search(rf"\\b{name}\\b", listed), f"{name} is replaced but not listed"
optimizers = [module for module in modules if module.__name__.startswith("megatron.core.optimizer")]
assert len(optimizers) == 4
assert not any(getattr(module, name, None) is kernels for module in optimizers for name in re.findall(r"\\w+", listed))
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
"""


def test_host_runtime_lists_what_it_replaces():
    done = forks.run_one(["-c", HOST_RUNTIME])
    assert done.returncode == 0, done.stderr[-2000:]


GPU_RUNTIME = """
import importlib, os, re, torch
import torch.distributed as dist
from megatron_ep.megatron.stand_ins import gpu_runtime as g
chosen = []
torch.cuda.device_count, torch.cuda.set_device = lambda: 4, chosen.append
modules = [torch.Tensor, torch.cuda, *map(importlib.import_module, (
    "torch._dynamo.config", "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.transformer.moe.moe_utils", "megatron.core.tensor_parallel.random"))]
before = [dict(vars(module)) for module in modules]
os.environ["LOCAL_RANK"] = "6"
g.enable()
assert chosen == [2]
listed = " ".join(g.REPLACED)
changed = [name for module, old in zip(modules, before) for name, value in vars(module).items()
           if name not in old or old[name] is not value]
assert "_coalescing_manager" in changed
for name in changed:
    assert re.search(rf"\\b{name}\\b", listed), f"{name} is replaced but not listed"
assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
issued = []
dist.all_reduce = lambda tensor, **_: issued.append(tensor)
with modules[3]._coalescing_manager(None, async_ops=False):
    dist.all_reduce(torch.ones(1))
    assert issued, "held back until the context ends, to be merged with others"
"""


def test_gpu_runtime_lists_what_it_replaces():
    done = forks.run_one(["-c", GPU_RUNTIME])
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_the_package_replaces_nothing():
    code = (
        "import torch, megatron_ep.megatron.stand_ins.host_runtime, megatron_ep.training.loop\n"
        "assert torch.cuda.current_device.__module__ == 'torch.cuda' and torch.ones(1).type() == 'torch.FloatTensor'"
    )
    done = forks.run_one(["-c", code])
    assert done.returncode == 0, done.stderr

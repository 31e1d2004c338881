"""Text to training samples: tokenized once into Megatron's IndexedDataset, sampled by Megatron's GPTDataset."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.text.libraries.bytelevel_tokenizer import ByteLevelTokenizer

from megatron_ep.meeting import codec
from megatron_ep.training.recipe import Recipe

DEFAULT_CORPUS = "pydoc_data.topics"  # the language reference as pydoc prints it: about 0.5 MB of English and Python
END_OF_DOCUMENT = 256  # the first id that is not a byte
SEQUENCE_BYTES = 1 << 20  # a document is stored in pieces of this size, so that a large file shuffles


class ByteTokenizer(ByteLevelTokenizer):
    """Megatron's byte-level tokenizer with one special token, the end of a document."""

    def __init__(self) -> None:
        super().__init__(vocab_size=END_OF_DOCUMENT + 1, _eos_id=END_OF_DOCUMENT, _pad_id=-1)
        self.unique_identifiers = {"class": type(self).__name__, "vocab_size": self.vocab_size}


@dataclass(frozen=True)
class Corpus:
    """A tokenized text.

    prefix: path of the IndexedDataset, without .bin and .idx.
    fingerprint: SHA-256 of text and tokenizer, hexadecimal.
    unigram_entropy: entropy of the token frequencies, nats a token: the loss of a model that knows only them.
    """

    name: str
    prefix: str
    fingerprint: str
    documents: int
    tokens: int
    unigram_entropy: float


def read_documents(path: str | None) -> Iterator[bytes]:
    """UTF-8 text, a document at a time: the file at `path`, or the corpus that ships with Python.

    Raises:
        ValueError: the file cannot be read or is empty, or this Python comes without the default corpus.
    """
    if path is not None:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"dataset.path {path}: {error.strerror}") from None
        if not text.strip():
            raise ValueError(f"dataset.path {path}: the file is empty")
        yield text
        return
    try:
        topics = importlib.import_module(DEFAULT_CORPUS).topics
    except ImportError:
        raise ValueError(
            f"dataset.path: this Python comes without the default corpus {DEFAULT_CORPUS}; name a file (--data FILE)"
        ) from None
    for name in sorted(topics):
        yield topics[name].encode()


def tokenize(path: str | None, cache_dir: Path) -> Corpus:
    """Tokenizes a text into `cache_dir`, or finds it there; the cache is keyed by what the text says, not by its name.

    Raises:
        ValueError: as `read_documents`; or cache_dir cannot be written.
    """
    documents = list(read_documents(path))
    digest = hashlib.sha256(b"byte\0")
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    fingerprint = digest.hexdigest()
    directory = cache_dir / f"byte-{fingerprint[:16]}"
    prefix, summary = str(directory / "text"), directory / "corpus.json"
    if summary.is_file():
        try:
            return replace(codec.decode(summary.read_bytes(), Corpus), prefix=prefix)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"dataset.cache_dir {cache_dir}: {summary} was not written by megatron-ep, remove it: {error}"
            ) from None

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"dataset.cache_dir {cache_dir}: {error.strerror}") from None
    counts = np.zeros(END_OF_DOCUMENT + 1, dtype=np.int64)
    with _replaced(get_bin_path(prefix)) as binary, _replaced(get_idx_path(prefix)) as index:
        builder = IndexedDatasetBuilder(binary, dtype=np.uint16)
        for document in documents:
            tokens = np.append(np.frombuffer(document, np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
            counts += np.bincount(tokens, minlength=len(counts))
            for start in range(0, len(tokens), SEQUENCE_BYTES):
                builder.add_item(torch.from_numpy(tokens[start : start + SEQUENCE_BYTES].astype(np.int64)))
            builder.end_document()
        builder.finalize(index)
    corpus = Corpus(
        name=DEFAULT_CORPUS if path is None else Path(path).name,
        prefix=prefix,
        fingerprint=fingerprint,
        documents=len(documents),
        tokens=int(counts.sum()),
        unigram_entropy=unigram_entropy(counts),
    )
    with _replaced(str(summary)) as temporary:
        Path(temporary).write_bytes(codec.encode(corpus))
    return corpus


def unigram_entropy(counts: np.ndarray) -> float:
    """Entropy of a histogram in nats: -sum p log p over p = counts / sum(counts), zero counts left out."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def prepare(recipe: Recipe) -> Corpus:
    """The recipe's corpus, on every rank: rank 0 tokenizes, the others wait, at most train.distributed_timeout seconds.

    Raises:
        ValueError: as `read_documents`; or this rank does not see rank 0's cache directory.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megatron_ep")
    cache_dir = Path(recipe.dataset.cache_dir or default).resolve()
    box = [tokenize(recipe.dataset.path, cache_dir) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(box, src=0)
    corpus = box[0]
    assert corpus is not None
    if not IndexedDataset.exists(corpus.prefix):
        raise ValueError(
            f"dataset.cache_dir {cache_dir}: rank 0 tokenized into it, but this rank does not see the files"
        )
    return corpus


class Samples:
    """Batches as a function of the step alone: the same for every run length and dispatcher, and after a resume.

    Epoch e is Megatron's GPTDataset over the whole corpus, shuffled with seed + e; its last, incomplete global batch is
    left out.

    Raises:
        ValueError: the corpus has fewer tokens than a global batch.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, rank: int) -> None:
        sequences = (corpus.tokens - 1) // recipe.dataset.seq_length
        self.steps_per_epoch = sequences // recipe.train.global_batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"dataset.path: the corpus {corpus.name} has {corpus.tokens} tokens, a global batch needs "
                f"{recipe.train.global_batch_size} x {recipe.dataset.seq_length} + 1"
            )
        self._recipe, self._rank = recipe, rank
        self._indexed = IndexedDataset(corpus.prefix)
        self._epoch, self._dataset = -1, None

    def batch(self, step: int, microbatch: int) -> dict[str, torch.Tensor]:
        """tokens, labels [B, S] int64 and loss_mask [B, S] fp32 for this rank; B micro_batch_size, S seq_length.

        With dataset.packed also cu_seqlens, int32 [documents + 1]: where they begin, and the end of the last.
        """
        train = self._recipe.train
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._dataset = epoch, self._shuffled(epoch)
        assert self._dataset is not None
        place = microbatch * self._recipe.topology.world_size + self._rank
        first = step_in_epoch * train.global_batch_size + place * train.micro_batch_size
        rows = [self._dataset[first + offset] for offset in range(train.micro_batch_size)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "labels", "loss_mask")}
        if self._recipe.dataset.packed:
            batch["cu_seqlens"] = document_bounds(batch["tokens"][0])
        return batch

    def _shuffled(self, epoch: int) -> GPTDataset:
        config = GPTDatasetConfig(
            random_seed=self._recipe.train.seed + epoch,
            sequence_length=self._recipe.dataset.seq_length,
            blend=([self._indexed.path_prefix], None),
            split="1,0,0",
            path_to_cache="",  # indices stay in memory: files that a killed run half wrote would spoil the next run
            tokenizer=ByteTokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        documents = np.arange(len(self._indexed), dtype=np.int32)
        return GPTDataset(self._indexed, self._indexed.path_prefix, documents, None, Split.train, config)


def document_bounds(tokens: torch.Tensor) -> torch.Tensor:
    """int32 [documents + 1]: an end-of-document token is the last of its document."""
    ends = (tokens == END_OF_DOCUMENT).nonzero()[:, 0] + 1
    bounds = [0, *ends.tolist(), len(tokens)]
    return torch.tensor(bounds if len(bounds) < 3 or bounds[-1] != bounds[-2] else bounds[:-1], dtype=torch.int32)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[str]:
    """A path to write to; the file appears under `path` whole or, when writing fails, not at all."""
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)

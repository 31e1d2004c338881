"""Training samples from text: bytes, with an end token after each document, in batches that depend only on the step."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_ep.training.recipe import Recipe

DEFAULT_CORPUS = "pydoc_data.topics"  # the language reference as pydoc prints it: about 0.5 MB of English and Python
END_OF_DOCUMENT = 256  # the first id that is not a byte
VOCAB_SIZE = END_OF_DOCUMENT + 1


@dataclass(frozen=True)
class Corpus:
    """The tokens of a text.

    tokens: uint16 [N].
    fingerprint: SHA-256 of the tokens, hexadecimal.
    unigram_entropy: entropy of the token frequencies in nats per token: the loss of a model that knows only them.
    """

    name: str
    tokens: np.ndarray
    documents: int
    fingerprint: str
    unigram_entropy: float


def read(path: str | None) -> Corpus:
    """Reads a UTF-8 file, or with None the corpus that ships with Python.

    Raises ValueError if the file cannot be read or is empty, or if this Python has no default corpus.
    """
    parts = [np.append(np.frombuffer(text, np.uint8), np.uint16(END_OF_DOCUMENT)) for text in _documents(path)]
    tokens = np.concatenate(parts)
    return Corpus(
        name=DEFAULT_CORPUS if path is None else Path(path).name,
        tokens=tokens,
        documents=len(parts),
        fingerprint=hashlib.sha256(tokens.tobytes()).hexdigest(),
        unigram_entropy=unigram_entropy(np.bincount(tokens)),
    )


def _documents(path: str | None) -> Iterator[bytes]:
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


def unigram_entropy(counts: np.ndarray) -> float:
    """Returns the entropy of a histogram in nats: -sum p log p with p = counts / sum(counts), omitting zero counts."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def prepare(recipe: Recipe) -> Corpus:
    """Returns the recipe's corpus, which every rank reads. Collective.

    Raises ValueError on all ranks as `read` does, or if ranks have read different texts.
    """
    corpus, fault = None, ""
    try:
        corpus = read(recipe.dataset.path)
    except ValueError as error:
        fault = str(error)
    everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (fault, corpus.fingerprint if corpus else ""))
    for rank, (wrong, fingerprint) in enumerate(everyone):
        if wrong:
            raise ValueError(wrong)
        if fingerprint != everyone[0][1]:
            raise ValueError(f"dataset.path {recipe.dataset.path}: rank {rank} reads another text than rank 0")
    assert corpus is not None
    return corpus


class Samples:
    """Batches that depend only on the step: equal for every run length and dispatcher, and after a resume.

    Each epoch has all sequences of the corpus in an order by seed and epoch, without an incomplete last global batch.

    Raises ValueError if the corpus has fewer tokens than a global batch.
    """

    def __init__(self, recipe: Recipe, corpus: Corpus, rank: int) -> None:
        self._sequences = (len(corpus.tokens) - 1) // recipe.dataset.seq_length
        self.steps_per_epoch = self._sequences // recipe.train.global_batch_size
        if self.steps_per_epoch == 0:
            raise ValueError(
                f"dataset.path: the corpus {corpus.name} has {len(corpus.tokens)} tokens, a global batch needs "
                f"{recipe.train.global_batch_size} x {recipe.dataset.seq_length} + 1"
            )
        self._recipe, self._tokens, self._rank = recipe, corpus.tokens, rank
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def batch(self, step: int, microbatch: int) -> dict[str, torch.Tensor]:
        """Returns tokens, labels [B, S] int64 and loss_mask [B, S] fp32 of this rank; B micro_batch_size, S seq_length.

        With dataset.packed also cu_seqlens, int32 [documents + 1]: the start of each, and the end of the last.
        """
        train, length = self._recipe.train, self._recipe.dataset.seq_length
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((train.seed, epoch)).permutation(self._sequences)
        place = microbatch * self._recipe.topology.world_size + self._rank
        first = step_in_epoch * train.global_batch_size + place * train.micro_batch_size
        starts = length * self._order[first : first + train.micro_batch_size]
        rows = torch.from_numpy(self._tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))
        batch = {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
        batch["loss_mask"] = torch.ones(batch["tokens"].shape)
        if self._recipe.dataset.packed:
            batch["cu_seqlens"] = document_bounds(batch["tokens"][0])
        return batch


def document_bounds(tokens: torch.Tensor) -> torch.Tensor:
    """Returns int32 [documents + 1], the bounds of documents, each of which ends with an end-of-document token."""
    ends = (tokens == END_OF_DOCUMENT).nonzero()[:, 0] + 1
    bounds = [0, *ends.tolist(), len(tokens)]
    return torch.tensor(bounds if len(bounds) < 3 or bounds[-1] != bounds[-2] else bounds[:-1], dtype=torch.int32)

"""The output of a run: lines about its steps, and loss.csv. Only rank 0 writes it."""

from __future__ import annotations

import contextlib
import csv
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_ep.training.data import Corpus
from megatron_ep.training.recipe import Recipe

LAST = 10  # number of steps that the summary averages


@dataclass(frozen=True)
class Row:
    """A line of loss.csv.

    step: number from 1. loss: mean cross-entropy of the global batch, nats per token. tokens_per_second: of all ranks
    together. lr: learning rate of this step. grad_norm: norm before clipping. seconds: duration of the step.
    memory_gib: peak memory of rank 0 so far: allocated by torch on a GPU, resident on the host.
    """

    step: int
    loss: float
    tokens_per_second: float
    lr: float
    grad_norm: float
    seconds: float
    memory_gib: float


class TrainLog:
    """The log of a run, a context manager around its steps. Call `write` after each step, and `finish` at the end.

    out: directory for loss.csv, created if necessary.
    first_step: number of steps already done; rows of loss.csv up to it are kept, later ones removed.
    """

    def __init__(self, out: Path, recipe: Recipe, corpus: Corpus, parameters: int, first_step: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._recipe, self._corpus = out, recipe, corpus
        self._rows = [row for row in _read(out / "loss.csv") if row.step <= first_step] if first_step else []
        self._file = open(out / "loss.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115, closed in __exit__
        self._csv = csv.DictWriter(self._file, [field.name for field in fields(Row)])
        self._csv.writeheader()
        self._csv.writerows(asdict(row) for row in self._rows)
        self._header(parameters, first_step)

    def __enter__(self) -> TrainLog:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # `write` has raised it already
            self._file.close()

    def write(self, row: Row, slowest: Callable[[], str]) -> None:
        """Writes a step to the file and, every log_interval steps, the screen. slowest: returns a text about the peer
        that this rank waited for longest, for the screen."""
        self._rows.append(row)
        try:
            self._csv.writerow(asdict(row))
            self._file.flush()
        except OSError as error:  # errors of writes have no path
            raise OSError(error.errno, error.strerror, str(self._out / "loss.csv")) from None
        if row.step % self._recipe.logger.log_interval == 0:
            print(
                f"step {row.step}/{self._recipe.train.train_iters}  loss {row.loss:.4f}  {row.tokens_per_second:,.0f} "
                f"tokens/s  {row.memory_gib:.1f} GiB  lr {row.lr:.2e}{slowest()}",
                flush=True,
            )

    def finish(self) -> None:
        """Prints the summary."""
        last = self._rows[-LAST:]
        loss = statistics.fmean(row.loss for row in last)
        speed = statistics.median(row.tokens_per_second for row in self._rows)
        print(
            f"loss {loss:.4f} (mean of the last {len(last)} steps), unigram entropy {self._corpus.unigram_entropy:.4f} "
            f"nats a token\n{speed:,.0f} tokens/s (median)\nwrote {self._out / 'loss.csv'}"
        )

    def _header(self, parameters: int, first_step: int) -> None:
        recipe, model, corpus = self._recipe, self._recipe.model, self._corpus
        nodes, ranks = recipe.topology.nodes, recipe.topology.ranks_per_node
        tokens = recipe.train.global_batch_size * recipe.dataset.seq_length
        print(
            f"{nodes} x {ranks} ranks on {recipe.train.device}, dispatcher {recipe.dispatcher.type}\n"
            f"model: {model.num_layers} layers, hidden {model.hidden_size}, {model.num_moe_experts} experts, "
            f"top-{model.moe_router_topk}, {parameters:,} parameters\n"
            f"corpus: {corpus.name}, {corpus.documents} documents, {len(corpus.tokens):,} tokens, "
            f"unigram entropy {corpus.unigram_entropy:.4f} nats a token\n"
            f"{tokens:,} tokens a step" + (f", resumed after step {first_step}" if first_step else ""),
            flush=True,
        )


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if None not in line.values()]  # the last may be incomplete
    names = [field.name for field in fields(Row) if field.name != "step"]
    # Files of earlier versions have fewer columns.
    return [Row(int(line["step"]), **{name: float(line.get(name, "nan")) for name in names}) for line in lines]

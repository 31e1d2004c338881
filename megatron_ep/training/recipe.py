"""Recipes: a YAML file with the model, the training, the data and the topology.

A recipe has the sections of Megatron-Bridge (model, train, optimizer, scheduler, ddp, dataset, tokenizer, checkpoint,
logger), topology and dispatcher: `megatron_ep.training.sections`. All values are checked on loading, before any process
starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, model_validator

from megatron_ep.config import nearest_name
from megatron_ep.training.sections import (
    Checkpoint,
    Dataset,
    Ddp,
    Dispatcher,
    Logger,
    Model,
    Optimizer,
    Scheduler,
    Section,
    Tokenizer,
    Topology,
    Train,
    require,
)


class Recipe(Section):
    """A whole recipe. `load` reads one from a file."""

    topology: Topology
    model: Model
    train: Train
    optimizer: Optimizer
    scheduler: Scheduler
    ddp: Ddp = Ddp()
    dataset: Dataset
    tokenizer: Tokenizer = Tokenizer()
    checkpoint: Checkpoint = Checkpoint()
    logger: Logger = Logger()
    dispatcher: Dispatcher = Dispatcher()

    @model_validator(mode="after")
    def _relations(self) -> Recipe:
        world, experts = self.topology.world_size, self.model.num_moe_experts
        shape = f"topology {self.topology.nodes} x {self.topology.ranks_per_node}"
        require(
            experts % world == 0, f"model.num_moe_experts {experts} is not a multiple of the {world} ranks, {shape}"
        )
        step = world * self.train.micro_batch_size
        require(
            self.train.global_batch_size % step == 0,
            f"train.global_batch_size {self.train.global_batch_size} is not a multiple of train.micro_batch_size "
            f"{self.train.micro_batch_size} x {world} ranks",
        )
        require(
            self.train.device == "cpu" or not self.ddp.overlap_grad_reduce,
            "ddp.overlap_grad_reduce is true, must be false with train.device cuda: gloo cannot do it on a GPU",
        )
        require(
            not self.dataset.packed or self.train.micro_batch_size == 1,
            f"dataset.packed is true, train.micro_batch_size must be 1 then and is {self.train.micro_batch_size}",
        )
        require(
            not self.dispatcher.sequences or self.dataset.packed,
            "dispatcher.sequences is true, dataset.packed must be, too",
        )
        require(
            self.dispatcher.type != "allgather" or not self.model.moe_shared_expert_overlap,
            "model.moe_shared_expert_overlap is true, must be false with dispatcher.type allgather",
        )
        factor = self.dispatcher.moe_expert_rank_capacity_factor
        require(  # Megatron's experts read their counts on the host if a rank has several
            factor is None or self.dispatcher.type != "ep" or experts == world,
            f"dispatcher.moe_expert_rank_capacity_factor is {factor}, which needs one expert a rank, but "
            f"model.num_moe_experts is {experts} and the ranks are {world}, {shape}",
        )
        return self


RECIPES = Path(__file__).parents[1] / "recipes"


def find(name: str | Path) -> Path:
    """Returns the path of a recipe: the file `name`, else a recipe of megatron_ep with that name (`tiny_moe_cpu`)."""
    own = RECIPES / f"{name}.yaml"
    return own if own.is_file() and not Path(name).exists() else Path(name)


def read(path: str | Path) -> dict[str, Any]:
    """Returns the unchecked sections of a file. Raises ValueError if it cannot be read, or is no YAML of sections."""
    try:
        tree = yaml.load(find(path).read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        names = ", ".join(sorted(file.stem for file in RECIPES.glob("*.yaml")))
        raise ValueError(f"recipe {path}: No such file, and none of {names}") from None
    except OSError as error:
        raise ValueError(f"recipe {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"recipe {path}: expected sections ({', '.join(Recipe.model_fields)})")
    return tree


def load(path: str | Path, overrides: Iterable[str] = (), schema: Any = Recipe) -> Any:
    """Reads and checks a recipe.

    path: a YAML file, or the name of a recipe of megatron_ep (`tiny_moe_cpu`).
    overrides: "section.key=value" strings, with values in YAML, applied in order before the check.
    schema: class that it is checked against and returned as.

    Raises ValueError if the file cannot be read, is not YAML, or a key or value is wrong, with a line per fault.
    """
    tree = read(path)
    for override in overrides:
        _apply(tree, override)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        faults = [f"  {_explain(fault, schema)}" for fault in error.errors()]
        raise ValueError("\n".join([f"recipe {path}:", *faults])) from None


class _Loader(yaml.SafeLoader):
    """A loader for which 1e-4 is a number (YAML 1.1 requires 1.0e-4), and a repeated key an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"{key} is no name", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789")


def _apply(tree: dict, override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"--set {override}: expected section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {override}: the value is not YAML: {error}") from None
    *sections, key = name.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ValueError(f"--set {override}: {section} is not a section")
    tree[key] = value


def _explain(fault: Any, schema: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    where = ".".join(path)
    if fault["type"] == "extra_forbidden":
        section = schema
        for part in path[:-1]:
            section = section.model_fields[part].annotation
        known = list(section.model_fields)
        return f"{where}: unknown key{nearest_name(path[-1], known) or '; known keys: ' + ', '.join(known)}"
    if fault["type"] == "missing":
        return f"{where}: missing"
    if fault["type"] == "value_error":  # `require` raised it for a relation between values
        return f"{where + ': ' if where else ''}{fault['ctx']['error']}"
    return f"{where}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {fault['input']!r}"

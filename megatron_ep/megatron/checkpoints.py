"""Checkpoints that recompute activations: which run their function around a call, and in which of its two passes.

Only checkpoints that are known to run the whole function again, from its start, count: those of Megatron and
Transformer Engine, and both of torch's. They are found on the Python stack by the code of their functions. Each has an
object that is the same in both passes and lives as long as a replay may come.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch.autograd.function import BackwardCFunction

# Autograd functions whose forward pass runs `run_function`, and whose backward pass runs it again first of all.
FUNCTIONS = (
    ("megatron.core.tensor_parallel.random", "CheckpointFunction"),
    ("transformer_engine.pytorch.distributed", "_CheckpointFunction"),
    ("torch.utils.checkpoint", "CheckpointFunction"),
)


@dataclass(frozen=True)
class Replay:
    """A replay that is running.

    checkpoint: the object that its forward pass had, too. function: the function that runs again, None if not known.
    run: equal in one replay and in no two replays of a checkpoint.
    """

    checkpoint: Any
    function: Callable[..., Any] | None
    run: Any

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def is_of_layer(self, dispatcher: Any) -> bool:
        """Returns whether Megatron's layer with this dispatcher replays only itself, so that nobody reads its sum."""
        code = getattr(self.function, "__code__", None)
        if code is None or code not in inspect.unwrap(MoELayer.forward).__code__.co_consts:
            return False
        return getattr(_variable_of(self.function, "self"), "token_dispatcher", None) is dispatcher


def _variable_of(function: Any, name: str) -> Any:
    """Returns a variable of the function around a nested one; None if there is none."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents if name in cells else None


@functools.cache
def _known() -> dict[int, tuple[str, CodeType]]:
    """Returns what a frame with a code of this id is, and the code, which thereby lives: the "forward" or "backward"
    pass of a known function, torch's "checkpoint" or its "unpack" hook, or the "end" of what an engine runs."""
    codes: dict[Any, str] = {}
    for module, name in FUNCTIONS:
        function = getattr(sys.modules.get(module), name, None)
        if getattr(function, "__module__", None) == module:  # not another one that has been put in its place
            codes |= {function.forward: "forward", function.backward: "backward"}  # type: ignore[union-attr]
    for part in ("checkpoint", "_checkpoint_impl"):  # the latter from torch 2.14 on
        codes[getattr(torch_checkpoint, part, None)] = "checkpoint"
    for part in ("apply", "apply_boxed"):
        codes[getattr(BackwardCFunction, part, None)] = "end"
    codes[getattr(torch.autograd.graph, "_engine_run_backward", None)] = "end"
    found = [(kind, getattr(inspect.unwrap(own), "__code__", None)) for own, kind in codes.items() if own is not None]
    hook = getattr(torch_checkpoint, "_checkpoint_hook", None)
    nested = () if hook is None else hook.__init__.__code__.co_consts
    found += [("unpack", code) for code in nested if getattr(code, "co_name", None) == "unpack_hook"]
    return {id(code): (kind, code) for kind, code in found if code is not None}


def surroundings() -> tuple[list[Any], Replay | None]:
    """Returns the checkpoints in whose forward pass this is, the innermost first, and the replay around these, if any.

    The search ends where an autograd engine has called Python: what is further out has only called the engine.
    """
    forward: list[Any] = []
    if _is_plain():
        return forward, None
    known = _known()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind, _ = known.get(id(frame.f_code), (None, None))
        if kind == "end":
            break
        if kind is not None:
            local = frame.f_locals
            if kind == "backward":
                ctx = local[frame.f_code.co_varnames[0]]
                return forward, Replay(ctx, getattr(ctx, "run_function", None), torch._C._current_graph_task_id())
            if kind == "unpack":
                checkpoint = local["frame"]
                return forward, Replay(checkpoint, _variable_of(checkpoint.recompute_fn, "fn"), local["gid"])
            checkpoint = local[frame.f_code.co_varnames[0]] if kind == "forward" else _frame_of(local.get("gen"))
            if checkpoint is not None:
                forward.append(checkpoint)
        frame = frame.f_back
    return forward, None


def _is_plain() -> bool:
    """Returns whether this is surely in no checkpoint: that needs no look at the stack."""
    if torch.is_inference_mode_enabled():
        return True
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return False
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks is not None and hooks(False) is None


def _frame_of(context: Iterator[Any] | None) -> Any:
    """Returns the object of torch's checkpoint without reentrant autograd, which hooks of its forward pass share."""
    frame = getattr(context, "gi_frame", None)
    return None if frame is None else frame.f_locals.get("new_frame")

"""Recompute of activations: a checkpoint runs a function in the forward pass and again in the backward pass. The second
run, a replay, takes the layouts of the first: every token goes to the experts that made the output, even if the router,
whose input is computed again, would choose others near a tie.

A pass of a layer is identified by the checkpoint (`checkpoints.py`) and by the number of passes before it in this run.
All ranks decide alike, because they run the same program. Other functions that call a layer again get a dispatch of
their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import megatron_ep as ep
from megatron_ep.megatron.checkpoints import Replay, surroundings
from megatron_ep.normal.autograd import CombineFunction, WeightedCombineFunction


@dataclass
class Layout:
    """Layout of a pass that may be replayed.

    topk_idx: int64 [T, K], the experts to which tokens go. choice: what the router chose, before it dropped tokens over
        capacity; None if it cannot be given that again. handles: by chunk of the layer, once the pass has dispatched.
    """

    topk_idx: torch.Tensor
    choice: torch.Tensor | None = None
    handles: dict[int, ep.Handle] = field(default_factory=dict)


@dataclass
class _Passes:
    """Passes of a layer inside a checkpoint's function. run: the latest replay; done: its passes so far."""

    layouts: list[Layout] = field(default_factory=list)
    run: Any = None
    done: int = 0


class Replays:
    """The layouts of a layer's passes whose replay may come."""

    def __init__(self) -> None:
        self._passes: WeakKeyDictionary[Any, _Passes] = WeakKeyDictionary()

    def coming(self, num_tokens: int) -> Choice | None:
        """Returns the choice for the router of the next pass, of T tokens; None outside of checkpoints. Raises as
        `next`."""
        forward, replay = surroundings()
        layout = self._find(replay, num_tokens)
        return Choice(None if layout is None else layout.choice) if forward or layout is not None else None

    def next(self, topk_idx: torch.Tensor, choice: torch.Tensor | None) -> tuple[Layout | None, Replay | None]:
        """Begins a pass with these experts [T, K], of which the router chose `choice`.

        Returns the layout of the pass that it replays, and that replay; a new layout and None in a checkpoint's forward
        pass; None and None elsewhere.

        Raises ValueError if the checkpoint's function does not call the layer as it did in the forward pass.
        """
        forward, replay = surroundings()
        layout = self._find(replay, topk_idx.shape[0])
        if layout is None:
            replay = None
            layout = Layout(topk_idx, choice) if forward else None
        else:
            assert replay is not None, "it has found the layout"
            self._passes[replay.checkpoint].done += 1
        for checkpoint in forward:  # those around this one's, and those inside of the one that is replayed
            assert layout is not None, "there is a checkpoint"
            self._passes.setdefault(checkpoint, _Passes()).layouts.append(layout)
        return layout, replay

    def _find(self, replay: Replay | None, num_tokens: int) -> Layout | None:
        passes = None if replay is None else self._passes.get(replay.checkpoint)
        if replay is None or passes is None:
            return None
        if passes.run != replay.run:
            passes.run, passes.done = replay.run, 0
        before = len(passes.layouts)
        if passes.done == before:
            raise _other_run(replay, f"calls a MoE layer more than {before} times, as often as its forward pass")
        layout = passes.layouts[passes.done]
        then = layout.topk_idx.shape[0]
        if then != num_tokens:
            raise _other_run(replay, f"passes {num_tokens} tokens to a MoE layer, its forward pass passed {then}")
        return layout


def _other_run(replay: Replay, does: str) -> ValueError:
    return ValueError(f"the recomputation of {replay.name} {does}; a function in a checkpoint must do the same twice")


# ---- the choice of the forward pass


class Choice:
    """A router's choice in a checkpoint, int64 [T, K]: None until the forward pass has made it; given in a replay.

    Stands in for Megatron's RouterReplay. Saves no tensor for the backward pass, because torch's checkpoint without
    reentrant autograd wants both runs to save the same tensors.
    """

    def __init__(self, topk_idx: torch.Tensor | None) -> None:
        self.topk_idx = topk_idx

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scores [T, K] and ids [T, K] of the experts to which scores [T, E] lead, or led."""
        if self.topk_idx is None:
            assert default_compute_topk is not None, "Megatron's router passes it"
            with torch.no_grad():
                self.topk_idx = default_compute_topk(scores, topk, num_groups, group_topk)[1]
        return _Gather.apply(scores, self.topk_idx, None), self.topk_idx


class _Gather(Function):
    """Gathers columns `place` [T, K], int64 and distinct in a row, and sets what `missing` [T, K] marks to 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, place: torch.Tensor, missing: torch.Tensor | None) -> torch.Tensor:
        ctx.shape, ctx.place = x.shape, place
        if missing is None:
            return x.gather(1, place)
        ctx.place = place.masked_fill(missing, x.shape[1])  # a column of its own, where the order does not matter
        return x.gather(1, place).masked_fill_(missing, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, columns = ctx.shape
        return grad.new_zeros(rows, columns + 1).scatter_(1, ctx.place, grad)[:, :columns], None, None


def give_choices(router: torch.nn.Module, begin: Callable[[int], Choice | None]) -> None:
    """Lets Megatron's router make or take the choice that `begin` returns for a pass of T tokens."""

    def give(router: Any, args: tuple[Any, ...]) -> None:
        choice = begin(args[0].shape[:-1].numel())
        if choice is not None:
            router.router_replay = choice

    def take_back(router: Any, *_: Any) -> None:
        if isinstance(router.router_replay, Choice):
            router.router_replay = None

    router.register_forward_pre_hook(give)
    router.register_forward_hook(take_back, always_call=True)


def weights_of(
    topk_idx: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights [T, K] of experts topk_idx [T, K] among those of the experts chosen, in any order, 0 for one
    that is not among them; and bool [T, K], which are not. -1 is no expert."""
    is_same = topk_idx.unsqueeze(2) == chosen.unsqueeze(1)
    is_expert = topk_idx >= 0
    missing = ~(is_same.any(dim=2) & is_expert)
    return _Gather.apply(weights, is_same.byte().argmax(dim=2), missing), missing & is_expert


class LostChoices:
    """Warns once, with their number so far, of choices of a forward pass that a replay's router has not made."""

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._read: tuple[torch.Tensor, torch.cuda.Event] | None = None  # a copy on its way to the host
        self._has_warned = False

    def note(self, lost: torch.Tensor) -> None:
        """Notes bool [T, K] of a replay. The host does not wait for a GPU, and so learns of it at a later replay."""
        if self._has_warned:
            return
        if not lost.is_cuda:
            self._warn(int(lost.sum()))
        elif not torch.cuda.is_current_stream_capturing():
            self._total = lost.sum() if self._total is None else self._total + lost.sum()
            if self._read is None:
                self._read = self._total.to("cpu", non_blocking=True), torch.cuda.current_stream().record_event()
            elif self._read[1].query():
                self._warn(int(self._read[0]))
                self._read = None

    def _warn(self, number: int) -> None:
        if number:
            self._has_warned = True
            warnings.warn(
                f"{number} choices of experts differ between a forward pass and its recomputation: these experts are "
                "treated as if their weight were 0 in the gradients (docs/megatron.md, Recompute; told once per layer)",
                stacklevel=2,
            )


def unread_combine(
    x: torch.Tensor, handle: ep.Handle, weights: torch.Tensor | None, *, backward_dtype: torch.dtype | None
) -> torch.Tensor:
    """Returns zeros [T, H] with the backward pass of `megatron_ep.combine`."""

    def nothing(rows: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor]:
        return (rows.new_zeros(()).expand(handle.ranks[0].num_tokens, rows.shape[1]),)

    if weights is None:
        return CombineFunction.apply(handle, nothing, backward_dtype, x)[0]
    return WeightedCombineFunction.apply(handle, nothing, x, weights)[0]

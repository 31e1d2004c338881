"""One `megatron_ep.Buffer` for all layers that exchange tokens over the same process group.

The MoE layers of a model dispatch in sequence, so that they can share the rings and the symmetric heap.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.buffer.buffer import buffer_of
from megatron_ep.buffer.distributed import group_of
from megatron_ep.config import SETTING_NAMES, Config, nearest_name
from megatron_ep.diagnosis import failures
from megatron_ep.meeting.place import is_known, place_of
from megatron_ep.meeting.rendezvous import StoreRendezvous
from megatron_ep.megatron import options

_topology: ep.Topology | None = None
_config: dict[str, Any] = {}
_options = options.Options()
_buffers: dict[tuple[dist.ProcessGroup, int, torch.device], ep.Buffer] = {}
_users: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_expected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_closed_seconds = 0.0


def configure(topology: ep.Topology | None = None, **settings: Any) -> None:
    """Sets the settings of buffers created later and the options of layers built later.

    Every rank calls it with the same arguments. Arguments that are not given return to their defaults.

    topology: how the ranks of one group form nodes. None: by MEGATRON_EP_RANKS_PER_NODE, or the ranks of a host (or of
        an NVLink domain of several hosts) form a node.
    settings: fields of `megatron_ep.Config` other than num_experts, which comes from the model, and of
        `options.Options`.

    Raises ValueError for an unknown name, or a setting or option out of range; RuntimeError if buffers are already in
    use: call it before the first forward pass or after `close_buffers`.
    """
    global _topology, _config, _options
    allowed = sorted({*SETTING_NAMES, "tuning", *options.NAMES})
    unknown = sorted(set(settings) - set(allowed))
    if unknown:
        meant = nearest_name(unknown[0], allowed)
        raise ValueError(f"configure has no setting {unknown[0]}{meant}; allowed: topology, {', '.join(allowed)}")
    if _buffers:
        raise RuntimeError(
            "configure: buffers are already in use; call it before the first forward pass or after close_buffers()"
        )
    chosen = options.Options(**{name: settings.pop(name) for name in options.NAMES if name in settings})
    Config(1, **settings)  # raises the errors that the first layer's buffer would raise
    _options = chosen
    _topology, _config = topology, settings


def options_for(config: Any) -> options.Options:
    """Returns the options of a layer with this TransformerConfig: those of `configure`, and the config's fields of the
    same names.

    Raises ValueError if the two contradict each other, or the config's value is not supported.
    """
    chosen = {}
    for field in dataclasses.fields(_options):
        name = field.name
        ours, theirs = getattr(_options, name), getattr(config, name, None)
        if theirs is None or theirs is False or theirs == "bf16":  # Megatron's defaults
            chosen[name] = ours
        elif ours in (field.default, theirs):
            chosen[name] = theirs
        else:
            raise ValueError(f"{name} is {ours!r} for the dispatcher and {theirs!r} in Megatron's config: give one")
    return options.Options(**chosen)


def use(group: dist.ProcessGroup, user: Any) -> None:
    """Records that a user, a part of a layer, exchanges tokens over the group as long as it lives."""
    if group in _users or group in _groups_of_megatron():
        _users.setdefault(group, weakref.WeakSet()).add(user)


def expect(group: dist.ProcessGroup, user: Any) -> None:
    """Records as `use` that a layer of this process will exchange tokens over the group. If the process ends before the
    first buffer is created, or fails inside `abort_peers_on_error`, the set-up of the buffer fails on the other
    ranks."""
    use(group, user)
    if group not in _expected and is_known(group) is not None:
        _expected.add(group)
        place_of(group).publish()


def shared_buffer(
    group: dist.ProcessGroup, num_experts: int, device: torch.device, settings: Mapping[str, Any] | None = None
) -> ep.Buffer:
    """Returns the buffer of this group. The first call creates it and is therefore collective over the group.

    group: the ranks that exchange tokens.
    num_experts: E in the whole group; a multiple of its size.
    device: the device of this rank's tokens.
    settings: settings of the `Config` of a new buffer; those of `configure` take precedence.

    Raises ValueError as `megatron_ep.Buffer` does.
    """
    buffer = _buffers.get((group, num_experts, device))
    if buffer is None:
        config = Config(num_experts, **{**(settings or {}), **_config})
        _close_those_gone()
        with torch.inference_mode(False):  # the buffer outlives inference mode
            ranks = group_of(group, config, _topology, device, f"{StoreRendezvous.of_what} in the first MoE layer")
            buffer = buffer_of(ranks)
        _buffers[group, num_experts, device] = buffer
    return buffer


@contextlib.contextmanager
def abort_peers_on_error(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Ends the waits of the other ranks of a group (None: of all groups) in its buffers if the block raises, and in the
    set-up of its first buffer if it has none yet."""
    begun = {own: place_of(own).begun for own in _expected if group is None or own is group}
    try:
        yield
    except BaseException as error:
        for (own, *_), buffer in _buffers.items():
            if group is None or own is group:
                rank_group_of(buffer).abort_peers(error)
        met = {own for own, *_ in _buffers}
        for own in [own for own in _expected if (group is None or own is group) and own not in met]:
            place = place_of(own)
            if not isinstance(error, ep.EPError) and place.begun == begun.get(own, 0):  # otherwise the other ranks know
                place.publish(f"rank {place.rank} failed before it set up a buffer: {type(error).__name__}: {error}")
        raise


def comm_seconds() -> float:
    """Returns the seconds that this process has spent in dispatch and combine of all layers, forward and backward."""
    return _closed_seconds + sum(rank_group_of(buffer).seconds for buffer in _buffers.values())


def wait_ns() -> torch.Tensor | None:
    """Returns the nanoseconds that this rank waited for each rank in open buffers of all ranks, int64 [ranks] on the
    CPU, see `Buffer.statistics`; None before the first is created."""
    buffers = [buffer for buffer in _buffers.values() if buffer.topology.world_size == dist.get_world_size()]
    counts = [buffer.statistics()["wait_ns"][0] for buffer in buffers]
    return torch.stack(counts).sum(dim=0) if counts else None


def close_buffers() -> None:
    """Closes every shared buffer. The next forward pass creates new ones.

    Call it before destroying the groups, or on every rank after an `EPError`, to continue.

    Raises EPError, after all are closed, if a call has failed and no call has raised it.
    """
    _end(ep.Buffer.close, list(_buffers))


def release_buffers() -> None:
    """Frees the memory of every shared buffer, as `megatron_ep.Buffer.release` does, so that other programs can use the
    GPU, for example when training and inference alternate. The next forward pass builds new buffers.

    Collective: all ranks of all groups call it, between two steps and with their CUDA graphs deleted.

    Raises ValueError as `Buffer.release` does: that buffer and those created before it stay open. Raises EPError, after
    all are closed, if a rank did not come or a call has failed and no call has raised it.
    """
    _end(ep.Buffer.release, list(_buffers))


def _close_those_gone() -> None:
    """Closes the buffers of groups that Megatron has replaced and of which no layer is left: torch keeps groups as long
    as the process. Ranks need not agree, because nobody can reach these groups any more."""
    current = _groups_of_megatron()
    replaced = [key for key in _buffers if key[0] in _users and key[0] not in current]
    if replaced:
        gc.collect()  # layers refer to themselves
        _end(lambda buffer: rank_group_of(buffer).close_after_error(), [key for key in replaced if not _users[key[0]]])


def _groups_of_megatron() -> list[Any]:
    """Returns the groups of Megatron's parallel_state, without its import."""
    return getattr(sys.modules.get("megatron.core.parallel_state"), "_global_process_group_list", None) or []


def _end(end: Callable[[ep.Buffer], None], keys: list[tuple[dist.ProcessGroup, int, torch.device]]) -> None:
    global _closed_seconds
    failures_met = []
    for key in reversed(keys):
        buffer = _buffers.pop(key)
        if not buffer.is_open:  # in a forked child it belongs to the parent
            continue
        seconds = rank_group_of(buffer).seconds
        try:
            end(buffer)
        except ep.EPError as failure:
            failures_met.append(failure)
        except ValueError:  # the buffer is still open
            _buffers[key] = buffer
            raise
        _closed_seconds += seconds
    if failures_met:
        raise failures_met[0]


@atexit.register
def _close_at_exit() -> None:
    failures.report_unseen()  # logs failures that no call has raised, before the buffers are gone
    close_buffers()

"""Log lines: per pipeline stage the number of MoE layers that use this dispatcher, and their groups; and hints."""

from __future__ import annotations

import functools
import logging
import sys

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

import megatron_ep as ep

log = logging.getLogger(__name__)

_layers: dict[dist.ProcessGroup, int] = {}  # layers that were built and not yet announced


def count_layer(group: dist.ProcessGroup) -> None:
    """Counts a layer of this process that exchanges tokens over the group."""
    _layers[group] = _layers.get(group, 0) + 1


def announce(group: dist.ProcessGroup, groups: ProcessGroupCollection | None, buffer: ep.Buffer) -> None:
    """Logs the line for the layers counted since the last one, on the first rank of a pipeline stage (level INFO).

    group: the group over which the layers exchange tokens.
    groups: the model's groups. None, or without expt_dp and pp: every group logs its own line.
    buffer: the buffer of the group.
    """
    layers = _layers.pop(group, 0)
    copies, stages = getattr(groups, "expt_dp", None), getattr(groups, "pp", None)
    if layers == 0 or group.rank() != 0 or (copies is not None and copies.rank() != 0):
        return
    topology = buffer.topology
    many = f"{copies.size()} groups of " if copies is not None and copies.size() > 1 else ""
    stage = f", pipeline stage {stages.rank()} of {stages.size()}" if stages is not None and stages.size() > 1 else ""
    log.info(
        f"megatron_ep: {layers} MoE layer{'s' if layers > 1 else ''} dispatch over {many}{topology.world_size} "
        f"rank{'s' if topology.world_size > 1 else ''} ({topology.nodes} x {topology.ranks_per_node}, {buffer.fabric})"
        f"{stage}"
    )


@functools.cache
def once(text: str) -> None:
    """Logs a line on rank 0 (level INFO), unless it has been logged."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        log.info(f"megatron_ep: {text}")


def show() -> None:
    """Prints the lines on the standard output from now on, independently of logging settings. Idempotent."""
    if not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stdout))
        log.setLevel(logging.INFO)
        log.propagate = False  # prevents a second output by the root logger

"""Queries of torch's process groups."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from megatron_ep.config import MAX_TIMEOUT_S


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float | None:
    """Returns the timeout in seconds of the collectives of a group (None: the default one) on such a device; None if it
    is unknown."""
    group = dist.group.WORLD if group is None else group
    for kind in (device, torch.device("cpu")):
        with contextlib.suppress(RuntimeError, AttributeError):  # the device has no backend, or one without this option
            seconds = group._get_backend(kind).options._timeout.total_seconds()  # type: ignore[union-attr]
            return min(seconds, MAX_TIMEOUT_S) if seconds > 0 else None
    return None

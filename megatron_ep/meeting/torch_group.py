"""What is asked of torch's process groups."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from megatron_ep.config import MAX_TIMEOUT_S


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> float | None:
    """Seconds after which torch gives up a collective of this group on such a device; None where that cannot be told.

    group: None: the default group.
    """
    group = group or dist.group.WORLD
    for kind in (device, torch.device("cpu")):
        with contextlib.suppress(RuntimeError, AttributeError):  # no backend for it, or one of another kind
            seconds = group._get_backend(kind).options._timeout.total_seconds()  # type: ignore[union-attr]
            return min(seconds, MAX_TIMEOUT_S) if seconds > 0 else None
    return None

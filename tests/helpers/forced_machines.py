"""Ranks of this machine that take it for several, under names of their own."""

import os
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from megatron_ep.fabrics import choice
from megatron_ep.meeting import processes


@contextmanager
def machines_of(size: int, fabric: str = "tcp"):
    """So many ranks a machine."""
    with (
        mock.patch.object(processes, "machine", lambda: f"machine {dist.get_rank() // size}"),
        mock.patch.dict(os.environ, {choice.VARIABLE: fabric}),
    ):
        yield

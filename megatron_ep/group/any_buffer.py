"""What a Buffer and a LocalCluster share of what users call."""

from __future__ import annotations

from typing import TypeVar

import torch

from megatron_ep.backends.processes import OfOneProcess
from megatron_ep.config import Config, Topology
from megatron_ep.group.rank_group import RankGroup

Own = TypeVar("Own", bound="AnyBuffer")


class AnyBuffer(OfOneProcess):
    """A Buffer or a LocalCluster. What it does its `RankGroup` does, which the layers of this package work with.

    `copy.deepcopy` of it, or of a module that has it, gives the buffer itself; to pickle it raises TypeError. In a
    process that is forked from the one that made it a buffer is closed: calls raise ValueError, and nothing is told to
    other ranks.
    """

    _group: RankGroup

    @property
    def config(self) -> Config:
        return self._group.config

    @property
    def topology(self) -> Topology:
        """How the ranks form nodes."""
        return self._group.topology

    @property
    def device(self) -> torch.device:
        """Where tensors are."""
        return self._group.device

    @property
    def num_local_experts(self) -> int:
        """L, experts per rank."""
        return self._group.num_local_experts

    @property
    def is_open(self) -> bool:
        """Whether the buffer can be used: until it is closed."""
        return self._group.is_open

    def statistics(self) -> dict[str, torch.Tensor]:
        """How long this process's ranks had to wait for which rank: int64 [ranks of this process, W] on the CPU,
        nanoseconds.

        "wait_ns": in all calls since the buffer was made or reset; "last_wait_ns": in the last one, a dispatch with its
        exchange of counts, a combine, or both halves of a low-latency call. Column p: for rank p, that is until what p
        had to send or to take was there; p may itself have waited for somebody else. 0 for the rank itself.

        Summed over the roles that waited, each channel has some: compare peers with each other, not with a clock. On
        the host only time counts in which there was nothing else to do on the thread; on a GPU only waits of about 50
        us or more, from then on. On a GPU these are figures of what has run so far: `synchronize` first.
        """
        return self._group.statistics()

    def synchronize(self) -> None:
        """Returns when all launches of this rank are done; on the host they always are. Raises what failed in them."""
        self._group.synchronize()

    def raise_if_failed(self) -> None:
        """As `megatron_ep.raise_if_failed`, for this buffer alone."""
        self._group.raise_if_failed()

    def abort(self, reason: str) -> None:
        """Ends the waits of all ranks in reach, this one's too, until `reset`, and within two seconds those of all
        others. From any thread; waits for no rank.

        Calls under way and later ones raise EPAbortError with the reason (its first 300 bytes or so) on all of them. An
        earlier failure stays what they are told. The buffer can be closed, and another one built. Does nothing once it
        is closed.
        """
        self._group.abort(reason)

    def close(self) -> None:
        """Gives the heaps back, whatever other ranks do. Handles of this buffer can no longer be used. Closing twice is
        fine. On a GPU it first waits for the launches of this rank, whose waits are bounded. What CUDA graphs have
        captured stays allocated as long as they do; to replay it then only fills its outputs with NaN (-1 in integers).

        A buffer on a GPU that nobody has any more gives them back with the next call that makes a buffer, waits for
        launches, or asks whether any failed. So does `close` while its thread captures a CUDA graph.

        Heaps that other processes have mapped or registered stay allocated on a GPU for a later buffer of the same size
        and group: `Buffer.release` gives them back.

        Raises EPError, once the buffer is closed, if a launch has failed and nobody has been told. As a context manager
        the buffer logs that as an error instead when another exception ends the block.
        """
        self._group.close()

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._group.close()
        else:
            self._group.close_after_error()


def rank_group_of(buffer: object) -> RankGroup:
    """The ranks of a buffer that live in this process. Raises ValueError for what is no buffer."""
    if not isinstance(buffer, AnyBuffer):
        raise ValueError(f"buffer is a {type(buffer).__name__}, must be a Buffer or LocalCluster")
    return buffer._group

"""Public methods that Buffer and LocalCluster share."""

from __future__ import annotations

from typing import TypeVar

import torch

from megatron_ep.buffer.rank_group import RankGroup
from megatron_ep.config import Config, Topology
from megatron_ep.meeting.processes import OfOneProcess

Own = TypeVar("Own", bound="AnyBuffer")


class AnyBuffer(OfOneProcess):
    """A Buffer or a LocalCluster. Forwards to its `RankGroup`, which the other layers of this package use.

    `copy.deepcopy` of it, or of a module that holds it, returns the buffer itself; pickling it raises TypeError. In a
    process forked from the one that created it, the buffer is closed: calls raise ValueError, and other ranks are not
    affected.
    """

    _group: RankGroup

    @property
    def config(self) -> Config:
        return self._group.config

    @property
    def topology(self) -> Topology:
        """The nodes of the ranks."""
        return self._group.topology

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._group.device

    @property
    def num_local_experts(self) -> int:
        """L, experts per rank."""
        return self._group.num_local_experts

    @property
    def is_open(self) -> bool:
        """Whether the buffer has not been closed."""
        return self._group.is_open

    def statistics(self) -> dict[str, torch.Tensor]:
        """Returns the time that ranks of this process waited for each rank: int64 [ranks of this process, W] on the
        CPU, in nanoseconds.

        "wait_ns": in all calls since the buffer was created or reset; "last_wait_ns": in the last one, a dispatch with
        its exchange of counts, a combine, or both halves of a low-latency call. Column p: the time until rank p had
        sent or taken what was needed; p may itself have waited for another rank. 0 for the rank itself.

        Times are summed over the roles that waited, of which each channel has several: compare them between ranks, not
        with elapsed time. On the host only the time counts in which the thread had nothing else to do; on a GPU only
        the part of a wait after about the first 50 us. On a GPU call `synchronize` first, because only launches that
        have run are counted.
        """
        return self._group.statistics()

    def synchronize(self) -> None:
        """Waits until all launches of this rank are done; on the host they always are. Raises their failures."""
        self._group.synchronize()

    def raise_if_failed(self) -> None:
        """Raises as `megatron_ep.raise_if_failed`, for this buffer only."""
        self._group.raise_if_failed()

    def abort(self, reason: str) -> None:
        """Ends the waits of this rank and of all reachable ranks immediately, and of all others within two seconds.

        May be called from any thread; waits for no rank. Calls in progress and later ones, until `reset`, raise
        EPAbortError with the reason (about its first 300 bytes) on all of these ranks. If a call has failed before,
        they raise that failure instead. The buffer can be closed, and another one created. Does nothing on a closed
        buffer.
        """
        self._group.abort(reason)

    def close(self) -> None:
        """Frees the heaps, independently of other ranks. Handles of this buffer can no longer be used. Ranks that wait
        for this one inside a call get EPAbortError.

        May be called twice. On a GPU it first waits for the launches of this rank, whose waits are bounded. What CUDA
        graphs have captured stays allocated as long as the graphs; a replay then only fills its outputs with NaN (-1 in
        integers).

        A buffer on a GPU that is garbage-collected, or closed while its thread captures a CUDA graph, is freed by the
        next call that creates a buffer, waits for launches, or checks for failures.

        Heaps that other processes have mapped or registered stay allocated on a GPU for a later buffer of the same size
        and group: `Buffer.release` frees them.

        Raises EPError, once the buffer is closed, if a launch has failed and no call has raised it. As a context
        manager the buffer logs that as an error instead if another exception ends the block.
        """
        self._group.close()

    def __repr__(self) -> str:
        ranks = f"{self.topology.nodes} x {self.topology.ranks_per_node} ranks"
        state = "" if self.is_open else ", closed"
        return f"{type(self).__name__}({ranks}, {self.config.num_experts} experts, {self.device}{state})"

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._group.close()
        else:
            self._group.close_after_error()


def rank_group_of(buffer: object) -> RankGroup:
    """Returns the ranks of a buffer that live in this process. Raises ValueError if it is no buffer."""
    if not isinstance(buffer, AnyBuffer):
        raise ValueError(f"buffer is a {type(buffer).__name__}, must be a Buffer or LocalCluster")
    return buffer._group

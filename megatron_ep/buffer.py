"""Buffers: what holds the symmetric heaps of all ranks, in one process or in many."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ep.backends.rendezvous import StoreRendezvous
from megatron_ep.config import Config, Topology
from megatron_ep.group.any_buffer import AnyBuffer
from megatron_ep.group.distributed import DistributedRankGroup, patience, with_timeout_of
from megatron_ep.group.local import LocalRankGroup


class LocalCluster(AnyBuffer):
    """All ranks in this process. `dispatch` and `combine` take and return lists of W tensors, one per rank.

    nodes, ranks_per_node: the topology, N x G.
    config: as for Buffer.
    device: "cpu", or "cuda" for a GPU that all ranks share: torch's current one, unless the index is given. A launch
        runs the kernels of all ranks together, so W * Config.num_sms SMs must be there.
    threads: OS threads that share the ranks' work.
    seed: runs all roles on one thread in a random order, with a network between nodes that delays and reorders. The
        same seed gives the same interleaving; a wait expires when no role can run any more, whatever Config.timeout
        says.
    lost_signal: with a seed, the number (from 1) of the network signal that is lost, to see what happens then. 0: none.
    stalled: with a seed, a rank and the number (from 1) of the wait at which that rank stops for ever, to see which
        rank the others blame.
    Raises ValueError for arguments that are out of range.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        config: Config,
        *,
        device: str | torch.device = "cpu",
        threads: int = 1,
        seed: int | None = None,
        lost_signal: int = 0,
        stalled: tuple[int, int] | None = None,
    ):
        self._group = LocalRankGroup(
            nodes,
            ranks_per_node,
            config,
            device=device,
            threads=threads,
            seed=seed,
            lost_signal=lost_signal,
            stalled=stalled,
        )

    def reset(self) -> None:
        """Makes the buffer usable again after an error: see `Buffer.reset`, but there is nobody to wait for."""
        self._group.reset()


class Buffer(AnyBuffer):
    """This process's rank of an expert-parallel group. The processes of a machine share memory; between machines there
    is a network. Construction, reset and all launches are collective.

    group: the expert-parallel process group; None: the default group.
    config: must be equal on all ranks. Its timeout, if neither it nor MEGATRON_EP_TIMEOUT says one, becomes that of the
        group's collectives.
    topology: how the group's ranks form nodes. None: those of the variable MEGATRON_EP_RANKS_PER_NODE, if it is set;
        else the ranks of a host are one node, and so are those of an NVLink domain that spans hosts, as NVML tells.
        Nodes need equally many ranks, one after the other. Rows between several nodes of one machine take the same
        path as between several machines, without the puts, which shared memory does not need.
    device: "cpu" or "cuda", the same on all ranks: where the tensors are. On a GPU (torch's current one, unless the
        index is given) launches go to torch's current stream and return at once; what fails later is raised by the next
        call or by `synchronize`. Calls on several streams wait for each other. Those that a CUDA graph has captured do
        not: they must be captured on one stream, and a replay must be ordered with the buffer's other calls.

    The ranks meet through the store of torch.distributed: no collective of the group runs. Rank 0 logs one line about
    the set-up (logger megatron_ep.buffer, level INFO).

    Raises ValueError on every rank alike when configs differ or do not fit the group, or no topology can be told;
    EPError when the ranks cannot share memory or be connected, or one does not come within a minute or Config.timeout.
    """

    _group: DistributedRankGroup

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: Config,
        topology: Topology | None = None,
        *,
        device: str | torch.device = "cpu",
    ):
        config = with_timeout_of(group, config, device)
        rendezvous = StoreRendezvous(group, timedelta(seconds=patience(config)))
        self._group = DistributedRankGroup(rendezvous, config, topology, device)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank

    @property
    def fabric(self) -> str:
        """What carries the bytes: "shared memory" on the host, "ibgda", "verbs" or "tcp" between machines without GPUs;
        "p2p", "nvshmem", "nccl", "ibgda", "verbs" or "tcp" between GPUs."""
        return self._group.fabric

    def reset(self) -> None:
        """Makes the buffer usable again after an error. Collective: returns when all ranks have called it.

        Handles of dispatches that succeeded stay valid.

        After a failure in a backward pass the parameters are those of the last step, provided that `raise_if_failed`
        was asked before the optimizer's next one. The gradients are not to be used: some hold NaN, and what earlier
        microbatches have added to them is still there (in Megatron's main_grad as well). Random states have moved on,
        and a router may have updated its expert bias. So every rank zeroes all gradients and repeats the whole step; or
        goes back to a checkpoint, where the steps have to be the same bit for bit.

        Raises EPError on every rank when one does not come within a minute or Config.timeout, has another thread in a
        call, or cannot reset: what it has sent to other machines does not arrive in time, say.
        """
        self._group.reset()

    def release(self) -> None:
        """Closes the buffer and gives the memory of it, and of its low-latency modes, back at once. Collective: returns
        when this rank's is free, for which all ranks must have called it.

        `close` leaves on a GPU what others may still use, for a later buffer; this is for a GPU that others use next,
        as where training and inference take turns. With the last buffer of its ranks goes what closed ones have left.
        Another buffer can be made afterwards. What torch has for tensors is `torch.cuda.empty_cache`'s.

        Over NVSHMEM the memory goes back to its symmetric heap, for later buffers of whatever size: that heap and the
        library stay as long as the process lives. Over NCCL the buffer's communicators end.

        Raises ValueError on every rank alike, and the buffer stays open, while a rank captures a CUDA graph or has some
            that may replay the buffer's launches, or has another thread in a call on the host. EPError when a rank does
            not come within a minute or Config.timeout, ends, or lets go of nothing: then the buffer is closed, this
            rank uses nobody's memory any more, and its own is free if nobody can use it. And as `close`, of a launch
            that failed.
        """
        self._group.release()


def buffer_of(group: DistributedRankGroup) -> Buffer:
    """A buffer of ranks that have met already."""
    buffer = Buffer.__new__(Buffer)
    buffer._group = group
    return buffer

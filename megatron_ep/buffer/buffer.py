"""The buffers that users create. `distributed.py` has the rank of a `Buffer`, `local.py` those of a `LocalCluster`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ep.buffer.any_buffer import AnyBuffer
from megatron_ep.buffer.distributed import DistributedRankGroup, group_of
from megatron_ep.buffer.host import Schedule
from megatron_ep.buffer.local import LocalRankGroup
from megatron_ep.config import Config, Topology


class LocalCluster(AnyBuffer):
    """All ranks in this process. `dispatch` and `combine` take and return lists of W tensors, one per rank.

    nodes, ranks_per_node: the topology, N x G.
    config: see Buffer.
    device: "cpu", or "cuda" for a GPU that all ranks share: torch's current one unless an index is given. A launch runs
        the kernels of all ranks together, so the GPU needs W * Config.num_sms SMs.
    threads: OS threads that share the ranks' work.
    seed: runs all roles on one thread in a random order, with a network between nodes that delays and reorders. Equal
        seeds give equal interleavings. A wait expires when no role can run any more, regardless of Config.timeout.
    lost_signal: with a seed, the number (from 1) of a network signal to lose, for testing. 0: none.
    stalled: with a seed, a rank and the number (from 1) of the wait at which that rank stops forever, to test which
        rank the others blame.

    Raises ValueError for arguments out of range.
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
        schedule = Schedule(threads, seed, lost_signal, stalled)
        self._group = LocalRankGroup(nodes, ranks_per_node, config, device, schedule)

    def reset(self) -> None:
        """Makes the buffer usable again after an error, as `Buffer.reset` does."""
        self._group.reset()


class Buffer(AnyBuffer):
    """This process's rank of an expert-parallel group. Construction, reset and all launches are collective.

    Processes of one machine share memory; a network connects machines.

    group: the expert-parallel process group. None: the default group.
    config: must be equal on all ranks. If neither it nor MEGATRON_EP_TIMEOUT sets a timeout, the timeout of the group's
        collectives is used.
    topology: the nodes of the group's ranks. None: nodes of MEGATRON_EP_RANKS_PER_NODE ranks if it is set; otherwise
        the ranks of a host form a node, and so do those of an NVLink domain that spans hosts, as NVML reports. Nodes
        need equal numbers of consecutive ranks. Rows between nodes of one machine take the same path as between
        machines, without the puts, which shared memory does not need.
    device: "cpu" or "cuda", where the tensors are; equal on all ranks. On a GPU (torch's current one unless an index is
        given) launches go to torch's current stream and return immediately; a later failure is raised by the next call
        or by `synchronize`. Calls on several streams wait for each other. Calls captured in a CUDA graph do not: they
        must be captured on one stream, and a replay must be ordered with the buffer's other calls.

    The ranks meet through the store of torch.distributed; no collective of the group runs. A group that torch has no
    record of, for example one that wraps another, needs rank() and size(); `all_gather_object` over it finds a store.
    Rank 0 logs one line about the set-up (logger megatron_ep.buffer, level INFO).

    Raises ValueError on every rank alike if configs differ or do not fit the group, or if no topology can be
    determined; EPError if the ranks cannot share memory or connect, if one does not come within
    Config.timeout (at least 5 s), or if its process is seen to have ended.
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
        self._group = group_of(group, config, topology, device)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._group.rank

    @property
    def fabric(self) -> str:
        """The fabric that carries the bytes.

        "shared memory" on the host, "verbs", "tcp" or "mlx5" between machines without GPUs; "p2p", "nvshmem", "nccl",
        "verbs", "tcp" or "mlx5" between GPUs.
        """
        return self._group.fabric

    def reset(self) -> None:
        """Makes the buffer usable again after an error. Collective: returns when all ranks have called it.

        Handles of successful dispatches stay valid. The last call before the failure may have succeeded on some ranks
        only: one that was slow in it hears of what another rank refused or lacked afterwards. On the host a rank that
        resets after it has refused a call waits for those that have yet to finish the calls before.

        After a failure in a backward pass the parameters are those of the last step, provided that `raise_if_failed`
        was called before the optimizer's next one. Do not use the gradients: some hold NaN, and the sums of earlier
        microbatches are still in them (in Megatron's main_grad as well). Random states have advanced, and a router may
        have updated its expert bias. So every rank should zero all gradients and repeat the whole step, or return to a
        checkpoint if steps have to be reproducible bit for bit.

        Raises EPError on every rank if one does not come within Config.timeout (at least 5 s), its process is seen to
        have ended, has another thread in a call, or cannot reset, for example because its messages to other machines do
        not arrive in time. If the ranks had come together by then, calls raise EPAbortError until a reset succeeds;
        otherwise the buffer is as it was.
        """
        self._group.reset()

    def release(self) -> None:
        """Closes the buffer and immediately frees its memory, and that of its low-latency modes.

        Collective: returns when this rank's memory is free, which requires that all ranks have called it.

        On a GPU `close` keeps memory that other ranks may still use, for a later buffer. Use `release` if another
        program uses the GPU next, for example when training and inference alternate. Releasing the last buffer of its
        ranks also frees what closed ones have kept. Another buffer can be created afterwards.
        `torch.cuda.empty_cache` frees torch's memory for tensors.

        Over NVSHMEM the memory returns to its symmetric heap, for later buffers of any size; that heap and the library
        stay as long as the process. Over NCCL the buffer's communicators end.

        Raises ValueError on every rank alike, and the buffer stays open, if a rank captures a CUDA graph, has graphs
            that may replay the buffer's launches, or has another thread in a call on the host. Raises EPError if a rank
            does not come within Config.timeout (at least 5 s), ends, or does not give up its mappings: then the buffer
            is closed, this rank uses no other rank's memory, and its own is free if no other rank can use it. Also
            raises as `close` does for a failed launch.
        """
        self._group.release()


def buffer_of(group: DistributedRankGroup) -> Buffer:
    """Returns a buffer for ranks that have already met."""
    buffer = Buffer.__new__(Buffer)
    buffer._group = group
    return buffer

"""Buffers: the ranks of this process, the symmetric heaps of all ranks, and the launches on them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ep import _C, cuda_group
from megatron_ep.config import Config, Topology, require_int, require_type
from megatron_ep.errors import EPAbortError, EPError, EPOverflowError, EPTimeoutError, describe
from megatron_ep.handle import Handle, RankHandle

# Rows after which an NVLink ring's flag is published even if nobody waits for it.
NVL_BATCH = 8
PAYLOAD_TYPES = {
    torch.bfloat16: 0,
    torch.float16: 1,
    torch.float32: 2,
    torch.float64: 3,
    torch.float8_e4m3fn: 4,
}  # the first four as in csrc/core/dtypes.h
COMBINE_DTYPES = tuple(PAYLOAD_TYPES)[:4]

# Construction and reset wait this long for the other ranks, or Config.timeout if that is longer: they may still be in a
# wait of their own.
MEETING_S = 60.0
POOLED_BYTES = 1 << 20  # outputs from this size on live in memory that is kept for later ones


def _new_output(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised [rows, columns]."""
    out = torch.empty(0, dtype=dtype)
    size = rows * columns * out.element_size()
    if size < POOLED_BYTES or device.type != "cpu":  # torch itself keeps the memory of a GPU
        return torch.empty(rows, columns, dtype=dtype, device=device)
    storage = torch.from_dlpack(_C.pooled_bytes(size)).untyped_storage()
    return out.set_(storage, 0, (rows, columns), (columns, 1))


class RankGroup:
    """The ranks of a buffer that live in this process, and what can be launched on them.

    Launches take and return lists with one entry per rank of this process. Arguments were checked by
    `megatron_ep.functional`.
    """

    topology: Topology
    config: Config
    ranks: list[int]
    device: torch.device
    _group: Any

    def _start(self, heap: Any, segments: Sequence[Any], threads: int, seed: int | None, lost_signal: int) -> None:
        self._heap = heap
        self._group = _C.Group(
            heap=heap,
            ranks=self.ranks,
            segments=list(segments),
            threads=threads,
            seed=seed,
            lost_signal=lost_signal,
            timeout=self.config.timeout_seconds,
        )

    @staticmethod
    def _make_heap(topology: Topology, config: Config, channels: int) -> Any:
        return _C.Heap(
            nodes=topology.nodes,
            ranks_per_node=topology.ranks_per_node,
            num_experts=config.num_experts,
            channels=channels,
            nvl_ring_bytes=config.nvl_ring_bytes,
            rdma_ring_bytes=config.rdma_ring_bytes,
        )

    @property
    def num_local_experts(self) -> int:
        """L, experts per rank."""
        return self.config.num_experts // self.topology.world_size

    @property
    def seconds(self) -> float:
        """Seconds spent inside launches of this buffer so far, waits for other ranks included."""
        return self._live_group().seconds

    def close(self) -> None:
        """Frees the heaps. Handles of this buffer can no longer be used. Closing twice is fine."""
        self._group = None
        _C.release_pooled_memory()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _live_group(self) -> Any:
        if self._group is None:
            raise ValueError("buffer is closed")
        return self._group

    # ---- launches

    def check_usable(self) -> None:
        """Raises ValueError if closed, EPAbortError if a launch failed since the last reset, on whatever rank."""
        aborted = self._live_group().aborted()
        if aborted is not None and self.device.type == "cuda":
            self._raise_if_aborted()  # a launch that failed after it was enqueued: nobody has been told of it yet
        if aborted is not None:
            raise EPAbortError(f"{self._cause(*aborted)}; every rank must call reset() before the buffer is used again")

    def synchronize(self) -> None:
        """Returns when all launches of this rank are done; on the host they always are. Raises what failed in them."""
        group = self._live_group()
        if self.device.type == "cuda":
            group.synchronize()
            self._raise_if_aborted()

    @contextlib.contextmanager
    def telling_others(self) -> Iterator[None]:
        """An error inside that only this rank knows of reaches the others too, who would wait for this one."""
        try:
            yield
        except EPError:
            raise
        except BaseException as error:
            self.refuse(failed=not isinstance(error, ValueError))
            raise

    def refuse(self, failed: bool = False) -> None:
        """Ends the waits of the other ranks: this one has refused its arguments, or failed."""
        if self._group is not None and len(self.ranks) < self.topology.world_size:
            self._group.abort(failed=failed)

    def format_of(
        self, topk: int, x: torch.Tensor, scales: Sequence[torch.Tensor] | None, weights: Sequence[torch.Tensor] | None
    ) -> Any:
        """How rows of these tensors travel. Raises ValueError when a ring cannot hold even one."""
        row = _C.RowFormat(
            payload_bytes=x.shape[1] * x.element_size(),
            scale_bytes=scales[0].shape[1] * scales[0].element_size() if scales is not None else 0,
            weight_bytes=weights[0].element_size() if weights is not None else 0,
            topk=topk,
            payload_type=PAYLOAD_TYPES[x.dtype],
        )
        rings = {"nvl_ring_bytes": self.config.nvl_ring_bytes}
        if self.topology.nodes > 1:
            rings["rdma_ring_bytes"] = self.config.rdma_ring_bytes
        for name, ring_bytes in rings.items():
            if ring_bytes < row.slot_bytes:
                raise ValueError(
                    f"Config.{name} is {ring_bytes}, must be at least {row.slot_bytes} for {x.shape[1]} x {x.dtype}"
                )
        return row

    def notify(
        self, topk_idx: Sequence[torch.Tensor], expert_alignment: int, expert_capacity: int, max_recv_tokens: int | None
    ) -> Handle:
        """Exchanges counts. topk_idx: [T, K] int32 or int64, contiguous."""
        if self.device.type == "cuda":
            return cuda_group.make_handle(self, topk_idx, expert_alignment, expert_capacity, max_recv_tokens)
        group = self._live_group()
        topk = topk_idx[0].shape[1]
        tensors, layouts = [], []
        for idx in topk_idx:
            layout = torch.empty(self._heap.layout_size(idx.shape[0], topk), dtype=torch.int32)
            t = _C.RankTensors()
            t.layout, t.num_tokens, t.topk_idx = layout.data_ptr(), idx.shape[0], idx.data_ptr()
            tensors.append(t)
            layouts.append(layout)
        totals = group.notify(
            tensors,
            topk=topk,
            index_bytes=topk_idx[0].element_size(),
            expert_alignment=expert_alignment,
            expert_capacity=expert_capacity,
        )
        for rank, idx, total in zip(self.ranks, topk_idx, totals, strict=True):
            if total.bad_token >= 0:
                self._refuse_ids(rank, idx, total.bad_token)
        self._raise_if_aborted()
        ranks = []
        for idx, layout, total in zip(topk_idx, layouts, totals, strict=True):
            starts = self._heap.expert_start_offset(idx.shape[0], topk)
            ends = layout[starts : starts + self.num_local_experts + 1].to(torch.int64)
            ranks.append(
                RankHandle(
                    num_tokens=idx.shape[0],
                    layout=layout,
                    rows=total.expert_rows if max_recv_tokens is None else max_recv_tokens,
                    tokens_per_expert=ends.diff(),
                    positions=torch.empty(total.received_rows, topk, dtype=torch.int32),
                    rail_experts=torch.empty(total.rail_rows, topk, dtype=torch.int32),
                )
            )
        return Handle(self, topk, ranks)

    def _refuse_ids(self, rank: int, topk_idx: torch.Tensor, token: int) -> None:
        if len(self.ranks) == self.topology.world_size:
            self._group.reset()  # nobody else is waiting
        where = f" of rank {rank}" if len(self.ranks) > 1 else ""
        raise ValueError(
            f"topk_idx{where} is {topk_idx[token].tolist()} at token {token}, must hold distinct ids in "
            f"[0, {self.config.num_experts}), or -1 for no expert"
        )

    def _tensors(self, handle: Handle, index: int) -> Any:
        rank = handle.ranks[index]
        t = _C.RankTensors()
        t.layout, t.num_tokens = rank.layout.data_ptr(), rank.num_tokens
        t.positions, t.rail_experts = rank.positions.data_ptr(), rank.rail_experts.data_ptr()
        t.max_received, t.max_rail, t.max_rows = rank.positions.shape[0], rank.rail_experts.shape[0], rank.rows
        return t

    def dispatch(
        self,
        handle: Handle,
        x: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] | None,
        weights: Sequence[torch.Tensor] | None,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor] | None]:
        """x [T, H], scales [T, S], weights [T, K] to [R, H], [R, S], [R], grouped by expert."""
        group = self._live_group()
        out, out_scales, out_weights, tensors = [], [], [], []
        for i, rank in enumerate(handle.ranks):
            out.append(_new_output(rank.rows, x[i].shape[1], x[i].dtype, self.device))
            t = self._tensors(handle, i)
            t.x, t.out = x[i].data_ptr(), out[i].data_ptr()
            if scales is not None:
                out_scales.append(torch.empty(rank.rows, scales[i].shape[1], dtype=scales[i].dtype, device=self.device))
                t.scales, t.out_scales = scales[i].data_ptr(), out_scales[i].data_ptr()
            if weights is not None:
                out_weights.append(torch.empty(rank.rows, dtype=weights[i].dtype, device=self.device))
                t.weights, t.out_weights = weights[i].data_ptr(), out_weights[i].data_ptr()
            tensors.append(t)
        row = self.format_of(handle.topk, x[0], scales, weights)
        group.dispatch(tensors, row, nvl_batch=NVL_BATCH, rdma_chunk=self.config.rdma_chunk_tokens)
        self._raise_if_aborted()
        return out, out_scales if scales is not None else None, out_weights if weights is not None else None

    def combine(
        self, handle: Handle, x: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """x [R, H], weights [R] to the sums [T, H] and the single values [T, K]."""
        group = self._live_group()
        out, out_weights, tensors = [], [], []
        for i, rank in enumerate(handle.ranks):
            out.append(_new_output(rank.num_tokens, x[i].shape[1], x[i].dtype, self.device))
            t = self._tensors(handle, i)
            t.x, t.out = x[i].data_ptr(), out[i].data_ptr()
            if weights is not None:
                size = (rank.num_tokens, handle.topk)
                out_weights.append(torch.empty(size, dtype=weights[i].dtype, device=self.device))
                t.weights, t.out_weights = weights[i].data_ptr(), out_weights[i].data_ptr()
            tensors.append(t)
        row = self.format_of(handle.topk, x[0], None, weights)
        group.combine(
            tensors, row, nvl_batch=NVL_BATCH, rdma_chunk=self.config.rdma_chunk_tokens, dtype=PAYLOAD_TYPES[x[0].dtype]
        )
        self._raise_if_aborted()
        return out, out_weights if weights is not None else None

    def overflow_of(self, rank: RankHandle) -> torch.Tensor:
        """int32 [1], a view: not 0 once rows did not fit."""
        index = self._heap.overflow_offset
        return rank.layout[index : index + 1]

    # ---- failures

    def _cause(self, outcome: str, rank: int) -> str:
        return {
            "timeout": f"rank {rank} timed out first, {self._when_waits_expire()}",
            "bad_input": f"rank {rank} refused its arguments",
            "failed": f"rank {rank} failed for a reason of its own",
            "interrupted": f"rank {rank} was interrupted",
            "mismatch": f"rank {rank} met a row that was not meant for its call: the ranks issued different calls, "
            "or gave x of different H or dtype, another K, weights on some ranks only, or another handle",
            "overflow": f"rank {rank} had no room for the rows that pass through it",
        }[outcome]

    def _when_waits_expire(self) -> str:
        return f"after {self.config.timeout_seconds:g} s"

    def _raise_if_aborted(self) -> None:
        group = self._live_group()
        aborted = group.aborted()
        # On the host a launch is over by now: one that finished is good, whatever others have met since.
        if aborted is None or (self.device.type == "cpu" and group.finished()):
            return
        incidents = self._group.incidents()
        # those that expired before those that were told to stop
        incidents.sort(key=lambda incident: incident["outcome"] == "aborted")
        message = "\n  ".join([self._cause(*aborted), *map(describe, incidents)])
        kind = {"timeout": EPTimeoutError, "mismatch": EPError, "overflow": EPOverflowError}.get(
            aborted[0], EPAbortError
        )
        raise kind(message, incidents)


class LocalCluster(RankGroup):
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
    ):
        self.topology = Topology(nodes, ranks_per_node)
        require_type("config", config, Config)
        self.config = config
        config.check_ranks(self.topology)
        require_int("threads", threads, 1, 1 << 10)
        require_int("lost_signal", lost_signal, 0, 2**63)
        if lost_signal and seed is None:
            raise ValueError(f"lost_signal is {lost_signal}, must be 0 without a seed")
        if seed is not None:
            require_int("seed", seed, 0, 2**63)
            if threads != 1:
                raise ValueError(f"threads is {threads}, must be 1 with a seed")
        self.ranks = list(range(self.topology.world_size))
        self._seed = seed
        self.device = cuda_group.check_device(device)
        if self.device.type == "cuda":
            if threads != 1 or seed is not None:
                raise ValueError(f"threads is {threads} and seed is {seed}, must not be given with device {device!r}")
            sms = cuda_group.num_sms(config, self.device, len(self.ranks))
            self._heap = self._make_heap(self.topology, config, cuda_group.num_channels(self.topology, config, sms))
            self._group = cuda_group.local_ranks(self.topology, config, self._heap, self.device, sms)
            return
        heap = self._make_heap(self.topology, config, config.num_channels)
        self._start(heap, [_C.Segment.anonymous(heap.bytes) for _ in self.ranks], threads, seed, lost_signal)

    def reset(self) -> None:
        """Makes the buffer usable again after an error. Handles stay valid."""
        self._live_group().reset()

    def _when_waits_expire(self) -> str:
        return super()._when_waits_expire() if self._seed is None else "when no role could run any more"


class Buffer(RankGroup):
    """This process's rank of an expert-parallel group whose processes share memory. Construction, reset and all
    launches are collective.

    group: the expert-parallel process group; None: the default group.
    config: must be equal on all ranks.
    topology: how the group's ranks form nodes. None: all ranks of a machine are one node. Several nodes on one machine
        take the same path as several machines: puts and signals along the rail.
    device: "cpu" or "cuda", the same on all ranks: where the tensors are. On a GPU (torch's current one, unless the
        index is given) launches go to torch's current stream and return at once; what fails later is raised by the next
        call or by `synchronize`.
    Raises ValueError on every rank alike when configs differ or do not fit the group, EPError when the ranks cannot
    share memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        config: Config,
        topology: Topology | None = None,
        *,
        device: str | torch.device = "cpu",
    ):
        self._process_group = group if group is not None else dist.group.WORLD
        self._timeout = timedelta(seconds=MEETING_S)
        self._barrier()
        self.rank = dist.get_rank(self._process_group)
        world_size = dist.get_world_size(self._process_group)
        self.topology = topology if topology is not None else Topology(1, world_size)
        self.config = config
        self.ranks = [self.rank]
        self._agree(lambda: self._check_own(device))
        self._timeout = timedelta(seconds=max(MEETING_S, config.timeout_seconds))
        settings = asdict(config) | {"timeout": config.timeout_seconds}
        everyone = self._gather((socket.gethostname(), settings, asdict(self.topology), self.device.type))
        self._agree(lambda: self._check_members(everyone))
        if self.device.type == "cuda":
            sms = cuda_group.num_sms(config, self.device, 1)
            self._heap = self._make_heap(self.topology, config, cuda_group.num_channels(self.topology, config, sms))
            hosts = [host for host, *_ in everyone]
            self._group = cuda_group.connect(self, self._heap, self.device, sms, hosts)
            return

        heap = self._make_heap(self.topology, config, config.num_channels)
        segments: list[Any] = [None] * world_size
        self._agree(lambda: segments.__setitem__(self.rank, _C.Segment.shared(heap.bytes)))
        addresses = self._gather(segments[self.rank].address())
        self._agree(lambda: self._open_others(segments, addresses, heap.bytes))
        segments[self.rank].close_to_others()
        self._start(heap, segments, threads=1, seed=None, lost_signal=0)

    def reset(self) -> None:
        """Makes the buffer usable again after an error. Collective: returns when all ranks have called it.

        Handles stay valid.

        Raises RuntimeError, from torch.distributed, when a rank does not come within a minute or Config.timeout.
        """
        if self.device.type == "cuda":
            self._live_group().synchronize()  # no kernel of this rank writes to others after the barrier
        self._barrier()
        self._live_group().reset()
        self._barrier()

    def _check_own(self, device: str | torch.device) -> None:
        require_type("config", self.config, Config)
        require_type("topology", self.topology, Topology)
        assert self.config.timeout_seconds > 0  # raises if the environment has a bad one
        self.device = cuda_group.check_device(device)

    def _check_members(self, everyone: list[Any]) -> None:
        host, *own = everyone[self.rank]
        for rank, (other_host, *others) in enumerate(everyone):
            for name, mine, theirs in zip(("config", "topology", "device"), own, others, strict=True):
                if mine != theirs:
                    raise ValueError(f"{name} is {mine} on rank {self.rank} and {theirs} on rank {rank}, must be equal")
            if other_host != host and self.device.type == "cpu":
                raise EPError(
                    f"rank {self.rank} runs on {host} and rank {rank} on {other_host}: "
                    "the host backend connects the processes of one machine only"
                )
        if self.topology.world_size != len(everyone):
            raise ValueError(f"topology is {self.topology}, must have the {len(everyone)} ranks of the group")
        self.config.check_ranks(self.topology)

    def _open_others(self, segments: list[Any], addresses: list[Any], size: int) -> None:
        for rank, address in enumerate(addresses):
            if rank != self.rank:
                segments[rank] = _C.Segment.open(address, size)

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * dist.get_world_size(self._process_group)
        dist.all_gather_object(everyone, mine, group=self._process_group)
        return everyone

    def _agree(self, step) -> None:
        """Runs a step that may fail on some ranks only, and fails on all of them then."""
        error: Exception | None = None
        try:
            step()
        except Exception as caught:
            error = caught
        messages = self._gather(None if error is None else (type(error).__name__, str(error)))
        if isinstance(error, (ValueError, EPError)):
            raise error
        if error is not None:
            raise EPError(f"rank {self.rank} could not set up the buffer: {error}") from error
        for rank, failed in enumerate(messages):
            if failed is not None:
                raise EPError(f"rank {rank} could not set up the buffer: {failed[0]}: {failed[1]}")

    def _barrier(self) -> None:
        if dist.get_backend(self._process_group) == "gloo":
            dist.monitored_barrier(self._process_group, timeout=self._timeout)
        else:
            dist.barrier(self._process_group)

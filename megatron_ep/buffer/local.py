"""All ranks of a buffer in one process."""

from __future__ import annotations

import torch

from megatron_ep import _C
from megatron_ep.buffer import cuda, host, low_latency, sizes
from megatron_ep.buffer.rank_group import RankGroup, log_set_up
from megatron_ep.config import Config, Topology, require_int, require_type
from megatron_ep.fabrics import gpu, p2p
from megatron_ep.fabrics.connection import LowLatencyConnection


class LocalRankGroup(RankGroup):
    """See `megatron_ep.LocalCluster`."""

    takes_lists = True

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        config: Config,
        device: str | torch.device,
        schedule: host.Schedule,
    ):
        super().__init__()
        threads, seed, lost_signal, stalled = schedule
        self.topology = Topology(nodes, ranks_per_node)
        require_type("config", config, Config)
        self.config = config
        config.check_ranks(self.topology)
        require_int("threads", threads, 1, 1 << 10)
        require_int("lost_signal", lost_signal, 0, 2**63)
        if lost_signal and seed is None:
            raise ValueError(f"lost_signal is {lost_signal}, must be 0 without a seed")
        if stalled is not None:
            if seed is None:
                raise ValueError(f"stalled is {stalled}, must be None without a seed")
            if not isinstance(stalled, tuple) or len(stalled) != 2:
                raise ValueError(f"stalled is {stalled!r}, must be a rank and the number of one of its waits")
            require_int("stalled's rank", stalled[0], 0, self.topology.world_size - 1)
            require_int("stalled's wait", stalled[1], 1, 2**63)
        if seed is not None:
            require_int("seed", seed, 0, 2**63)
            if threads != 1:
                raise ValueError(f"threads is {threads}, must be 1 with a seed")
        self.ranks = list(range(self.topology.world_size))
        self._seed = seed
        self.device = gpu.check_device(device)
        if self.device.type == "cuda":
            if threads != 1 or seed is not None:
                raise ValueError(f"threads is {threads} and seed is {seed}, must not be given with device {device!r}")
            sms = gpu.num_sms(config, self.device, len(self.ranks), sizes.default_sms(self.topology))
            self.heap = sizes.gpu_heap(self.topology, config, sms, len(self.ranks))
            memories = p2p.own_memories(len(self.ranks), self.heap.bytes, self.device)
            connection = p2p.over(memories, self.ranks, self.heap, self.device, sms, config)
            self._backend = cuda.CudaBackend(connection, self.heap, self.device, sms)
            log_set_up(self, "p2p (one GPU)", sms)
        else:
            self.heap = sizes.host_heap(self.topology, config)
            segments, timeout = self.shared_segments(self.heap.bytes), config.timeout_seconds
            self._backend = host.HostBackend(self.heap, self.ranks, segments, timeout=timeout, schedule=schedule)
            network = "" if seed is None else f", a simulated network of seed {seed}"
            log_set_up(self, f"memory of this process{network}")
        self.one_hop = low_latency.connect_one_hop(self)

    def low_latency_connection(self, heap: _C.LowLatencyHeap, blocks: int) -> LowLatencyConnection:
        backend = self.live_backend()
        assert isinstance(backend, cuda.CudaBackend)
        memories = p2p.own_memories(len(self.ranks), heap.bytes, self.device)
        return p2p.low_latency_over(memories, heap, blocks, backend.connection)

    def shared_segments(self, size: int) -> list[_C.Segment]:
        """Returns `size` bytes of host memory for each rank."""
        return [_C.Segment.anonymous(size) for _ in self.ranks]

    def reset(self) -> None:
        self._start_anew()

    def _when_waits_expire(self) -> str:
        return super()._when_waits_expire() if self._seed is None else "when no role could run any more"

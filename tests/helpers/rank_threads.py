"""The ranks of a host buffer as threads of this process, each with a backend of its own, as if in its own process."""

import concurrent.futures
import contextlib

import megatron_ep as ep
from megatron_ep import _C
from megatron_ep.buffer.host import HostBackend

_made = []


class ThreadRank(ep.LocalCluster):
    """One of them."""

    def __init__(self, nodes, ranks_per_node, config, rank, segments, heap, low_latency):
        super().__init__(nodes, ranks_per_node, config)
        self.rank = rank
        self._group.ranks, self._group.heap = [rank], heap
        self._group._backend = HostBackend(heap, [rank], segments, timeout=config.timeout_seconds)

        def shared_segments(size):
            """Of one low-latency mode: all ranks that make one share it."""
            return low_latency.setdefault(size, [_C.Segment.anonymous(size) for _ in range(nodes * ranks_per_node)])

        self._group.shared_segments = shared_segments


def thread_ranks(nodes, ranks_per_node, config, takes_lists=True):
    """A buffer for each rank. takes_lists: whether its calls take lists, or tensors as those of a process with one
    rank."""
    heap = ep.LocalCluster(nodes, ranks_per_node, config)._group.heap
    world = nodes * ranks_per_node
    segments = [_C.Segment.anonymous(heap.bytes) for _ in range(world)]
    low_latency = {}
    ranks = [ThreadRank(nodes, ranks_per_node, config, rank, segments, heap, low_latency) for rank in range(world)]
    for rank in ranks:
        rank._group.takes_lists = takes_lists
    _made.extend(ranks)
    return ranks


def close_all():
    """Failures that a test leaves behind are told to no other one: `raise_if_failed` looks at all buffers alive."""
    while _made:
        with contextlib.suppress(ep.EPError):
            _made.pop().close()


def run_together(buffers, work):
    """work(buffer) on all of them at once; what each returned or raised."""
    with concurrent.futures.ThreadPoolExecutor(len(buffers)) as pool:
        futures = [pool.submit(work, buffer) for buffer in buffers]
        while concurrent.futures.wait(futures, timeout=0.05).not_done:
            for buffer in buffers:  # as the monitor of a process does, which threads do not have
                buffer._group.live_backend().settle_refusal()
        return [future.exception() or future.result() for future in futures]

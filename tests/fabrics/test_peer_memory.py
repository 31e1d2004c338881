"""How processes map each other's GPU memory, with files in memory in place of the GPU's. Needs no GPU."""

import contextlib
import dataclasses
import fcntl
import gc
import mmap
import os
import re
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from run_on import run_on

from megatron_ep import _C
from megatron_ep.buffer import connect, cuda, sizes
from megatron_ep.buffer.distributed import DistributedRankGroup
from megatron_ep.config import Config, Topology
from megatron_ep.fabrics import descriptors, peer_memory
from megatron_ep.fabrics.peer_memory import DESCRIPTOR, FABRIC, IPC
from megatron_ep.fabrics.rank_info import RankInfo
from megatron_ep.meeting.rendezvous import StoreRendezvous

DEVICE = torch.device("cuda", 0)
W = 3
BYTES = 1 << 16


class Memory:
    """A file in memory, which a process maps by its descriptor, or by its path as a fabric handle."""

    refuses = lost = False

    def __init__(self, file: int, size: int, kind: str):
        self._file, self._kind, self.is_released = file, kind, False
        self._data = mmap.mmap(file, size)

    @classmethod
    def create(cls, device: int, size: int, group: str, kind: str) -> "Memory":
        if cls.refuses:
            raise RuntimeError("cuMemCreate: CUDA_ERROR_NOT_PERMITTED")
        file = os.memfd_create("gpu")
        os.ftruncate(file, size)
        return cls(file, size, kind)

    @classmethod
    def open(cls, device: int, handle: bytes, size: int, kind: str) -> "Memory":
        return cls(cls._file_of(handle, kind), size, kind)

    @staticmethod
    def _file_of(handle: bytes, kind: str) -> int:
        if kind == DESCRIPTOR:
            return os.dup(int.from_bytes(handle, sys.byteorder))
        return os.open(handle.decode(), os.O_RDWR)

    def handle(self) -> bytes:
        if self._kind == DESCRIPTOR:
            return os.dup(self._file).to_bytes(4, sys.byteorder)
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def replace(self, handle: bytes) -> None:
        size = len(self._data)
        self.release()
        self.__init__(self._file_of(handle, self._kind), size, self._kind)

    def clear(self) -> None:
        self._data[:] = bytes(len(self._data))

    def add_one(self) -> None:
        if not self.lost:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            self._data[:8] = (self.first_word() + 1).to_bytes(8, sys.byteorder)
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def first_word(self) -> int:
        return int.from_bytes(self._data[:8], sys.byteorder)

    def release(self) -> None:
        if not self.is_released:
            self._data.close()
            os.close(self._file)
            self.is_released = True

    __del__ = release


@contextlib.contextmanager
def rendezvous_with_memory(**of_rank_1: bool):
    """Yields a rendezvous. What it leaves open is found here. of_rank_1: attributes of its memory."""
    rendezvous = StoreRendezvous(dist.group.WORLD, timedelta(seconds=60))
    rendezvous.barrier()
    before = len(os.listdir("/proc/self/fd"))
    memory = type("OfThisRank", (Memory,), of_rank_1 if dist.get_rank() == 1 else {})
    with mock.patch.object(_C, "DeviceMemory", memory, create=True):
        yield rendezvous
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def words_of(memories: list[Memory], rendezvous: StoreRendezvous) -> list[int]:
    """The first words once all ranks have added to them. Releases the memories."""
    rendezvous.barrier()
    words = [memory.first_word() for memory in memories]
    rendezvous.barrier()
    for memory in memories:
        memory.release()
    return words


KINDS = pytest.mark.parametrize("kind", [DESCRIPTOR, FABRIC])


@KINDS
@run_on("ranks")
def test_all_ranks_map_one_memory(kind: str) -> None:
    """Each rank adds to the memory of all others, and to its own."""
    with rendezvous_with_memory() as rendezvous:
        memories = peer_memory.peer_memories(rendezvous, lambda: None, DEVICE, BYTES, "", kind=kind)
        for _ in range(dist.get_rank() + 1):
            for memory in memories:
                memory.add_one()
        assert words_of(memories, rendezvous) == [1 + 2 + 3] * W


@KINDS
@run_on("ranks")
def test_the_memory_of_a_new_process_is_mapped_by_all(kind: str) -> None:
    """Rank 2 comes back with new memory, which the others map in the place of its former one."""
    rank = dist.get_rank()
    with rendezvous_with_memory() as rendezvous:
        memories = peer_memory.peer_memories(rendezvous, lambda: None, DEVICE, BYTES, "", kind=kind)
        if rank == 2:
            for memory in memories:
                memory.release()
            memories = peer_memory.peer_memories(rendezvous, lambda: None, DEVICE, BYTES, "", kind=kind)
        else:
            with peer_memory.exchanged(rendezvous, lambda: memories[rank], [2], kind) as (_, handles):
                rendezvous.agree(lambda: memories[2].replace(handles[2]))
        memories[2].add_one()
        memories[0].add_one()
        assert words_of(memories, rendezvous) == [3, 0, 3]


@KINDS
@run_on("ranks")
def test_a_probe_says_why_memory_cannot_be_mapped(kind: str) -> None:
    for of_rank_1, says in (
        ({}, "^$"),
        ({"refuses": True}, "rank 1 could not set up the buffer.*cuMemCreate: CUDA_ERROR_NOT_PERMITTED"),
        ({"lost": True}, "atomics of 1 of 2 ranks reached the memory of this one"),
    ):
        with rendezvous_with_memory(**of_rank_1) as rendezvous:
            assert re.search(says, peer_memory.lacks(rendezvous, DEVICE, kind))


@run_on("ranks")
def test_a_rank_without_a_folder_of_temporary_files() -> None:
    folder = "/proc/none" if dist.get_rank() == 1 else None
    with mock.patch.object(tempfile, "tempdir", folder), rendezvous_with_memory() as rendezvous:
        lacking = peer_memory.lacks(rendezvous, DEVICE, DESCRIPTOR)
    assert "rank 1 could not set up the buffer" in lacking and "/proc/none" in lacking


def run_connected(of_rank_1: dict[str, bool], in_use: str | None = None) -> tuple[str, str]:
    """How ranks on GPUs of one machine map memory, and what the INFO line says. in_use: what rank 0 has told."""
    with rendezvous_with_memory(**of_rank_1) as rendezvous, contextlib.ExitStack() as stack:
        for module, name in ((sizes, "gpu_heap"), (cuda, "CudaBackend")):
            stack.enter_context(mock.patch.object(module, name))
        connected = stack.enter_context(mock.patch.object(connect, "connect"))
        connected.side_effect = lambda rank, topology, heap, fabric: (mock.Mock(memory=rank.memory), fabric)
        info = RankInfo("a", "a", None, 1, "cuda", {}, None, 24, "gpu", None, None, None, None)
        group = DistributedRankGroup.__new__(DistributedRankGroup)
        group._rendezvous, group.rank, group.device = rendezvous, rendezvous.rank, DEVICE
        group.config, group.topology = Config(num_experts=W), Topology(1, W)
        group._infos = [dataclasses.replace(info, memory_in_use=in_use if rank == 0 else None) for rank in range(W)]
        group._machines, group._neighbours = ["a"] * W, dict.fromkeys(range(W), 1)
        fabric = group._connect_gpus(24, None)
        assert fabric.name == "p2p" and connected.call_args.args[0].memory == group._memory_kind
        assert group._infos[group.rank].memory_in_use == group._memory_kind
        return group._memory_kind, fabric.reason


def test_ranks_of_a_machine_take_ipc_only_where_descriptors_fail(ranks) -> None:
    assert ranks.run(run_connected, {}) == [(DESCRIPTOR, "one machine")] * W
    for kind, reason in ranks.run(run_connected, {"refuses": True}):
        assert kind == IPC and reason.startswith("one machine; by CUDA IPC, because rank 1 could not")
    # A rank in a new process does as the others, which do not repeat the probe.
    assert ranks.run(run_connected, {"refuses": True}, IPC) == [(IPC, "one machine")] * W
    assert ranks.run(run_connected, {"refuses": True}, DESCRIPTOR) == [(DESCRIPTOR, "one machine")] * W


def test_the_kind_of_memory() -> None:
    assert peer_memory.kind_for(["a", "a"], None) == DESCRIPTOR
    assert peer_memory.kind_for(["a", "b"], None) == FABRIC
    assert peer_memory.kind_for(["a", "a"], None, IPC) == peer_memory.kind_for(["a"], IPC, DESCRIPTOR) == IPC
    assert peer_memory.kind_for(["a", "a"], DESCRIPTOR) == peer_memory.kind_for(["a", "b"], DESCRIPTOR) == DESCRIPTOR
    with pytest.raises(ValueError, match="MEGATRON_EP_PEER_MEMORY is 'shared', must be one of ipc, descriptor, fabric"):
        peer_memory.kind_for(["a"], "shared")


def test_a_mailbox_that_is_not_served_ends(tmp_path: Path) -> None:
    """Nothing waits without a bound, and nothing is left in the folder of temporary files."""
    with mock.patch.object(tempfile, "tempdir", str(tmp_path)):
        with descriptors.mailbox(1, 0.05) as listener:
            with pytest.raises(TimeoutError):
                descriptors.receive(listener, 1)
            path = listener.getsockname()
            descriptors.send(0, 7, [path], 5.0)
            descriptors.close(descriptors.receive(listener, 1))
            with (
                mock.patch.object(os, "geteuid", lambda: 4321),
                pytest.raises(PermissionError, match="must be user 4321"),
            ):
                descriptors.send(0, 7, [path], 5.0)
        with pytest.raises(OSError):
            descriptors.send(0, 7, [path], 5.0)
    assert not list(tmp_path.iterdir())

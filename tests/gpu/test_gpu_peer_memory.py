"""CUDA virtual memory between the GPUs of two processes. `MEGATRON_EP_PEER_MEMORY=descriptor pytest tests/gpu` runs all
other tests over it."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_ep.fabrics import peer_memory
from megatron_ep.meeting.rendezvous import StoreRendezvous

W = 2
PAGE = 1 << 21


def meet() -> tuple[StoreRendezvous, torch.device]:
    if torch.cuda.device_count() < W:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPUs, not {W}")
    torch.cuda.set_device(dist.get_rank())
    return StoreRendezvous(dist.group.WORLD, timedelta(seconds=60)), torch.device("cuda", dist.get_rank())


def run_probes() -> list[str]:
    rendezvous, device = meet()
    return [peer_memory.lacks(rendezvous, device, kind) for kind in (peer_memory.DESCRIPTOR, peer_memory.FABRIC)]


def test_a_probe_tells_what_the_driver_allows(ranks) -> None:
    for descriptor, fabric in ranks.run(run_probes):
        assert descriptor == ""
        assert fabric == "" or "cuMem" in fabric, fabric  # mostly CUDA_ERROR_NOT_PERMITTED: no IMEX channel


def run_replaced() -> list[int]:
    """Rank 1 makes its memory anew, which rank 0 maps in the place of the former one."""
    rendezvous, device = meet()
    made = [peer_memory.peer_memories(rendezvous, lambda: None, device, PAGE, "", kind="descriptor")]
    memories = made[0]
    if dist.get_rank() == 1:
        memories = peer_memory.peer_memories(rendezvous, lambda: None, device, PAGE, "", kind="descriptor")
    else:
        with peer_memory.exchanged(rendezvous, lambda: memories[0], [1], "descriptor") as (_, handles):
            rendezvous.agree(lambda: memories[1].replace(handles[1]))
    for memory in memories:
        memory.add_one()
    rendezvous.barrier()
    words = [memory.first_word() for memory in memories]
    rendezvous.barrier()
    for memory in {id(memory): memory for of_one in (*made, memories) for memory in of_one}.values():
        memory.release()
    return words


def test_memory_is_replaced_at_its_addresses(ranks) -> None:
    assert ranks.run(run_replaced) == [[2, 2]] * W


def run_set_up(size: int) -> dict[str, float]:
    """Seconds until memory is mapped, and given back."""
    rendezvous, device = meet()
    seconds = {}
    for kind in (peer_memory.IPC, peer_memory.DESCRIPTOR):
        rendezvous.barrier()
        begin = time.perf_counter()
        memories = peer_memory.peer_memories(rendezvous, lambda: None, device, size, kind, kind=kind)
        seconds[kind] = time.perf_counter() - begin
        for rank, memory in enumerate(memories):
            if rank != dist.get_rank():
                memory.release()
        rendezvous.barrier()
        memories[dist.get_rank()].release()
    return seconds


def test_set_up_takes_as_long_as_by_ipc(ranks, record_property) -> None:
    [seconds, _] = ranks.run(run_set_up, 1400 << 20)
    record_property("seconds", seconds)
    print(seconds)
    assert seconds[peer_memory.DESCRIPTOR] < seconds[peer_memory.IPC] + 0.1


def test_every_kind_is_reported() -> None:
    report = peer_memory.report()
    assert report.startswith("ipc: yes; descriptor: yes; fabric: "), report

"""CUDA virtual memory between the GPUs of two processes. All other tests run over it by descriptors, with
`MEGATRON_EP_PEER_MEMORY=ipc pytest tests/gpu` over CUDA IPC."""

import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.fabrics import peer_memory
from megatron_ep.meeting import nodes, processes
from megatron_ep.meeting.rendezvous import StoreRendezvous

W = 2
PAGE = 1 << 21

# Asked here and not on the ranks, whose errors are pickled: what skips a test is not.
between_gpus = pytest.mark.skipif(torch.cuda.device_count() < W, reason=f"needs {W} GPUs")


def meet() -> tuple[StoreRendezvous, torch.device]:
    torch.cuda.set_device(dist.get_rank())
    return StoreRendezvous(dist.group.WORLD, timedelta(seconds=60)), torch.device("cuda", dist.get_rank())


def run_probe(kind: str) -> str:
    rendezvous, device = meet()
    return peer_memory.lacks(rendezvous, device, kind)


@between_gpus
def test_a_probe_tells_what_the_driver_allows(ranks) -> None:
    assert ranks.run(run_probe, peer_memory.DESCRIPTOR) == [""] * W
    for fabric in ranks.run(run_probe, peer_memory.FABRIC):
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


@between_gpus
def test_memory_is_replaced_at_its_addresses(ranks) -> None:
    assert ranks.run(run_replaced) == [[2, 2]] * W


def run_on_two_hosts_of_a_domain() -> tuple[str, list[float]]:
    """Ranks that believe in two hosts of one NVLink domain dispatch a token of each to all ranks and sum its copies."""
    _, device = meet()
    rank = dist.get_rank()
    with (
        mock.patch.object(processes, "machine", lambda: f"host {rank}"),
        mock.patch.object(socket, "gethostname", lambda: f"host {rank}"),
        mock.patch.object(nodes, "nvlink_domain", lambda uuid: "rack"),
    ):
        buffer = ep.Buffer(None, ep.Config(num_experts=W), topology=ep.Topology(W, 1), device=device)
    with buffer:
        x = torch.full((1, 512), rank + 1.0, device=device)
        experts = torch.arange(W, device=device)[None]
        received = ep.dispatch(x, experts, torch.ones(1, W, device=device), buffer=buffer)
        combined = ep.combine(received.x, received.handle)
        return rank_group_of(buffer).fabric, [received.x.sum().item(), combined.sum().item()]


@between_gpus
def test_hosts_of_a_domain_take_a_network_where_fabric_handles_fail(ranks) -> None:
    [lacking, _] = ranks.run(run_probe, peer_memory.FABRIC)
    for rank, (fabric, sums) in enumerate(ranks.run(run_on_two_hosts_of_a_domain)):
        assert fabric == "p2p" if not lacking else fabric in ("tcp", "nvshmem", "nccl"), (fabric, lacking)
        assert sums == [512 * 3.0, 512 * 2 * (rank + 1.0)]


def test_every_kind_is_reported() -> None:
    report = peer_memory.report()
    assert report.startswith("ipc: yes; descriptor: yes; fabric: "), report

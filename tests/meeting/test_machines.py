"""Which machine a process is on, where several have one name, and what has become of another one."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import namespaces
import pytest
import torch
import torch.distributed as dist
from rank_processes import LinkedProcess

import megatron_ep as ep
from megatron_ep.buffer.distributed import DistributedRankGroup
from megatron_ep.fabrics import rank_info
from megatron_ep.fabrics.rank_info import RankInfo
from megatron_ep.meeting import processes
from megatron_ep.meeting.processes import has_ended, machine, process_fate
from megatron_ep.meeting.rendezvous import StoreRendezvous


def unshare(*kinds: str) -> None:
    """Returns in new namespaces, on a machine of the same name."""
    namespaces.unshare(*kinds)
    if "pid" in kinds:
        namespaces.become_child()
        subprocess.run(["sh", "-c", "mount --make-rprivate / && mount -t proc proc /proc"], check=True)


def run_rank(rank: int, path: Path, kinds: tuple[str, ...], link: Connection) -> None:
    """In such namespaces of its own. Tells which machines the ranks are on; if one, the other's fate and the fabric."""
    unshare(*kinds)
    rendezvous = StoreRendezvous.over(dist.FileStore(str(path), 2), rank, 2, timedelta(seconds=60))
    config = ep.Config(num_experts=2, timeout=20)
    _, infos = rendezvous.exchange(lambda: (None, rank_info.introduce(config, None, torch.device("cpu"))))
    said = rank_info.machines(infos)
    if len(set(said)) == 1:
        group = DistributedRankGroup(rendezvous, config, None, "cpu")
        said = ["one machine", group._fate_of(1 - rank), group.fabric]
    link.send(said)
    rendezvous.barrier()


def run_two(tmp_path: Path, *kinds: str) -> list[list[str]]:
    """What two ranks tell."""
    if os.geteuid() != 0:
        pytest.skip("only root makes namespaces")
    ranks = [LinkedProcess(run_rank, rank, tmp_path / "store", kinds) for rank in range(2)]
    said = [rank.hear() for rank in ranks]
    assert [rank.wait() for rank in ranks] == [0, 0]
    return said


@pytest.mark.parametrize("kinds", [("net", "uts", "ipc"), ("pid", "mount")])
def test_two_machines_of_one_name(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    (first, second), others = run_two(tmp_path, *kinds)
    assert others == [first, second] and first != second
    assert first.startswith(f"{socket.gethostname()}, boot "), first


def test_what_leaves_memory_shared_is_one_machine(tmp_path: Path) -> None:
    assert run_two(tmp_path, "net") == [["one machine", None, "shared memory"]] * 2


def test_a_machine_is_named_by_more_than_its_name_where_two_have_it() -> None:
    def on(host: str, machine: str) -> RankInfo:
        return RankInfo(host, machine, None, 1, "cpu", {}, ep.Topology(2, 2), None, None, None, None, None, None)

    ranks = [on("a", "a, boot 1"), on("a", "a, boot 1"), on("b", "b, boot 2"), on("b", "b, boot 3")]
    assert rank_info.machines(ranks) == ["a", "a", "b, boot 2", "b, boot 3"]
    with pytest.raises(ValueError, match="ranks 2 to 3 run on b, boot 2 and b, boot 3: a node must be on one machine"):
        rank_info.agreed_topology(ranks, ep.Config(num_experts=4))
    with pytest.raises(ValueError, match=r"; Topology\(4, 1\) fits \(megatron-ep train: --set topology.nodes=4 --set "):
        rank_info.agreed_topology(ranks, ep.Config(num_experts=4))


def test_a_machine_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine() == machine() and machine().startswith(f"{socket.gethostname()}, boot ")
    monkeypatch.setattr(processes, "BOOT", tmp_path / "none")
    assert machine() == socket.gethostname()


def test_the_fate_of_a_process() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert process_fate(process.pid) is None and not has_ended(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_fate(process.pid) == "has ended" and has_ended(process.pid), "a zombie"
    process.wait()
    assert process_fate(process.pid) == "has ended" and has_ended(process.pid)


def test_the_fate_of_a_process_whose_name_is_cut_inside_a_character() -> None:
    script = 'open("/proc/self/comm", "wb").write(b"fourteen bytes\\xc3\\xa9"); print(flush=True); input()'
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        process.stdout.readline()
        assert Path(f"/proc/{process.pid}/comm").read_bytes() == b"fourteen bytes\xc3\n"
        assert process_fate(process.pid) is None and not has_ended(process.pid)
        process.kill()


def test_a_process_whose_buffer_is_closed() -> None:
    owner = processes.Owner.here()
    assert owner.fate() is None
    os.close(owner.descriptor)
    assert owner.fate() == "has closed its buffer"
    other = processes.Owner.here()
    assert other.descriptor == owner.descriptor and owner.fate() == "has closed its buffer", "of another buffer"
    os.close(other.descriptor)
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes.Owner(process.pid, 3, 4).fate() == "has ended"

"""Which ranks form a node when the user does not say."""

import re
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import cpp
import pytest
import torch

import megatron_ep as ep
from megatron_ep.fabrics.rank_info import introduce
from megatron_ep.meeting import nodes
from megatron_ep.meeting.nodes import VARIABLE, nvlink_domain, topology_of

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("places", "nodes", "ranks_per_node"),
    [("a", 1, 1), ("aaaa", 1, 4), ("abcd", 4, 1), ("bbaa", 2, 2), ("aaabbbccc", 3, 3)],
)
def test_a_host_is_a_node(places: str, nodes: int, ranks_per_node: int) -> None:
    assert topology_of(places, None) == ep.Topology(nodes, ranks_per_node)


def test_hosts_of_one_nvlink_domain_are_one_node() -> None:
    rack = ["NVLink domain x, clique 1"] * 8
    assert topology_of(rack, None) == ep.Topology(1, 8)
    assert topology_of(rack + ["NVLink domain x, clique 2"] * 8, None) == ep.Topology(2, 8)


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ("aaaabb", "the hosts have different numbers of the group's ranks: rank 0-3 on a, rank 4-5 on b. Start"),
        ("aaaabb", "may also cut hosts into nodes, here of at most 2 ranks"),
        ("abbb", "rank 0 on a, rank 1-3 on b"),
        ("abab", "the ranks of one host do not follow each other: rank 0 on a, rank 1 on b, rank 2 on a, rank 3 on b"),
        ("aba", "torchrun does; Slurm: --distribution=block"),
        ("aba", f"Topology(nodes, ranks_per_node), or {VARIABLE} in the environment"),
        ("abcdefghi" * 2, "rank 7 on h, ..."),
    ],
)
def test_other_hosts_are_refused_with_what_to_do(places: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"^topology is None, and .*{re.escape(says)}"):
        topology_of(places, None)


@pytest.mark.parametrize(("value", "nodes"), [("1", 6), ("2", 3), ("3", 2), ("6", 1), ("06", 1)])
def test_the_environment_says_otherwise(value: str, nodes: int) -> None:
    assert topology_of("aaaabb", value) == ep.Topology(nodes, 6 // nodes)


@pytest.mark.parametrize("value", ["4", "0", "-2", "7", "two", "1.5", " 2", "²"])
def test_the_environment_must_make_sense(value: str) -> None:
    with pytest.raises(ValueError, match=rf"^environment variable {VARIABLE} is '{value}', must be a divisor of the 6"):
        topology_of("aaaaaa", value)


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a library in NVML's place, for a process that may use an IMEX channel."""
    channels = tmp_path / "channels"
    channels.mkdir()
    (channels / "channel0").touch()
    monkeypatch.setattr(nodes, "IMEX_CHANNELS", channels)
    for name, value in {"CLUSTER": 7, "STATE": 3, "STATUS": 0, "INIT": 0}.items():
        monkeypatch.setenv(f"FAKE_NVML_{name}", str(value))

    def use(age: str = "new") -> None:
        library = shutil.copy(cpp.build("fake_nvml") / f"libfake_nvml_{age}.so", tmp_path / "libnvidia-ml.so.1")
        monkeypatch.setattr(nodes, "NVML", str(library))

    return use


def test_an_nvlink_domain(nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml()
    domain = "NVLink domain 07070707-0707-0707-0707-070707070707, clique 32766"
    assert nvlink_domain(GPU) == domain
    assert nvlink_domain(GPU.replace("0123", "3210")) is None, "another GPU"
    # not of several hosts; not joined yet; joined with an error; a driver that does not answer
    for name, value in {"CLUSTER": 0, "STATE": 2, "STATUS": 999, "INIT": 999}.items():
        with monkeypatch.context() as environment:
            environment.setenv(f"FAKE_NVML_{name}", str(value))
            assert nvlink_domain(GPU) is None, name
    assert nvlink_domain(GPU) == domain
    (nodes.IMEX_CHANNELS / "channel0").unlink()
    assert nvlink_domain(GPU) is None, "no IMEX channel to map other hosts' memory with"


def test_a_rank_on_a_gpu_tells_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(uuid=GPU.removeprefix("GPU-"), multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(socket, "gethostname", lambda: "this host")
    config = ep.Config(num_experts=2)
    for domain in (None, "NVLink domain x, clique 1"):
        monkeypatch.setattr(nodes, "nvlink_domain", {GPU: domain}.__getitem__)
        info = introduce(config, None, torch.device("cuda", 0))
        assert (info.host, info.domain, info.device) == ("this host", domain, "cuda")
    assert introduce(config, None, torch.device("cpu")).domain is None


def test_no_nvlink_domain_without_a_driver_that_tells(nvml) -> None:
    nvml("old")
    assert nvlink_domain(GPU) is None
    Path(nodes.NVML).unlink()
    assert nvlink_domain(GPU) is None

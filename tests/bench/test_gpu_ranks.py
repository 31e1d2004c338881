"""Where the ranks of benchmarks on GPUs come from. There need be no GPU: what asks for one is a stand-in."""

import json

import pytest
import rank_processes
import torch

import megatron_ep as ep
from megatron_ep.tools.bench import gpu_ranks
from megatron_ep.tools.job_ranks import own_gpu

# `megatron-ep bench` by ranks that see these GPUs, and time nothing: the phase is the GPU that they have taken.
PROGRAM = """
import os, sys
from unittest import mock
import torch
from megatron_ep.fabrics import gpu
from megatron_ep.meeting import nodes
from megatron_ep.tools.bench import gpus, low_latency
from megatron_ep.tools.job_ranks import own_gpu
from megatron_ep.cli.main import main
from megatron_ep.diagnosis import env

seen = sys.argv[1].split("/")[int(os.environ["RANK"])]

def uuid(device):
    return f"GPU-{seen[torch.device(device).index]}"

def check_device(device):
    if not seen:
        raise ValueError("there is no GPU")
    return torch.device("cuda", 0)

def measure_gpus(loads, warmup, iterations, graphs):
    own = uuid(f"cuda:{own_gpu()}")
    return [gpus.Measured(str(case), own, "ours", [1.0], 1, {}) for cases in loads for case in cases]

def measure_low_latency(cases, warmup, iterations):
    return [[low_latency.Measured(str(case), uuid(f"cuda:{own_gpu()}"), "ours", [1.0], 1, {})] for case in cases]

with (
    mock.patch.object(torch.cuda, "device_count", lambda: len(seen)),
    mock.patch.object(torch.cuda, "set_device"),
    mock.patch.object(gpu, "uuid", uuid),
    mock.patch.object(gpu, "pci_address", lambda _: None),
    mock.patch.object(gpu, "check_device", check_device),
    mock.patch.object(gpu, "num_sms", lambda *_: 24),
    mock.patch.object(nodes, "nvlink_domain", lambda _: None),
    mock.patch.object(env, "collect", dict),  # takes seconds
    mock.patch.object(env, "headline", str),
    mock.patch.object(gpus, "measure", measure_gpus),
    mock.patch.object(low_latency, "measure_rank", measure_low_latency),
):
    sys.exit(main(["bench", *sys.argv[2:]]))
"""


@pytest.fixture
def bench(tmp_path):
    """Runs `megatron-ep bench ARGUMENTS` in a job: what each rank ends with and prints, and the records."""
    program, file = tmp_path / "program.py", tmp_path / "bench.json"
    program.write_text(PROGRAM)

    def run(seen, *arguments, **variables):
        job = rank_processes.run_ranks([program, seen, *arguments, "--json", file], 1 + seen.count("/"), **variables)
        return job, json.loads(file.read_text())["records"] if file.exists() else []

    return run


SIZES = ("--num-sms", "8", "--experts", "8")


@pytest.mark.parametrize("name", ["gpus", "low-latency"])
@pytest.mark.parametrize("seen", ["ab/ab", "a/b"])  # as torchrun leaves them, and Slurm with --gpus-per-task=1
def test_the_ranks_of_a_job_have_a_gpu_each(bench, name, seen):
    ((status, text), other), records = bench(seen, name, *SIZES)
    assert status == 0 and other == (0, ""), (text, other)
    assert {record["phase"] for record in records} == {"GPU-a"}, "records are named as on rank 0"
    case = records[0]["case"]
    assert case in text and case.startswith("1x2 sms=8" if name == "gpus" else "2 GPUs sms=8"), case


def test_nodes_of_a_job_are_those_of_a_buffer_unless_told_otherwise(bench):
    _, records = bench("abcd/abcd/abcd/abcd", "gpus", *SIZES, MEGATRON_EP_RANKS_PER_NODE="1")
    assert records[0]["case"].startswith("4x1 ")
    _, records = bench("abcd/abcd/abcd/abcd", "gpus", *SIZES, "--nodes", "2", MEGATRON_EP_RANKS_PER_NODE="1")
    assert records[0]["case"].startswith("2x2 ")
    _, records = bench("ab/ab", "low-latency", *SIZES, MEGATRON_EP_RANKS_PER_NODE="1")
    assert records[0]["case"].startswith("2 GPUs of 2 nodes ")


@pytest.mark.parametrize(
    ("seen", "arguments", "message"),
    [
        ("a/a", ("gpus",), "have the same GPU GPU-a: start as many ranks on each machine"),
        ("a/", ("gpus",), "rank 1: there is no GPU"),
        ("a", ("gpus",), "there is 1 GPU, must be at least 2"),
        ("ab/ab", ("gpus", "--nodes", "3"), "--nodes is 3, must divide the 2 GPUs"),
        ("ab/ab", ("gpus", "--experts", "9"), "--experts is 9, must be a multiple of 2 GPUs"),
        ("ab/ab", ("low-latency", "--experts", "9"), "--experts is 9, must be a multiple of 2 ranks"),
        ("ab/ab", ("low-latency", "--ranks", "2"), "--ranks: the launcher has started them"),
    ],
)
def test_mistakes_end_all_ranks_of_a_job_alike(bench, seen, arguments, message):
    job, records = bench(seen, *arguments)
    for status, text in job:
        assert status == 2 and message in text and "Traceback" not in text, text
    assert not records


def test_without_a_job_there_is_a_rank_for_each_gpu(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(gpu_ranks, "require_gpu", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    ranks = gpu_ranks.gpu_ranks("megatron-ep bench gpus", 20.0)
    assert (ranks.rank, ranks.world_size, ranks.topology) == (0, 3, ep.Topology(1, 3))


def gpu_of_three() -> int:
    torch.cuda.device_count = lambda: 3  # of this process, which ends with the test
    return own_gpu()


def test_ranks_of_this_machine_take_the_gpu_of_their_number():
    with gpu_ranks.LocalRanks(3, 30.0) as ranks:
        assert ranks.run(gpu_of_three) == [0, 1, 2]

"""What the host does for a call on a GPU, but for CUDA's part of it, without a GPU.

    python tests/host_work.py [--processes N] [CHECKOUT ...]

Calls of both modes whose launches launch nothing, on tensors without memory; streams are stand-ins.
Beside this checkout others, such as one of an earlier commit, each with its extension built in place: processes of each
take turns. Prints microseconds of a call: a process's is that which a tenth of its rounds take at most, and of the
processes the median.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pybind11
import torch
import torch.distributed as dist

import megatron_ep as ep

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "tests" / "csrc"
CALLS, ROUNDS = 100, 40  # calls of a round: short, so that many rounds have the core to themselves
SMS = 24
DEVICE = torch.device("meta")
TOKENS, HIDDEN, TOPK, EXPERTS = 128, 7168, 8, 64
MANY = 1 << 20  # tokens: a promise with which a call goes through rings


def calls_of(buffer: ep.Buffer) -> dict[str, Callable[[], Any]]:
    """The calls that are measured, of both modes."""
    x = torch.randn(TOKENS, HIDDEN, device=DEVICE).bfloat16()
    leaf = x.clone().requires_grad_()
    weights, ids = torch.rand(TOKENS, EXPERTS, device=DEVICE).topk(TOPK, dim=1)
    low_latency = ep.LowLatency(buffer, max_tokens=TOKENS, hidden=HIDDEN, topk=TOPK)
    received = low_latency.dispatch(x, ids, weights)
    rows, handle = received.x, received.handle

    def dispatch(layout: str, rows: torch.Tensor = x, promise: int = MANY) -> ep.Received:
        room = TOKENS * TOPK
        return ep.dispatch(rows, ids, weights, buffer=buffer, max_recv_tokens=room, layout=layout, max_tokens=promise)

    normal, flat, few = dispatch("grouped"), dispatch("flat"), dispatch("grouped", promise=TOKENS)
    differentiable = normal.x.clone().requires_grad_()

    def dispatch_hook() -> None:
        _, hook = low_latency.dispatch(x, ids, return_recv_hook=True)
        hook()

    def combine_hook() -> None:
        _, hook = low_latency.combine(rows, handle, weights, return_recv_hook=True)
        hook()

    return {
        "low-latency dispatch": lambda: low_latency.dispatch(x, ids),
        "low-latency combine": lambda: low_latency.combine(rows, handle, weights),
        "low-latency dispatch, hook": dispatch_hook,
        "low-latency combine, hook": combine_hook,
        "dispatch from scratch": lambda: dispatch("grouped"),
        "dispatch, the host waits": lambda: ep.dispatch(x, ids, weights, buffer=buffer, max_tokens=MANY),
        "dispatch again": lambda: ep.dispatch(x, topk_weights=weights, handle=normal.handle),
        "combine": lambda: ep.combine(normal.x, normal.handle),
        "dispatch from scratch, gradient": lambda: dispatch("grouped", leaf),
        "dispatch again, gradient": lambda: ep.dispatch(leaf, topk_weights=weights, handle=normal.handle),
        "combine, gradient": lambda: ep.combine(differentiable, normal.handle),
        "in one hop: dispatch from scratch": lambda: dispatch("grouped", promise=TOKENS),
        "in one hop: dispatch, the host waits": lambda: ep.dispatch(x, ids, weights, buffer=buffer, max_tokens=TOKENS),
        "in one hop: dispatch again": lambda: ep.dispatch(x, topk_weights=weights, handle=few.handle),
        "in one hop: combine": lambda: ep.combine(few.x, few.handle),
        "flat dispatch from scratch": lambda: dispatch("flat"),
        "flat dispatch again": lambda: ep.dispatch(x, handle=flat.handle),
        "flat combine": lambda: ep.combine(flat.x, flat.handle),
    }


def build(checkout: Path, folder: Path, *flags: str) -> None:
    """The module `launchless` over the bindings of a checkout, with what its tests have for that."""
    native, bindings = checkout / "tests" / "csrc", checkout / "csrc" / "bindings"
    places = [native / "fake_group", checkout / "csrc", pybind11.get_include(), sysconfig.get_path("include")]
    command = [
        "g++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        *flags,
        *(f"-I{place}" for place in places),
    ]
    # earlier bindings take the second file, too
    sources = [native / "launchless.cpp", bindings / "incidents.cpp"]
    subprocess.run([*command, *map(str, sources), "-o", str(folder / "launchless.so")], check=True)


def measure(rounds: int) -> dict[str, float]:
    """Microseconds of each call, of the checkout whose package and `launchless` this process imports."""
    import launchless

    from megatron_ep import _C
    from megatron_ep.buffer import cuda, sizes
    from megatron_ep.buffer import low_latency as backends
    from megatron_ep.fabrics.connection import Connection, LowLatencyConnection

    def connect(group: Any, max_tokens: int, largest: Any, masking: bool, sums_at_expert: bool) -> tuple[Any, ...]:
        sizes = {"nodes": 1, "ranks_per_node": 1, "num_experts": group.config.num_experts, "max_tokens": max_tokens}
        heap = _C.LowLatencyHeap(**sizes, largest=largest, staged=False, channels=1, masking=False, lines=True)
        backend = group.live_backend()
        low_latency = launchless.low_latency(backend.launcher, heap, SMS)
        return heap, LowLatencyConnection(low_latency)

    event = SimpleNamespace(query=lambda: True)
    stream = SimpleNamespace(cuda_stream=7, record_event=lambda: event, wait_event=lambda event: None)
    stand_ins = {
        "current_stream": lambda device=None: stream,
        "is_current_stream_capturing": lambda: False,
        "synchronize": lambda device=None: None,
    }
    seconds: dict[str, list[float]] = {}
    with (
        mock.patch.multiple(torch.cuda, **stand_ins),
        mock.patch.object(torch.Tensor, "data_ptr", itertools.repeat(64).__next__),  # for tensors without memory
        mock.patch("torch._C._cuda_getCurrentRawStream", lambda index: stream.cuda_stream, create=True),
        mock.patch.object(backends, "connect", connect),
        ep.Buffer(None, ep.Config(num_experts=EXPERTS, num_sms=SMS, timeout=10), device="cpu") as buffer,
    ):
        group = buffer._group
        group.device = DEVICE
        group._backend = cuda.CudaBackend(Connection(launchless.group(group.heap)), group.heap, DEVICE, SMS)
        group._backend._counts.append(torch.empty(2, EXPERTS, dtype=torch.int64))  # in place of pinned memory
        group.config = dataclasses.replace(group.config, max_tokens=TOKENS)
        group.one_hop = backends.LowLatencyRanks(
            group, TOKENS, sizes.largest_row(group.config), None, sums_at_expert=True
        )
        calls = calls_of(buffer)
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                seconds.setdefault(name, []).append((time.perf_counter() - start) / CALLS)
    return {name: sorted(of_rounds)[len(of_rounds) // 10] * 1e6 for name, of_rounds in seconds.items()}


def in_process(checkout: Path, folder: Path, rounds: int) -> dict[str, float]:
    """`measure` of a checkout in a process of its own. folder: of the checkout's `launchless`."""
    command = [sys.executable, str(checkout / "tests" / "host_work.py"), "--measure", str(rounds)]
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{folder}"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def compare(checkouts: Sequence[Path], processes: int, rounds: int, *flags: str) -> dict[str, list[float]]:
    """Microseconds of each call, one a checkout."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, str(i)) for i in range(len(checkouts))]
        for checkout, folder in zip(checkouts, folders, strict=True):
            folder.mkdir()
            build(checkout, folder, *flags)
        measured: list[list[dict[str, float]]] = [[] for _ in checkouts]
        for _ in range(processes):
            for i, checkout in enumerate(checkouts):
                measured[i].append(in_process(checkout, folders[i], rounds))
    return {
        name: [statistics.median(of_process[name] for of_process in of_checkout) for of_checkout in measured]
        for name in measured[-1][0]
        if all(name in of_checkout[0] for of_checkout in measured)
    }


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        measured = measure(int(sys.argv[2]))
        dist.destroy_process_group()
        print(json.dumps(measured))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--processes", type=int, default=5, metavar="N", help="of each checkout (%(default)s)")
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT")
    arguments = parser.parse_args()
    checkouts = [checkout.resolve() for checkout in (*arguments.checkouts, ROOT)]
    print("| us |", *(f"{checkout} |" for checkout in checkouts))
    print("|---|" + "---|" * len(checkouts))
    for name, microseconds in compare(checkouts, arguments.processes, ROUNDS, "-O3").items():
        print(f"| {name} |", *(f"{number:.1f} |" for number in microseconds))


if __name__ == "__main__":
    main()

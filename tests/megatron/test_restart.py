"""Restarts in the same processes: nvidia-resiliency-ext's own, and what its interface promises without it."""

import abc
import gc
import importlib
import os
import re
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import rank_processes
import torch
import torch.distributed as dist
from ports import free_port
from run_on import run_on

import megatron_ep as ep
from megatron_ep.megatron import shared_buffers

PACKAGE = "nvidia_resiliency_ext"
ROOT = Path(__file__).parents[2]
HELPER = ROOT / "tests" / "helpers" / "restarted_rank.py"


def stand_in():
    """The package's interface as far as it is used: https://nvidia.github.io/nvidia-resiliency-ext/inprocess"""
    modules = {name: types.ModuleType(name) for name in (PACKAGE, f"{PACKAGE}.inprocess")}
    for name in ("Abort", "Finalize"):
        module = modules[f"{PACKAGE}.inprocess.{name.lower()}"] = types.ModuleType(name)
        setattr(module, name, abc.ABCMeta(name, (), {"__call__": abc.abstractmethod(lambda self, state: None)}))
    return modules


def loaded_with(modules):
    """megatron_ep.megatron.restart as it is where these modules are installed."""
    before = {name: sys.modules.get(name) for name in [*modules, "megatron_ep.megatron.restart"]}
    sys.modules.update(modules)
    sys.modules.pop("megatron_ep.megatron.restart", None)
    try:
        return importlib.import_module("megatron_ep.megatron.restart")
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def test_without_the_package_one_sentence_says_what_is_missing():
    restart = loaded_with({PACKAGE: None})
    for use in (restart.AbortEP, restart.FinalizeEP, restart.enable):
        with pytest.raises(ImportError, match=r"(AbortEP|FinalizeEP) needs nvidia-resiliency-ext: pip install '"):
            use()


def dispatch_over(buffer):
    ids = torch.arange(12).view(6, 2) % 8
    return ep.dispatch(torch.ones(6, 16), ids, buffer=buffer)


@run_on("four_ranks")
def test_waits_end_and_buffers_can_be_built_again():
    """Rank 3 does not come; a thread of every rank is told that it failed, as the restarter's is. Then all go on."""
    gc.collect()  # or buffers that earlier tests have left in circles are aborted, too, and fail later tests
    restart = loaded_with(stand_in())
    rank, state = dist.get_rank(), object()
    shared_buffers.configure(timeout=300)
    buffer = shared_buffers.shared_buffer(dist.group.WORLD, 8, torch.device("cpu"))
    answers = []
    abort = threading.Timer(0.3, lambda: answers.append(restart.AbortEP()(state)))
    abort.start()
    started = time.monotonic()
    if rank != 3:
        with pytest.raises(ep.EPAbortError, match=r"told to stop: the job restarts|rank \d failed"):
            dispatch_over(buffer)
    assert time.monotonic() - started < 30
    abort.join()
    assert answers == [state], "the state goes on to the next in the chain"
    if rank == 2:
        time.sleep(0.3)  # nobody waits for anybody else's
    assert restart.FinalizeEP()(state) is state
    assert not buffer.is_open and not shared_buffers._buffers
    again = shared_buffers.shared_buffer(dist.group.WORLD, 8, torch.device("cpu"))
    rows = dispatch_over(again)
    assert torch.equal(ep.combine(rows.x, rows.handle), torch.full((6, 16), 2.0))


STEP = "import abc\nclass {}(abc.ABC):\n    @abc.abstractmethod\n    def __call__(self, state): ..."
WRAPPER = """
from . import abort, finalize
class Compose:
    def __init__(self, *steps): self.steps = steps
class Wrapper:
    def __init__(self, *, abort=None, finalize=None): self.abort, self.finalize = abort, finalize
"""
SCRIPT = """
import nvidia_resiliency_ext.inprocess as inprocess
class Theirs(inprocess.abort.Abort):
    def __call__(self, state): return state
wrapper = inprocess.Wrapper(abort=Theirs())
print([type(step).__name__ for step in wrapper.abort.steps], type(wrapper.finalize).__name__)
"""


def test_pretrain_completes_a_scripts_chain(tmp_path):
    """Compose runs from right to left."""
    pytest.importorskip("megatron.core")
    package = tmp_path / PACKAGE / "inprocess"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    for name in ("Abort", "Finalize"):
        (package / f"{name.lower()}.py").write_text(STEP.format(name))
    (package / "__init__.py").write_text(WRAPPER)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", "megatron_ep.pretrain", "--ep-host", tmp_path / "script.py", "--inprocess-restart"]
    done = rank_processes.run_one(command, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "['Theirs', 'AbortEP'] FinalizeEP"


def test_the_restarter_itself(tmp_path):
    pytest.importorskip(f"{PACKAGE}.inprocess", reason="nvidia-resiliency-ext is not installed", exc_type=ImportError)
    port = free_port()
    variables = {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "fatal"}
    ranks = [
        subprocess.Popen(
            [sys.executable, HELPER, str(port)],
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"{rank}.log").open("w"),
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = "\n".join((tmp_path / f"{rank}.log").read_text()[-2000:] for rank in range(2))
    assert [rank.returncode for rank in ranks] == [0, 0], (texts, logs)
    # by its own thread or the other rank's, whichever came first
    assert re.match(r"run 0: \d s, EPAbortError rank (0 was told to stop|1 failed for a reason)", texts[0]), texts
    assert [text.splitlines()[-1] for text in texts] == ["run 1: trained with 1 buffer"] * 2, texts

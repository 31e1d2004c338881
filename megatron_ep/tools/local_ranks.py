"""Ranks of one machine as persistent processes that run functions together, for `check`, `bench` and the tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_ep.config import Topology

# The import of the second fails, harmlessly, if Megatron is not installed. With a GPU it initializes CUDA, which does
# not survive a fork.
PRELOAD = ("torch", "megatron_ep.megatron.equivalence")
DEATH_NOTICE_S = 0.5  # other ranks may fail because of a dead rank before its end is known


class LocalRanks:
    """W processes with a gloo default group and one compute thread each. A context manager.

    The first `run`, and the first one after a failure, which ends the processes, forks them from a process that has
    imported `PRELOAD`. Each has its rank in the environment as LOCAL_RANK.

    world_size: W.
    timeout: limit of a `run`, and of gloo's waits, in seconds.
    """

    def __init__(self, world_size: int, timeout: float = 120.0) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.rank = 0  # this process reports
        self.topology = Topology(1, world_size)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD[:1] if torch.cuda.is_available() else PRELOAD))
        self._executors: list[ProcessPoolExecutor] = []
        self._pids: list[int] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(*args) on every rank and returns the W results in rank order.

        Function, arguments and results are pickled.

        Raises TimeoutError if not every rank was done in time, BrokenProcessPool if a rank died, and otherwise the
        error of the first failing rank.
        """
        if not self._executors:
            self._start()
        return self._run(function, *args)

    def close(self) -> None:
        """Ends the ranks after their current work."""
        executors, self._executors, self._pids = self._executors, [], []
        for executor in executors:
            executor.shutdown(cancel_futures=True)
        if executors:
            self._folder.cleanup()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def _start(self) -> None:
        _start_fork_server()
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_ep_")  # has a file for the rendezvous of new groups
        group = (self.world_size, f"file://{self._folder.name}/store", self.timeout)
        self._executors = [
            ProcessPoolExecutor(1, self._context, _join_group, (rank, *group)) for rank in range(self.world_size)
        ]
        self._pids = self._run(os.getpid)

    def _run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        futures = [executor.submit(function, *args) for executor in self._executors]
        _, unfinished = wait(futures, self.timeout, FIRST_EXCEPTION)
        failed = [future for future in futures if future.done() and future.exception() is not None]
        if failed:
            wait(unfinished, DEATH_NOTICE_S)
            died = [f for f in futures if f.done() and isinstance(f.exception(), BrokenProcessPool)]
            self._kill()
            (died or failed)[0].result()
        if unfinished:
            self._kill()
            late = [rank for rank, future in enumerate(futures) if future in unfinished]
            raise TimeoutError(f"ranks {late} were not done after {self.timeout} s")
        return [future.result() for future in futures]

    def _kill(self) -> None:
        """Kills the ranks."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, signal.SIGKILL)
        self.close()


def _start_fork_server() -> None:
    """Starts the fork server with the import path of this process, and hides warnings of Megatron and gloo."""
    environment = {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONSAFEPATH": "1",  # keeps the working directory from taking precedence
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning",
    }
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()


def _join_group(rank: int, world_size: int, store: str, timeout: float) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
    )


def _end_with_parent() -> None:
    """Ends this rank with its parent, because it would otherwise wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)

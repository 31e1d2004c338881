"""Ranks of one machine as processes that stay up and run functions together: for `check`, `bench` and the tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class LocalRanks:
    """W processes with a gloo default group, one thread of computation each. A context manager.

    The first use in a process imports `preload` once, in a process from which the ranks are forked.

    Args:
        world_size: W.
        timeout: seconds that one `run` may take; also the limit of gloo's own waits.
        preload: modules to import before forking; those that are not installed are left out.
    """

    def __init__(self, world_size: int, timeout: float = 120.0, preload: tuple[str, ...] = ("torch",)) -> None:
        self.world_size = world_size
        self.timeout = timeout
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_ep_")
        self._executors = [
            ProcessPoolExecutor(1, context, _join_group, (rank, world_size, self._folder.name, timeout))
            for rank in range(world_size)
        ]
        self._pids: list[int] = []
        self._pids = self.run(os.getpid)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls function(*args) on every rank at once and returns the W results in rank order.

        Function, arguments and results travel by pickle. After an exception the ranks are gone.

        Raises:
            TimeoutError: not every rank was done in time.
            Exception: what the first failing rank raised.
        """
        futures = [executor.submit(function, *args) for executor in self._executors]
        _, unfinished = wait(futures, self.timeout, FIRST_EXCEPTION)
        failed = [future for future in futures if future.done() and future.exception() is not None]
        if failed or unfinished:
            self.kill()
        if failed:
            failed[0].result()
        if unfinished:
            raise TimeoutError(f"ranks {_indices(futures, unfinished)} were not done after {self.timeout} s")
        return [future.result() for future in futures]

    @property
    def alive(self) -> bool:
        return bool(self._executors)

    def kill(self) -> None:
        """Ends the ranks at once, whatever they are waiting for."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # it died by itself
                os.kill(pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Ends the ranks after what they are running."""
        executors, self._executors = self._executors, []
        for executor in executors:
            executor.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _indices(futures: list[Future], unfinished: set[Future]) -> list[int]:
    return [rank for rank, future in enumerate(futures) if future in unfinished]


def _join_group(rank: int, world_size: int, folder: str, timeout: float) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def _end_with_parent() -> None:
    """A rank whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)

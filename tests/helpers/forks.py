"""Python programs as processes forked from the server of `LocalRanks`, which has imported torch and Megatron: to import
them takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ports import free_port

from megatron_ep.tools.local_ranks import LocalRanks, _start_fork_server

LIMIT = 200.0  # seconds for one program of `run`
PIPE_BYTES = 1 << 20  # what a program may print before somebody reads it
RANK_ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_context = LocalRanks(1)._context


class Fork:
    """A running program, with what `subprocess.Popen` has of it.

    Args:
        arguments: what follows `python`: a file, "-m" and a module, or "-c" and a text.
        environment: all of it; None: that of this process.
        log: a file to which it prints; None: it prints to the pipes `stdout` and `stderr`.
        cwd: where it runs; None: here.
        before: called in the new process before anything else.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        environment: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.args = list(map(str, arguments))
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
        self.stdin = os.fdopen(os.dup(pipes[0][1].fileno()), "w")
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe[0].fileno())) for pipe in pipes[1:])
        for _, end in pipes:
            fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        if log is not None:
            log.touch()  # for those who read it before the program runs
        ends = (pipes[0][0], pipes[1][1], pipes[2][1])
        program = (self.args, dict(os.environ if environment is None else environment), cwd or Path.cwd(), before)
        self._process = _context.Process(target=_become, args=(*program, ends, log), daemon=True)
        _start_fork_server()
        self._process.start()
        for pipe in pipes:
            for end in pipe:
                end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.stdin.close()
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(
    arguments: Sequence[Any], environments: Sequence[Mapping[str, str]], limit: float = LIMIT
) -> list[tuple[int, str]]:
    """Runs a program in each of these environments at once, without a GPU.

    Returns:
        (exit status, what it printed to stdout and then what to stderr) of each.
    """
    processes = [Fork(arguments, {"CUDA_VISIBLE_DEVICES": "", **environment}) for environment in environments]
    try:
        texts = ["".join(process.communicate(limit)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.wait(), text) for process, text in zip(processes, texts, strict=True)]


def run_one(arguments: Sequence[Any], cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program, with these environment variables in addition, for LIMIT seconds at most."""
    process = Fork(arguments, os.environ | variables, cwd=cwd)
    try:
        return subprocess.CompletedProcess(process.args, process.wait(LIMIT), *process.communicate())
    finally:
        process.kill()


def run_ranks(arguments: Sequence[Any], world: int, **variables: str) -> list[tuple[int, str]]:
    """The same for ranks that know of each other as from torchrun."""
    places = RANK_ENVIRONMENT | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    everywhere = os.environ | places | {"MASTER_PORT": str(free_port())} | variables
    return run(arguments, [everywhere | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(world)])


def _run_program(arguments: list[str]) -> None:
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), module.__dict__)
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def _become(
    arguments: list[str],
    environment: dict[str, str],
    cwd: Path,
    before: Callable[[], None] | None,
    ends: tuple[Connection, Connection, Connection],
    log: Path | None,
) -> None:
    status = 1
    try:
        for number, end in enumerate(ends):
            os.dup2(end.fileno(), number)
            end.close()
        if log is not None:
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(file, 1)
            os.dup2(file, 2)
        multiprocessing.current_process().daemon = False  # it may start processes
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        if before is not None:
            before()
        _run_program(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

"""Ranks as processes, for tests of how they start and end: functions and Python programs, forked from the server of
`LocalRanks`, which has imported torch and Megatron: to import them takes seconds. `LocalRanks` keeps ranks up."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ports import free_port

from megatron_ep.tools.local_ranks import LocalRanks, _start_fork_server

LIMIT = 200.0  # seconds for a program
PIPE_BYTES = 1 << 20  # what a program may print before somebody reads it
RANK_ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
_server = LocalRanks(1)._context


class Process:
    """A process that calls function(*arguments), with what `subprocess.Popen` has of it. It ends with this process.

    from_here: forked from this process, not from the server.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any, from_here: bool = False) -> None:
        if not from_here:
            _start_fork_server()
        context = multiprocessing.get_context("fork") if from_here else _server
        self._process = context.Process(target=function, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = LIMIT) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class LinkedProcess(Process):
    """Calls function(*arguments, link), and hears what is sent over that link. A context manager, which kills it."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self.link, theirs = multiprocessing.Pipe()
        super().__init__(function, *arguments, theirs)
        theirs.close()

    def hear(self, timeout: float = 90.0) -> Any:
        assert self.link.poll(timeout), f"nothing is heard of process {self.pid}"
        return self.link.recv()

    def __enter__(self) -> LinkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Program(Process):
    """A Python program.

    Args:
        arguments: what follows `python`: a file, "-m" and a module, or "-c" and a text.
        environment: all of it; None: that of this process.
        log: a file to which it prints; None: it prints to the pipes `stdout` and `stderr`.
        cwd: where it runs; None: here.
        before: called in the new process before anything else.
        from_here: see `Process`.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        environment: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
        cwd: Path | None = None,
        before: Callable[[], None] | None = None,
        from_here: bool = False,
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
        environment = dict(os.environ if environment is None else environment)
        super().__init__(_become, self.args, environment, cwd or Path.cwd(), before, ends, log, from_here=from_here)
        for pipe in pipes:
            for end in pipe:
                end.close()

    def communicate(self, timeout: float = LIMIT) -> tuple[str, str]:
        self.stdin.close()
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def read_line(self, timeout: float = LIMIT) -> str:
        """The next line that it prints; "" if it has ended. Call it before anything else reads `stdout`."""
        deadline = time.monotonic() + timeout
        line = b""
        while not line.endswith(b"\n"):
            ready = select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{self.args} printed no line within {timeout} s, but {line!r}"
            byte = os.read(self.stdout.fileno(), 1)
            if not byte:
                break
            line += byte
        return line.decode()


def run(
    arguments: Sequence[Any], environments: Sequence[Mapping[str, str]], limit: float = LIMIT
) -> list[tuple[int, str]]:
    """Runs a program in each of these environments at once, without a GPU.

    Returns:
        (exit status, what it printed to stdout and then what to stderr) of each.
    """
    processes = [Program(arguments, {"CUDA_VISIBLE_DEVICES": "", **environment}) for environment in environments]
    try:
        texts = ["".join(process.communicate(limit)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.wait(), text) for process, text in zip(processes, texts, strict=True)]


def run_one(arguments: Sequence[Any], cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a program, with these environment variables in addition."""
    process = Program(arguments, os.environ | variables, cwd=cwd)
    try:
        return subprocess.CompletedProcess(process.args, process.wait(), *process.communicate())
    finally:
        process.kill()


def job(world: int, per_machine: int | None = None, **variables: str) -> list[dict[str, str]]:
    """What torchrun adds to the environment of each rank."""
    size = per_machine or world
    everywhere = RANK_ENVIRONMENT | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(size)}
    everywhere |= {"MASTER_PORT": str(free_port())} | variables
    return [everywhere | {"RANK": str(rank), "LOCAL_RANK": str(rank % size)} for rank in range(world)]


def run_ranks(arguments: Sequence[Any], world: int, **variables: str) -> list[tuple[int, str]]:
    """`run` for the ranks of a job, with these environment variables in addition."""
    return run(arguments, [os.environ | environment for environment in job(world, **variables)])


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
        sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has given it an empty one
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

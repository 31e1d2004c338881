"""Python programs as ranks forked from one process that has imported torch and Megatron: to import them takes seconds.

As a program it reads a job a line (JSON, see `Forks.run`), and answers with a line of exit statuses.
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ports import free_port

LIMIT = 200.0  # seconds for one job


class Forks:
    """Starts with the first `run`. A context manager."""

    def __init__(self):
        self._process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process is not None:
            self._process.kill()  # between jobs it holds nothing
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()

    def run(self, arguments, environments):
        """Runs `python ARGUMENTS` in each of these environments at once, for LIMIT seconds at most.

        arguments: of a file or, after "-m", a module.

        Returns:
            (exit status, what it printed) of each.
        """
        if self._process is None:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # no fork survives CUDA
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment | {"PYTHONWARNINGS": "ignore"},
            )
        with tempfile.TemporaryDirectory() as folder:
            logs = [os.path.join(folder, str(rank)) for rank in range(len(environments))]
            ranks = [
                {"log": log, "environment": environment} for log, environment in zip(logs, environments, strict=True)
            ]
            print(json.dumps([list(map(str, arguments)), ranks]), file=self._process.stdin, flush=True)
            statuses = json.loads(self._process.stdout.readline())
            return [(status, Path(log).read_text()) for status, log in zip(statuses, logs, strict=True)]

    def run_ranks(self, arguments, world, **variables):
        """The same for so many ranks that know of each other as from torchrun."""
        port = free_port()
        places = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        places |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        everywhere = os.environ | places | variables
        return self.run(arguments, [everywhere | {"RANK": str(i), "LOCAL_RANK": str(i)} for i in range(world)])


def _serve():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    # not the command itself, which a rank runs as __main__
    import megatron_ep.training.loop
    import megatron_ep.training.model
    import megatron_ep.training.recipe  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), file=answers, flush=True)


def _run(arguments, ranks):
    children = []
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            _become(arguments, **rank)
        children.append(pid)
    statuses, deadline = {}, time.monotonic() + LIMIT
    while len(statuses) < len(children):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() < deadline:
            time.sleep(0.01)
        else:
            for late in set(children) - set(statuses):
                os.kill(late, signal.SIGKILL)
    return [statuses[pid] for pid in children]


def _become(arguments, log, environment):
    status = 1
    try:
        output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environment)
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(arguments[0])
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()

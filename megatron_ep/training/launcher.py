"""Launches the ranks of a run on this machine.

`megatron-ep train` is both parent and rank. The parent starts a process per rank with torch's elastic launcher, each
with the same command; a process with RANK and WORLD_SIZE (torchrun's variables) in its environment is a rank.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MISTAKE = 2  # exit status of a rank that found a mistake of the user


class LaunchError(RuntimeError):
    """A rank failed, or a signal ended the run. The message has the rank, the reason and its log file; with the status
    MISTAKE only the reason.

    status: exit status of the run.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def die_with_parent() -> None:
    """Makes this rank end on Ctrl-C without a Python traceback, and when the launcher ends, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def launch(world_size: int, arguments: Sequence[str], log_dir: Path, threads_per_rank: int) -> None:
    """Runs `megatron-ep ARGUMENTS` as `world_size` ranks on this machine and waits until all have ended.

    Rank 0 keeps the terminal. Output of the other ranks, and stderr of all, is written to files below `log_dir`.

    Raises OSError if the log directory cannot be made, and LaunchError if a rank failed, or if SIGINT, SIGTERM, SIGHUP
    or SIGQUIT arrived; the ranks have then been stopped.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class Logs(DefaultLogsSpecs):
        """Logs whose error files are in memory, because the disk of the logs may be full."""

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            places = super().reify(envs)
            for rank, variables in envs.items():
                places.error_files[rank] = variables["TORCHELASTIC_ERROR_FILE"] = f"{errors}/{rank}.json"
            return places

    logging.disable(logging.ERROR)  # hides the elastic agent's report, because the caller prints a shorter one
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks of one machine need no host name that resolves
    log_dir.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        run_id="run",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=Logs(
            log_dir=str(log_dir), redirects={rank: Std.ALL if rank else Std.ERR for rank in range(world_size)}
        ),
    )
    with tempfile.TemporaryDirectory(prefix="megatron_ep_", dir="/dev/shm") as errors:
        try:
            elastic_launch(config, sys.executable)("-m", "megatron_ep.cli.main", *arguments)
        except SignalException as stop:
            number = signal.Signals(stop.sigval)
            raise LaunchError(f"stopped by {number.name}; no rank is left running", 128 + number) from None
        except ChildFailedError as error:
            raise _explained(error.failures, log_dir) from None


def _explained(failures: Mapping[int, Any], log_dir: Path) -> LaunchError:
    """Returns the error for the first failure. A rank that was killed precedes those that then failed without it.

    failures: torch's ProcessFailure by rank. The times of files decide, because its time stamps are whole seconds.
    """

    def order(item: tuple[int, Any]) -> tuple[bool, float]:
        _, failure = item
        reported = os.path.isfile(failure.error_file)
        killed = failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
        return not killed, os.path.getmtime(failure.error_file) if reported else failure.timestamp + 1.0

    rank, failure = min(failures.items(), key=order)
    logs = sorted(log_dir.glob(f"*/attempt_0/{rank}/stderr.log"), key=os.path.getmtime)
    said = [line for line in logs[-1].read_text(errors="replace").splitlines() if line.strip()] if logs else []
    if isinstance(failure.message, dict):
        reason = failure.message["message"]
    elif failure.exitcode < 0:
        reason = f"killed by {signal.Signals(-failure.exitcode).name}"
    else:
        reason = f"exit code {failure.exitcode}" + (f", {said[-1]}" if said else "")
    # A rank that has reported a ValueError may be stopped because of another rank before it exits with MISTAKE.
    if failure.exitcode == MISTAKE or reason.startswith("ValueError: "):
        return LaunchError(reason.removeprefix("ValueError: "), MISTAKE)
    return LaunchError(f"rank {rank} failed: {reason}" + (f"\n  its log: {logs[-1]}" if logs else ""), 1)

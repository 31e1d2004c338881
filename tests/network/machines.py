"""Machines made of Linux namespaces: each with a host name, a network address, processes and shared memory of its own,
joined by a bridge. For tests, and to try on one machine what is meant for several (as root):

    python tests/network/machines.py 2 -- torchrun --nnodes 2 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29500 examples/torchrun.py --nodes 2

runs the command on every machine at once; MACHINE is its number there, from 0. With `--rate 1gbit` before the number of
machines none of them sends faster than that.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rank_processes import Program

NETWORK = "10.77.0"
_numbers = itertools.count()


def why_not() -> str | None:
    """Why no machines can be made here; None: they can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("tc") is None:  # iproute2 has it in /usr/sbin, but ip in /usr/bin, too
        return "needs tc in PATH, to slow a link down"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
    )
    return None if done.returncode == 0 else f"no namespaces can be made here: {done.stderr.strip()}"


def why_no_filter() -> str | None:
    """Why no packets can be thrown away here, though there are machines; None: they can."""
    return None if shutil.which("nft") else "needs nft, to throw packets away"


class Machines:
    """So many machines, address(0), address(1), ..., from construction until `close`. A context manager.

    hostname: of all of them; None: machine0, machine1, ...
    """

    def __init__(self, count: int, hostname: str | None = None):
        self.count = count
        self._hostname = hostname
        self._prefix = f"ep{os.getpid()}n{next(_numbers)}"
        self._running: list[tuple[int, subprocess.Popen[str] | Program]] = []
        _run("ip", "netns", "add", f"{self._prefix}sw")
        try:
            self._in_switch("ip", "link", "add", "bridge", "type", "bridge")
            self._in_switch("ip", "link", "set", "bridge", "up")
            for machine in range(count):
                self._add(machine)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def address(machine: int) -> str:
        return f"{NETWORK}.{machine + 1}"

    def namespace(self, machine: int) -> str:
        return f"{self._prefix}m{machine}"

    def fork(
        self, machine: int, arguments: Sequence[object], environments: Sequence[Mapping[str, str]], **options: Any
    ) -> Program:
        """Runs `python ARGUMENTS` there in each of these environments, as `start` does a command: see `Program`."""
        from rank_processes import Program  # which imports torch

        everywhere = os.environ | self._variables(machine)
        before = functools.partial(_enter, self.namespace(machine), self._set_up(machine), environments)
        process = Program(arguments, everywhere, before=before, **options)
        self._running.append((machine, process))
        return process

    def _variables(self, machine: int) -> dict[str, str]:
        return {"MACHINE": str(machine), "GLOO_SOCKET_IFNAME": "eth0"}

    def _set_up(self, machine: int) -> str:
        name = self._hostname or f"machine{machine}"
        return f"hostname {name} && mount -t tmpfs -o size=2g tmpfs /dev/shm && ip link set lo up"

    def start(
        self, machine: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        """Runs a command there, as the first process of its own tree: when it ends, all that it started ends."""
        script = f'{self._set_up(machine)} && exec "$@"'
        process = subprocess.Popen(
            [
                *("ip", "netns", "exec", self.namespace(machine)),
                *("unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-c", script, "sh", *command),
            ],
            env={**os.environ, **self._variables(machine), **(environment or {})},
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self._running.append((machine, process))
        return process

    def stop(self, machine: int) -> None:
        """Ends all that runs there, at once: the first process of a tree takes the others with it."""
        for number, process in self._running:
            if number == machine:
                process.kill()
                process.wait()

    def link(self, machine: int, *change: str) -> None:
        """Changes its network interface: link(0, "down"), link(0, "up")."""
        _run("ip", "-n", self.namespace(machine), "link", "set", "eth0", *change)

    def limit(self, machine: int, rate: str) -> None:
        """What it sends: a rate of tc's, "100mbit"."""
        shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        self._in(machine, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)

    def unlimit(self, machine: int) -> None:
        self._in(machine, "tc", "qdisc", "delete", "dev", "eth0", "root")

    def drop(self, machine: int, *packets: str) -> None:
        """Throws away what arrives there that an expression of nft matches: drop(0, "numgen", "random", "mod", "100",
        "<", "2") two packets in a hundred, drop(0, "ip", "saddr", address(1)) all of another's."""
        self._filter(machine, "input", *packets)

    def block(self, machine: int, ports: str) -> None:
        """Throws away who wants to connect to these ports, as a firewall does: block(0, "30000-65535")."""
        self._filter(machine, "input", "tcp", "dport", ports, "tcp", "flags", "&", "(syn|ack)", "==", "syn")

    def pass_all(self, machine: int) -> None:
        """Throws nothing away any more."""
        self._in(machine, "nft", "flush", "ruleset")

    def close(self) -> None:
        for machine in range(self.count):
            self.stop(machine)
        names = [self.namespace(machine) for machine in range(self.count)]
        for name in (*names, f"{self._prefix}sw"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, machine: int) -> None:
        name, port = self.namespace(machine), f"port{machine}"
        _run("ip", "netns", "add", name)
        self._in_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._in_switch("ip", "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
        _run("ip", "-n", name, "link", "set", "eth0", "up")

    def _filter(self, machine: int, hook: str, *packets: str) -> None:
        self._in(machine, "nft", "add", "table", "ip", "filter")
        kind = f"{{ type filter hook {hook} priority 0; }}"
        self._in(machine, "nft", "add", "chain", "ip", "filter", hook, kind)
        self._in(machine, "nft", "add", "rule", "ip", "filter", hook, *packets, "drop")

    def _in(self, machine: int, *command: str) -> None:
        _run("ip", "netns", "exec", self.namespace(machine), *command)

    def _in_switch(self, *command: str) -> None:
        _run("ip", "netns", "exec", f"{self._prefix}sw", *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _enter(namespace: str, set_up: str, environments: Sequence[Mapping[str, str]]) -> None:
    """Returns in a new process for each of these environments, on a machine that ends with this process. This one ends
    when they have ended, with the highest of their exit statuses."""
    import namespaces  # of tests/helpers, which this file as a program does not need

    namespaces.enter(Path("/var/run/netns", namespace))
    namespaces.unshare("uts", "ipc", "pid", "mount")
    namespaces.become_child()
    mounts = "mount --make-rprivate / && mount -t proc proc /proc && mount -t sysfs sysfs /sys"
    subprocess.run(["sh", "-c", f"{mounts} && {set_up}"], check=True)
    ranks = []
    for environment in environments:
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(environment)
            return
    os._exit(max(abs(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])) for rank in ranks))


@contextlib.contextmanager
def _ending_by_signal() -> Iterator[None]:
    """SIGTERM ends this program as Ctrl-C does: the machines are taken away."""

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("machines", type=int, metavar="N")
    parser.add_argument("--rate", help="of what each machine sends, as tc has it: 1gbit (as fast as it goes)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    arguments = parser.parse_args()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    reason = why_not()
    if reason is not None or not command or arguments.machines < 1:
        parser.error(reason or "give at least one machine, and a command")
    with _ending_by_signal(), Machines(arguments.machines) as machines:
        for machine in range(arguments.machines if arguments.rate else 0):
            machines.limit(machine, arguments.rate)
        processes = [machines.start(machine, command) for machine in range(arguments.machines)]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())

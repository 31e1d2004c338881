"""The command `megatron-ep`. A sub-command imports what it needs when it runs: `env` works when nothing else does. It
raises ValueError for a user's mistake, which is printed as one line."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {
    "train": "cli.train",
    "recipe": "cli.recipe",
    "check": "cli.check",
    "bench": "tools.bench.main",
    "env": "cli.env",
    "balance": "tools.balance.main",
    "sequences": "tools.sequences",
    "simulate": "tools.simulate.main",
}
USAGE = """usage: megatron-ep COMMAND ...

Megatron-Core MoE training through compiled expert-parallel dispatch.

commands:
  train    train a model from a recipe
  recipe   show a recipe as flags, environment, torchrun line or Slurm script
  check    compare gradients with torch and this dispatcher with Megatron's, on this machine or in a job
  bench    time dispatch and combine, compared with Megatron's dispatcher and a memory copy
  env      report versions, compilers, extension and devices; or in what ranks differ; or what a buffer of many
           nodes would take
  simulate predict dispatch and combine times on clusters that you do not have
  balance  report how evenly the experts of a recorded run were loaded
  sequences  report what balancing the attention of documents over ranks would gain and move

megatron-ep COMMAND --help shows the options, megatron-ep --version the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 2 for a user's mistake, 1 for a failed run, 128 + N for signal N."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megatron-ep {importlib.metadata.version('megatron_ep')}")
        return 0
    module = COMMANDS.get(arguments[0])
    if module is None:
        print(f"megatron-ep: no command {arguments[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        status: int = importlib.import_module(f"megatron_ep.{module}").main(arguments[1:])
    except ValueError as error:
        print(f"megatron-ep {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-ep: interrupted", file=sys.stderr)
        return 130
    return status


def run() -> NoReturn:
    """Runs the command of this process, and ends the process with its exit status."""
    status = main()
    place = sys.modules.get("megatron_ep.meeting.place")
    if place is not None and place.has_abandoned_calls():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()

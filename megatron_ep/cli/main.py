"""The command `megatron-ep`. A sub-command imports what it needs when it runs: `env` works when nothing else does. It
raises ValueError for a user's mistake, which is printed as one line."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {  # modules, and what the commands do
    "train": ("cli.train", "train a model from a recipe"),
    "recipe": ("cli.recipe", "show a recipe as flags, environment, torchrun line or Slurm script"),
    "check": ("cli.check", "compare gradients with torch and this dispatcher with Megatron's, here or in a job"),
    "bench": ("tools.bench.main", "time dispatch and combine, compared with Megatron's dispatcher and a memory copy"),
    "env": ("cli.env", "report versions, compilers, extension, devices; in what ranks differ; what a buffer takes"),
    "simulate": ("tools.simulate.main", "predict dispatch and combine times on clusters that you do not have"),
    "balance": ("tools.balance.main", "report how evenly the experts of a recorded run were loaded"),
    "sequences": ("tools.sequences", "report what balancing the attention of documents would gain and move"),
}
USAGE = """usage: megatron-ep COMMAND ...

Megatron-Core MoE training through compiled expert-parallel dispatch.

commands:
{}

megatron-ep COMMAND --help shows the options, megatron-ep --version the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 2 for a user's mistake, 1 for a failed run, 128 + N for signal N."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE.format("\n".join(f"  {name:<9} {what}" for name, (_, what) in COMMANDS.items())))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megatron-ep {importlib.metadata.version('megatron_ep')}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"megatron-ep: no command {arguments[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[arguments[0]]
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
    stores = sys.modules.get("megatron_ep.meeting.stores")
    if stores is not None and stores.has_abandoned_calls():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()

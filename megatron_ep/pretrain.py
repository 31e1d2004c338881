"""`python -m megatron_ep.pretrain [--ep-...] SCRIPT ARGS...`: runs a training script of Megatron with this dispatcher.

The script runs unchanged as __main__, with Megatron-LM 0.16.1 or later: every MoE layer that it builds, in GPT and
hybrid models, multi-token-prediction blocks and any pipeline stage, uses `EPTokenDispatcher`. Works in a single
process, under `torchrun -m` and in Slurm's job steps. This module is an entry point and is not imported.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import importlib.util
import json
import os
import runpy
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_ep.config import SETTING_NAMES, Config, nearest_name
from megatron_ep.diagnosis import failures
from megatron_ep.errors import EPError, EPStuckError
from megatron_ep.megatron.options import NAMES, Options

if TYPE_CHECKING:
    from megatron_ep.megatron.flags import Translation

EXIT_S = 2.0  # seconds that exit handlers may take after a failed call
PATIENCE_S = 5.0  # seconds in which torchrun ends the other ranks of a machine, which refuse the same command
SCRIPT_PACKAGES = {"psutil", "regex", "six", "yaml"}  # that megatron-core does not bring: the extra `script`
RAISE_S = 3.0  # seconds in which a call must raise a failure that is known in this process

FLAGS: dict[str, dict[str, Any]] = {  # by fields of Config and of Options
    "num_sms": dict(type=int, metavar="SMS", help="SMs that dispatch and combine use on a GPU"),
    "timeout": dict(type=float, metavar="SECONDS", help="seconds that one wait for another rank may take"),
    "row_bytes": dict(
        type=int,
        metavar="BYTES",
        help="of the largest row, H times the size of an element (default: as the first layer has)",
    ),
    "moe_expert_rank_capacity_factor": dict(
        type=float, metavar="F", help="room for F times the rows of an even load, and no wait of the host for counts"
    ),
    "moe_apply_probs_on_combine": dict(action="store_true", default=None, help="combine applies the probabilities"),
    "moe_dispatch_fwd_dtype": dict(choices=("fp8",), help="rows travel to the experts as e4m3"),
    "moe_combine_bwd_dtype": dict(
        choices=("fp8",), help="gradients travel to the experts as Transformer Engine rounds them"
    ),
    "moe_low_latency_max_tokens": dict(
        type=int, metavar="N", help="decoding steps of at most N tokens a rank go in one hop"
    ),
    "moe_chunks": dict(type=int, choices=(1, 2), help="2: half of the tokens travel while experts compute the others"),
}
assert {*FLAGS} == {*SETTING_NAMES, *NAMES}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the script in this process, as rank RANK of WORLD_SIZE; exits with status 2 for a user's mistake."""
    options, moved = _options(sys.argv[1:] if argv is None else argv)
    from megatron_ep.meeting import job

    script = Path(options.script)
    if not script.is_file():
        _refuse(f"no script {script}")
    sys.path.insert(0, str(script.parent.resolve()))  # the script's Megatron precedes an installed one
    try:
        job.adopt()
        arguments, settings, notes = _checked(options, moved)
    except ValueError as error:
        _refuse(str(error))
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(f"megatron_ep: {note}", flush=True)
    _enable(options, arguments, settings)
    _run(script, arguments)


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options, also those after the script, and a line for each of the latter."""
    behind = _Parser(add_help=False, allow_abbrev=False)
    flags = _add_options(behind)
    for flag in (word.partition("=")[0] for word in argv):
        meant = nearest_name(flag, flags)
        if flag.startswith("--ep-") and flag not in flags and meant:  # Megatron has others that begin so
            _refuse(f"no option {flag}{meant}")
    options = _parser().parse_args(argv)
    moved = [word.partition("=")[0] for word in options.arguments]
    moved = [f"{flag}: taken, though it stands behind the script" for flag in moved if flag in flags]
    _, options.arguments = behind.parse_known_args(options.arguments, options)
    return options, moved


def _checked(options: argparse.Namespace, moved: Sequence[str] = ()) -> tuple[list[str], dict[str, Any], list[str]]:
    """Returns the script's arguments, the given settings and options, and a line for each translated flag.

    Raises ValueError that names all mistakes, and the corrected command.
    """
    from megatron_ep.megatron import flags

    given = {name: getattr(options, f"ep_{name}") for name in FLAGS}
    settings = {name: value for name, value in given.items() if value is not None}
    found = flags.translated(
        options.arguments, options.ep_router == "fused", settings.get("num_sms"), options.ep_experts == "grouped"
    )
    notes = [*moved, *found.notes]
    wrong = found.refusals + [f"--ep-strict: {note}" for note in notes if options.ep_strict]
    correction = _command(options, found) if wrong else None
    checks: list[Callable[[], object]] = [
        lambda: Config(1, **{name: value for name, value in settings.items() if name in SETTING_NAMES}),
        lambda: Options(**{name: value for name, value in settings.items() if name in NAMES}),
        lambda: flags.fitting_timeout(found.arguments, settings.get("timeout")),
        *([] if options.ep_host else [_require_gpu]),
    ]
    for check in checks:
        try:
            check()
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n  ".join(wrong) + (f"\ncorrected: {correction}" if correction else ""))
    timeout = flags.fitting_timeout(found.arguments, settings.get("timeout"))
    for name, value in (("num_sms", found.num_sms), ("timeout", timeout)):
        if value is not None:
            settings[name] = value
    return found.arguments, settings, notes


def _require_gpu() -> None:
    """Raises ValueError if there is no GPU that this build can use."""
    import torch

    from megatron_ep.fabrics import gpu

    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} finds no GPU on this machine; --ep-host runs without one")
    gpu.check_device("cuda:0")


def _command(options: argparse.Namespace, found: Translation) -> str:
    """Returns the command without refused flags, and with translated ones."""
    given = vars(options) | ({} if found.fused_router else {"ep_router": "megatron"})
    if found.num_sms is not None:
        given["ep_num_sms"] = found.num_sms
    words = ["python", "-m", "megatron_ep.pretrain"]
    for name, value in given.items():
        is_switch = isinstance(value, bool)
        if name.startswith("ep_") and value is not None and value != "megatron" and not (is_switch and not value):
            words += [f"--{name.replace('_', '-')}", *([] if is_switch else [str(value).lower()])]
    return shlex.join([*words, options.script, *found.arguments])


def _enable(options: argparse.Namespace, arguments: list[str], settings: dict[str, Any]) -> None:
    """Installs the dispatcher and the other options in Megatron."""
    from megatron_ep.megatron import flags

    if {flags.OVERLAP, flags.DELAYED_WEIGHTS} & {*arguments} or settings.get("moe_chunks", 1) > 1:
        # Two streams that share one hardware queue do not overlap.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if options.ep_host:
        from megatron_ep.megatron.stand_ins import host_script

        host_script.enable()

    from megatron_ep.megatron import announce, plugin, shared_buffers

    router = None
    if options.ep_router == "fused":
        from megatron_ep.megatron.router import fused_router

        router = fused_router
    shared_buffers.configure(**settings)
    announce.show()
    plugin.enable(router, options.ep_experts)
    if options.ep_trace is not None:
        from megatron_ep.megatron import routing_trace

        try:
            routing_trace.enable(options.ep_trace)
        except ValueError as error:
            _refuse(f"--ep-{error}")
    if options.ep_sequences:
        from megatron_ep.megatron import attention

        attention.enable()
    if flags.RESTART in arguments and importlib.util.find_spec("nvidia_resiliency_ext"):  # else Megatron warns
        from megatron_ep.megatron import restart

        restart.enable()
    else:
        failures.watchers.append(_end_unless_raised)


def _run(script: Path, arguments: list[str]) -> None:
    from megatron_ep.megatron import shared_buffers
    from megatron_ep.normal import row_limit

    sys.argv = [str(script), *arguments]
    try:
        with row_limit.explained(), shared_buffers.abort_peers_on_error():
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:  # Megatron also raises it after success
        if end.code:
            raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in SCRIPT_PACKAGES:
            _refuse(f"{script} needs {error.name}: pip install 'megatron_ep[megatron,script]'")
        if isinstance(error, EPError) or failures.has_unseen():
            _end_process(error)
        raise
    finally:
        _free_graphs()


def _free_graphs() -> None:
    """Frees Megatron's graphs of a full iteration: NCCL does not give up a communicator, and so this process would not
    end, as long as a graph holds kernels of it."""
    graphs = sys.modules.get("megatron.core.full_cuda_graph")
    if graphs is not None:
        graphs.FullCudaGraphWrapper.cuda_graph.update(training=None, validation=None)


def _end_process(error: Exception) -> None:
    """Ends this process with status 1 after a failed call, because its usual exit waits for the GPU, which may wait for
    a rank that never comes."""
    sys.excepthook(type(error), error, error.__traceback__)
    _finish_publishing()
    if not isinstance(error, EPStuckError):  # after it nothing may use the GPU
        timer = threading.Timer(EXIT_S, os._exit, [1])
        timer.daemon = True
        timer.start()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _finish_publishing() -> None:
    """Waits until the store of torch.distributed has the failure of this process, for ranks that hear of it there."""
    from megatron_ep.megatron import agreement

    agreement.finish_publishing()


def _end_unless_raised(cause: str) -> None:
    """Ends this process if no call raises a known failure, because the main thread waits in another library for a rank
    that never comes."""

    def end() -> None:
        if failures.has_unseen():
            print(f"megatron_ep.pretrain: {cause}\nThis process is inside another wait, and ends:", file=sys.stderr)
            faulthandler.dump_traceback(file=sys.stderr)
            _finish_publishing()
            os._exit(1)

    timer = threading.Timer(RAISE_S, end)
    timer.daemon = True
    timer.start()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _refuse(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m megatron_ep.pretrain",
        description="Runs a training script of Megatron's with this project's token dispatcher in every MoE layer.",
        epilog="example: torchrun --nproc-per-node 8 -m megatron_ep.pretrain --ep-num-sms 16 pretrain_gpt.py ...",
        allow_abbrev=False,
    )
    _add_options(parser)
    parser.add_argument("script", metavar="SCRIPT", help="for example pretrain_gpt.py")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="of the script")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> list[str]:
    """Adds the options to a parser. Returns their flags."""
    parser.add_argument(
        "--ep-router",
        choices=("megatron", "fused"),
        default="megatron",
        help="fused: this project's router, whose choices go straight to the dispatcher (default: Megatron's)",
    )
    parser.add_argument(
        "--ep-experts",
        choices=("megatron", "grouped"),
        default="megatron",
        help="grouped: a rank's experts as two grouped products, whose counts stay on the GPU (default: Megatron's)",
    )
    parser.add_argument("--ep-host", action="store_true", help="run on a machine without a GPU")
    parser.add_argument(
        "--ep-sequences",
        action="store_true",
        help="attention of packed sequences on whatever rank of its DP x CP group has time",
    )
    parser.add_argument(
        "--ep-trace",
        metavar="DIR",
        help="receives how many tokens each router sends to each expert, for megatron-ep balance",
    )
    parser.add_argument(
        "--ep-strict", action="store_true", help="refuse flags of the script that would be translated or have no effect"
    )
    for name, how in FLAGS.items():
        parser.add_argument(f"--ep-{name.replace('_', '-')}", **how)
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--ep-")]


def _refuse(message: str) -> NoReturn:
    text = f"megatron_ep.pretrain: {message}"
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # torchrun prints the report of the rank that ended first
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(PATIENCE_S)
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(report).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
    print(text, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()

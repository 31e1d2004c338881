"""Runs of Megatron-LM's pretrain_gpt.py on the host, many of them from one process that has imported everything once.

`python pretrain_gpt_runs.py TREE` reads a job a line (JSON, see `Scripts.run`), forks its ranks, which are
`python pretrain_gpt_runs.py TREE JOB`, and answers with "done" or what went wrong.
"""

import contextlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import rank_processes
import torch
import torch.distributed.checkpoint
from rank_processes import Program
from waits import within

PACKED = "--packed-mock-data"  # ours, not the script's: see packed_sequences.py
HYBRID = "--hybrid-override-pattern"
STALLED = "--stalled-combine"  # ours: the number of a combine; rank 1 stays away from its backward pass for STALL_S
STALL_S = 6.0
PLUGIN = "plugin"
LIMIT = 200.0  # seconds for one job
TINY = """
    --use-cpu-initialization --transformer-impl local --distributed-backend gloo --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
    --no-gradient-accumulation-fusion --hidden-dropout 0 --attention-dropout 0
    --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 2
    --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8 --num-workers 0
    --no-create-attention-mask-in-dataloader --micro-batch-size 2 --global-batch-size 16 --lr-decay-style constant
    --clip-grad 1000 --eval-iters 0 --eval-interval 1000 --log-interval 1 --ckpt-format torch_dist --optimizer sgd
    --sgd-momentum 0 --lr 1 --min-lr 1 --weight-decay 0
"""


class Scripts:
    """A process that has imported Megatron-LM's tree and runs jobs. A context manager."""

    def __init__(self, tree, out):
        self._out = out
        environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONWARNINGS": "ignore"}
        # Python 3.11.0 to 3.11.3 pickle enums, which Megatron's checkpoints hold, as torch.load refuses by default.
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        self._server = Program([__file__, tree], environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.kill()  # between jobs it holds nothing
        self._server.wait()

    def run(self, name, world, *flags, ep_flags=()):
        """Trains and returns what each rank recorded.

        world: ranks. flags: of pretrain_gpt.py, after TINY. ep_flags: of megatron_ep.pretrain; (PLUGIN,): by the plugin
            alone; None: without this project.
        """
        out = self._out / name
        out.mkdir(parents=True)
        flags = [str(flag) for flag in flags]
        job = {
            "out": str(out),
            "world": world,
            "flags": TINY.split() + flags,
            "ep_flags": None if ep_flags is None else list(ep_flags),
        }
        print(json.dumps(job), file=self._server.stdin, flush=True)
        answer = self._server.read_line(2 * LIMIT).rstrip("\n")
        if answer != "done":
            raise AssertionError(f"{name}: {answer or 'the process died'}\n{tail(out)}")
        return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(world)]

    def text(self, name, rank=0):
        """What a rank of that job printed."""
        return (self._out / name / f"rank{rank}.log").read_text()


def tail(out):
    return "\n".join(
        f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in sorted(out.glob("*.log"))
    )


def serve(tree):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, tree)
    from megatron_ep.megatron.stand_ins import host_script

    torch.set_num_threads(1)
    host_script.enable()
    import context_attention
    import pretrain_gpt  # noqa: F401

    import megatron_ep.megatron.plugin
    import megatron_ep.megatron.router  # noqa: F401

    context_attention.install()

    for line in sys.stdin:
        print(_run(tree, line), file=answers, flush=True)


def _run(tree, line):
    job = json.loads(line)
    ranks = [
        Program(
            [__file__, tree, line],
            os.environ | place,
            log=Path(job["out"], f"rank{rank}.log"),
            before=os.setpgrp,
            from_here=True,
        )
        for rank, place in enumerate(rank_processes.job(job["world"]))
    ]
    within(LIMIT, lambda: any(rank.returncode for rank in ranks) or all(rank.returncode == 0 for rank in ranks))
    statuses = [rank.returncode for rank in ranks]
    for rank in ranks:
        rank.kill()
        with contextlib.suppress(ProcessLookupError):  # the processes that help it to write checkpoints outlive it
            os.killpg(rank.pid, signal.SIGKILL)
    return "done" if not any(statuses) and None not in statuses else f"exit statuses of ranks: {statuses}"


def train(tree, line):
    """One rank of a job."""
    job, script = json.loads(line), Path(tree, "pretrain_gpt.py")
    _prepare(job["flags"])
    record = recorded_steps()
    if job["ep_flags"] in (None, [PLUGIN]):
        if job["ep_flags"]:
            from megatron_ep.megatron import plugin

            plugin.enable()
        sys.argv = [str(script), *job["flags"]]
        runpy.run_path(str(script), run_name="__main__")
    else:
        from megatron_ep import pretrain

        pretrain.main(["--ep-host", *job["ep_flags"], str(script), *job["flags"]])
    torch.save(record, Path(job["out"], f"rank{os.environ['RANK']}.pt"))


def _prepare(flags):
    """What a job's flags ask for and this machine lacks."""
    if "--fp8-format" in flags:  # Megatron asks Transformer Engine's version, and then, without it, for nothing else
        from megatron.core import utils
        from packaging.version import Version

        utils.get_te_version = lambda: Version("2.2")
    if HYBRID in flags:
        import hybrid_stack

        hybrid_stack.train_it()
        for flag in ("--mtp-num-layers", "--mtp-loss-scaling-factor"):  # Megatron 0.16 has none in such a model
            at = flags.index(flag)
            del flags[at : at + 2]
    if STALLED in flags:
        at = flags.index(STALLED)
        _, number = flags[at : at + 2]
        del flags[at : at + 2]
        _stall(int(number))
    if PACKED in flags:
        import packed_sequences

        at = flags.index(PACKED)
        flags[at : at + 1] = packed_sequences.FLAGS
        packed_sequences.pack_mock_data()
        packed_sequences.take_documents()


def _stall(number):
    """The host's backend tells of a failure as late as a GPU."""
    from host_backends import LateBackend, with_backend

    from megatron_ep.megatron.dispatcher import EPTokenDispatcher

    with_backend(LateBackend).start()
    combine, calls = EPTokenDispatcher.token_combine, []

    def stalled(*args):
        output = combine(*args)
        calls.append(None)
        if len(calls) == number and os.environ["RANK"] == "1":
            output.register_hook(lambda _: time.sleep(STALL_S))
        return output

    EPTokenDispatcher.token_combine = stalled


def recorded_steps():
    """Takes down every step: the losses and the gradients' norm, and of the last one the gradients by parameter, how
    many tokens the rank had, and, with this project's dispatcher, how many rows each of its experts."""
    from megatron.training import training

    record = {"losses": [], "norms": [], "gradients": {}, "dispatchers": [], "tokens": 0, "rows": []}
    step = training.train_step

    def recorded(*args, **kwargs):
        result = step(*args, **kwargs)
        losses, model = result[0], args[2]
        record["losses"].append({key: float(value) for key, value in losses.items()})
        record["norms"].append(float(result[5]))
        for stage, chunk in enumerate(model):
            for name, parameter in chunk.named_parameters():
                record["gradients"][f"{stage}.{name}"] = parameter.main_grad.clone()
        dispatchers = [
            module.token_dispatcher
            for chunk in model
            for module in chunk.modules()
            if getattr(module, "token_dispatcher", None) is not None
        ]
        record["dispatchers"] = [type(dispatcher).__name__ for dispatcher in dispatchers]
        record["tokens"] = max((dispatcher.hidden_shape[0] for dispatcher in dispatchers), default=0)
        counts = [getattr(dispatcher, "_comm_manager", None) for dispatcher in dispatchers]
        record["rows"] = [rows.get_number_of_tokens_per_expert().tolist() for rows in counts if rows is not None]
        return result

    training.train_step = recorded
    return record


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) == 2 else train(*sys.argv[1:])

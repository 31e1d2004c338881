"""Runs of Megatron-LM's pretrain_gpt.py on the host, many of them from one process that has imported everything once.

As a program: `python script_ranks.py TREE` reads a job a line (JSON, see `Scripts.run`), forks its ranks, and answers
with a line that is empty or says what went wrong.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint
from ports import free_port

PACKED = "--packed-mock-data"  # ours, not the script's: see packed_sequences.py
HYBRID = "--hybrid-override-pattern"
STALLED = "--stalled-combine"  # ours: the number of a combine; rank 1 stays away from its backward pass for STALL_S
STALL_S = 6.0
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
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()  # between jobs it holds nothing
        self._process.wait()

    def run(self, name, world, *flags, ep_flags=()):
        """Trains and returns what each rank recorded.

        world: ranks. flags: of pretrain_gpt.py, after TINY. ep_flags: of megatron_ep.pretrain; None: without this
            project.
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
        print(json.dumps(job), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().rstrip("\n")
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
        print(_run(Path(tree, "pretrain_gpt.py"), json.loads(line)), file=answers, flush=True)


def _run(script, job):
    port = free_port()
    children = {}
    for rank in range(job["world"]):
        pid = os.fork()
        if pid == 0:
            _become_rank(script, job, rank, port)
        children[pid] = rank
    groups = list(children)
    deadline = time.monotonic() + LIMIT
    outcome = "done"
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            if time.monotonic() < deadline:
                continue
            outcome = f"ranks {sorted(children.values())} were not done after {LIMIT} s"
        else:
            rank = children.pop(pid)
            if status == 0:
                continue
            if outcome == "done":
                outcome = f"rank {rank} failed"
        for other in children:
            os.kill(other, signal.SIGKILL)
    for group in groups:  # the processes that help a rank to write checkpoints outlive it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    return outcome


def _become_rank(script, job, rank, port):
    code = 1
    os.setpgid(0, 0)
    try:
        out = Path(job["out"])
        log = os.open(out / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["world"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        _prepare(job["flags"])
        record = recorded_steps()
        if job["ep_flags"] is None:
            import runpy

            sys.argv = [str(script), *job["flags"]]
            runpy.run_path(str(script), run_name="__main__")
        else:
            from megatron_ep import pretrain

            pretrain.main(["--ep-host", *job["ep_flags"], str(script), *job["flags"]])
        torch.save(record, out / f"rank{rank}.pt")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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
    from late import late

    from megatron_ep.megatron.dispatcher import EPTokenDispatcher

    late().start()
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
    serve(sys.argv[1])

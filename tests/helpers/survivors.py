"""Four ranks, 2x2, that dispatch and combine until something happens to one of them."""

import os
import re
import signal
import time

import torch.distributed as dist
from modes import HOST, MODES, W
from rank_processes import LinkedProcess

import megatron_ep as ep

ENDED = r"rank \d stopped waiting: rank 1 .*; the process of rank 1 has ended"


def run_rank(rank, folder, mode, place, timeout, variables, told):
    """Tells when it runs, and the error that ends it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    os.environ.update(variables)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=W)
    calls = MODES[mode](place, timeout=timeout)
    own = calls.own(3)
    calls.dispatch(*own)  # a GPU loads its kernels now
    told.send("ready")
    try:
        while True:
            calls.combine(calls.dispatch(*own))
    except (ep.EPError, KeyboardInterrupt) as error:
        told.send(f"{type(error).__name__} {error}")
    os._exit(0)


def start(folder, mode="normal", place=HOST, timeout=30.0, **variables):
    """The ranks, once all of them run. variables: of their environment."""
    ranks = [LinkedProcess(run_rank, rank, folder, mode, place, timeout, variables) for rank in range(W)]
    for rank in ranks:
        assert rank.hear() == "ready"
    time.sleep(0.3)
    return ranks


def finish(ranks):
    """What each rank has told of its end; None: it was killed."""
    try:
        said = []
        for rank in ranks:
            status = rank.wait(60)
            assert status in (0, -signal.SIGKILL)
            said.append(rank.hear() if status == 0 else None)
        return said
    finally:
        for rank in ranks:
            rank.kill()


def check_killed(folder, mode="normal", place=HOST, cause=ENDED, **variables):
    """SIGKILL to one rank: the others name it, long before they would time out."""
    ranks = start(folder, mode, place, **variables)
    ranks[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    said = finish(ranks)
    assert time.monotonic() - killed < 15
    # whatever it was doing, and whichever other ranks the others wait for
    verdict = re.compile(f"EPAbortError {cause}[\n;]")
    assert said[1] is None and all(verdict.match(said[rank]) for rank in (0, 2, 3)), said


def check_interrupted(folder, mode="normal", place=HOST):
    """Ctrl-C on one rank while it waits: all end, and the others say whose it was."""
    ranks = start(folder, mode, place)
    ranks[2].send_signal(signal.SIGSTOP)  # so that the others certainly wait
    time.sleep(1.0)
    ranks[0].send_signal(signal.SIGINT)
    ranks[0].wait(60)
    ranks[2].send_signal(signal.SIGCONT)
    said = finish(ranks)
    assert said[0].startswith("KeyboardInterrupt"), said
    assert all(re.match("EPAbortError .*rank 0 was interrupted", said[rank], re.DOTALL) for rank in (1, 2, 3)), said

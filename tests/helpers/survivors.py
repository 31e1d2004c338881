"""Four ranks, 2x2, that dispatch and combine until something happens to one of them."""

import os
import re
import signal
import textwrap
import time

from rank_processes import RANK_ENVIRONMENT, Program

SURVIVOR = """
    import sys, os, signal, torch, torch.distributed as dist
    import megatron_ep as ep
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
    rank, store, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=4)
    config = ep.Config(num_experts=8, timeout=30, num_sms=2)
    buffer = ep.Buffer(None, config, ep.Topology(2, 2), device=device)
    x = torch.ones(64, 16, device=device)
    ids = torch.rand(64, 8, device=device).topk(3, dim=1).indices
    ep.dispatch(x, ids, buffer=buffer)  # a GPU loads its kernels now
    print("ready", flush=True)
    try:
        while True:
            rows = ep.dispatch(x, ids, buffer=buffer)
            ep.combine(rows.x, rows.handle)
    except ep.EPTimeoutError as error:
        print("EPTimeoutError", error, flush=True)
        os._exit(7)
    except KeyboardInterrupt:
        os._exit(8)
    except ep.EPAbortError as error:
        print("EPAbortError", error, flush=True)
        os._exit(9)
"""


def in_mode(mode):
    """The script in one of `modes.MODES`."""
    if mode == "low latency":
        return with_low_latency(SURVIVOR)
    return SURVIVOR.replace("ep.Config(", "ep.Config(max_tokens=64, ") if mode == "one hop" else SURVIVOR


def with_low_latency(script):
    """The same with the low-latency mode's dispatches and combines."""
    changed = script.replace("ep.dispatch(x, ids, buffer=buffer)", "low_latency.dispatch(x, ids)")
    changed = changed.replace("ep.combine(", "low_latency.combine(")
    made = "    low_latency = ep.LowLatency(buffer, max_tokens=64, hidden=16, topk=3, dtype=torch.float32)\n"
    before = "    x = torch.ones("
    assert "low_latency.dispatch" in changed and "low_latency.combine" in changed and before in changed
    return changed.replace(before, made + before)


def start_survivors(tmp_path, device="cpu"):
    script = textwrap.dedent(SURVIVOR)
    environment = os.environ | RANK_ENVIRONMENT
    processes = [Program(["-c", script, rank, tmp_path / "store", device], environment) for rank in range(4)]
    for process in processes:
        assert process.read_line() == "ready\n", process.stderr.read()
    time.sleep(0.3)
    return processes


def finish(processes):
    """Exit statuses and what the ranks printed."""
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        return [process.returncode for process in processes], outputs
    finally:
        for process in processes:
            process.kill()


def check_killed(tmp_path, device="cpu", cause=r"rank \d stopped waiting: rank 1 .*; the process of rank 1 has ended"):
    """SIGKILL to one rank: the others name it, long before they would time out."""
    processes = start_survivors(tmp_path, device)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    statuses, outputs = finish(processes)
    assert time.monotonic() - killed < 15
    assert statuses == [9, -signal.SIGKILL, 9, 9], outputs
    # whatever it was doing, and whichever other ranks the others wait for
    verdict = re.compile(f"EPAbortError {cause}[\n;]")
    assert all(verdict.search(outputs[rank]) for rank in (0, 2, 3)), outputs


def check_interrupted(tmp_path, device="cpu"):
    """Ctrl-C on one rank while it waits: all end, and the others say whose it was."""
    processes = start_survivors(tmp_path, device)
    processes[2].send_signal(signal.SIGSTOP)  # so that the others certainly wait
    time.sleep(1.0)
    processes[0].send_signal(signal.SIGINT)
    processes[0].wait(60)
    processes[2].send_signal(signal.SIGCONT)
    statuses, outputs = finish(processes)
    assert statuses == [8, 9, 9, 9], outputs
    assert all("rank 0 was interrupted" in outputs[rank] for rank in (1, 2, 3)), outputs


def masking(script):
    """The script of `with_low_latency` with dead ranks masked: 20 calls after one was, all is well."""
    changed = script.replace("dtype=torch.float32)", 'dtype=torch.float32, on_dead_rank="mask", mask_timeout=2.0)')
    loop = """    while True:
            rows = low_latency.dispatch(x, ids)
            low_latency.combine(rows.x, rows.handle)
"""
    until = """    after = 0
        while after < 20:
            rows = low_latency.dispatch(x, ids)
            y = low_latency.combine(rows.x, rows.handle)
            after += bool(low_latency.masked_ranks())
        kept = (ids // 2 != 1).sum(dim=1, keepdim=True)
        assert torch.equal(y, kept * x), "not the sum of what is left"
        print("masked", low_latency.masked_ranks(), flush=True)
        buffer.close()
        os._exit(5)
"""
    assert loop in changed and "masked" not in script
    return changed.replace(loop, until)


def check_masked(tmp_path, device="cpu"):
    """SIGKILL to one rank: the others go on without it."""
    processes = start_survivors(tmp_path, device)
    processes[1].send_signal(signal.SIGKILL)
    statuses, outputs = finish(processes)
    assert statuses == [5, -signal.SIGKILL, 5, 5], outputs
    assert all(outputs[rank] == "masked [1]\n" for rank in (0, 2, 3)), outputs

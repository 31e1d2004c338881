"""`python restarted_rank.py PORT`: rank RANK of two under nvidia-resiliency-ext's in-process restart. In the first run
rank 1 fails while rank 0 waits for it in a dispatch with an hour of patience; in the second both train. Prints what
happened, a line each."""

import os
import sys
import time
from datetime import timedelta

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep.megatron import restart, shared_buffers

RANK, PORT = int(os.environ["RANK"]), int(sys.argv[1])


def step():
    buffer = shared_buffers.shared_buffer(dist.group.WORLD, 4, torch.device("cpu"))
    ids = torch.arange(6).view(6, 1) % 4
    rows = ep.dispatch(torch.full((6, 8), 1.0 + RANK), ids, buffer=buffer)
    return ep.combine(rows.x * 2, rows.handle)


def train(store, call: inprocess.CallWrapper = None):
    run = call.iteration
    fresh = dist.PrefixStore(str(run), store)
    dist.init_process_group("gloo", store=fresh, rank=RANK, world_size=2, timeout=timedelta(seconds=30))
    first = step()
    if run == 0 and RANK == 1:
        time.sleep(0.5)  # the other one certainly waits
        raise ZeroDivisionError
    started = time.monotonic()
    try:
        second = step()
    except ep.EPAbortError as error:
        print(f"run {run}: {time.monotonic() - started:.0f} s, EPAbortError {error}", flush=True)
        raise
    assert torch.equal(first, second) and torch.equal(first, torch.full((6, 8), 2.0 + 2 * RANK))
    print(f"run {run}: trained with {len(shared_buffers._buffers)} buffer", flush=True)
    shared_buffers.close_buffers()
    dist.destroy_process_group()


if __name__ == "__main__":
    shared_buffers.configure(timeout=3600)
    restart.enable()
    restart.enable()  # does nothing more
    second = timedelta(seconds=1)
    tenth = second / 10
    wrapped = inprocess.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": PORT, "timeout": 30 * second},
        abort=inprocess.abort.AbortTorchDistributed(),
        monitor_thread_interval=tenth,
        monitor_process_interval=tenth,
        progress_watchdog_interval=tenth,
        heartbeat_interval=second,
        last_call_wait=tenth,
        soft_timeout=20 * second,
        hard_timeout=30 * second,
    )(train)
    store = dist.TCPStore("127.0.0.1", PORT + 1, 2, RANK == 0, timeout=30 * second)
    wrapped(store)
    if RANK == 0:
        store.wait(["the other is done"])
    else:
        store.set("the other is done", "")

"""Four ranks of which one is killed, masked by the others, started again and taken back, and then another one."""

import contextlib
import multiprocessing
import signal

import torch
import torch.distributed as dist

import megatron_ep as ep

W, EXPERTS, HIDDEN, TOKENS, TOPK = 4, 8, 16, 64, 3
KILLED = (1, 2)  # one after the other
CONFIG = ep.Config(num_experts=EXPERTS, timeout=10)
SETTINGS = {"max_tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK, "dtype": torch.float32}
SETTINGS |= {"on_dead_rank": "mask", "mask_timeout": 2}


def run_rank(rank, folder, nodes, born, told):
    """born: 0, or the number of the comeback that this process is. told: hears whenever all is well on this rank."""
    topology = ep.Topology(nodes, W // nodes)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=1).indices

    def check(low_latency, dead=-1):
        received = low_latency.dispatch(x, ids)
        y = low_latency.combine(received.x, received.handle)
        torch.testing.assert_close(y, (ids // (EXPERTS // W) != dead).sum(dim=1, keepdim=True) * x)

    def check_whole(low_latency):
        for _ in range(5):
            check(low_latency)
        assert low_latency.masked_ranks() == [] and low_latency.active_ranks.tolist() == [1] * W
        assert not low_latency.dropped_picks.any()
        rows = ep.dispatch(x, ids, buffer=low_latency.buffer)
        torch.testing.assert_close(ep.combine(rows.x, rows.handle), TOPK * x)
        told.send("whole")

    if born == 0:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=W)
        low_latency = ep.LowLatency(ep.Buffer(None, CONFIG, topology), **SETTINGS)
        check_whole(low_latency)
    for time, dead in enumerate(KILLED, 1):
        store = dist.FileStore(f"{folder}/comeback {time}")
        if time == born:
            low_latency = ep.rejoin(store, rank, W, CONFIG, topology, **SETTINGS)
        elif time > born and rank == dead:
            while True:
                low_latency.dispatch(x, ids)  # until it is killed
        elif time > born:
            handle = None
            while not low_latency.masked_ranks():
                handle = low_latency.dispatch(x, ids).handle
            check(low_latency, dead)
            assert low_latency.masked_ranks() == [dead]
            low_latency.readmit(dead, store)
            try:
                handle.check()
                raise AssertionError("its dispatch was without a rank")
            except ValueError as error:
                assert "left masked ranks out" in str(error), error
        if time >= born:
            check_whole(low_latency)
    low_latency.buffer.close()


def rejoin_in_vain(told, path, *arguments, **settings):
    try:
        ep.rejoin(dist.FileStore(path), *arguments, **settings)
    except ep.EPError as error:
        told.send(str(error))


@contextlib.contextmanager
def too_early(path, rank, config, topology, **settings):
    """A process that comes back as this rank. Gives what hears why it cannot."""
    context = multiprocessing.get_context("forkserver")
    hears, told = context.Pipe(duplex=False)
    arguments = (told, path, rank, W, config, topology)
    process = context.Process(target=rejoin_in_vain, args=arguments, kwargs=settings, daemon=True)
    process.start()
    try:
        yield hears
    finally:
        process.kill()


def check_comebacks(folder, nodes):
    context = multiprocessing.get_context("forkserver")
    processes = []

    def start(rank, born):
        hears, told = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(rank, folder, nodes, born, told), daemon=True)
        process.start()
        told.close()
        processes.append(process)
        return process, hears

    def hear(ranks):
        for rank, (_, hears) in enumerate(ranks):
            assert hears.poll(30), f"nothing is heard of rank {rank}"
            assert hears.recv() == "whole"

    try:
        ranks = [start(rank, 0) for rank in range(W)]
        hear(ranks)
        for time, dead in enumerate(KILLED, 1):
            ranks[dead][0].kill()
            ranks[dead][0].join()
            assert ranks[dead][0].exitcode == -signal.SIGKILL
            ranks[dead] = start(dead, time)
            hear(ranks)
        for process, _ in ranks:
            process.join(10)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()

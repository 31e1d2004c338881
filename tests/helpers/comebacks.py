"""Four ranks, of which some are killed, or come too late and end, masked by the others, started again and taken back,
one after the other."""

import os
import signal
from time import sleep

import torch
import torch.distributed as dist
from rank_processes import LinkedProcess

import megatron_ep as ep

W, EXPERTS, HIDDEN, TOKENS, TOPK = 4, 8, 16, 64, 3
CONFIG = ep.Config(num_experts=EXPERTS, timeout=10, num_sms=2)
SETTINGS = {"max_tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK, "dtype": torch.float32}
SETTINGS |= {"on_dead_rank": "mask", "mask_timeout": 2}


class Rank:
    """Its calls, and what they must give."""

    def __init__(self, rank, device):
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
            self._load_kernels()
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device)
        self.ids = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK, dim=1).indices.to(device)
        self.low_latency = self._graph = None

    @staticmethod
    def _load_kernels():
        """Which takes longer than a rank is waited for."""
        with ep.LocalCluster(1, 1, CONFIG, device="cuda") as cluster:
            low_latency = ep.LowLatency(cluster, **SETTINGS)
            x, ids = [torch.ones(1, HIDDEN, device="cuda")], [torch.zeros(1, 1, dtype=torch.int64, device="cuda")]
            received = low_latency.dispatch(x, ids)
            low_latency.combine(received.x, received.handle)
            rows = ep.dispatch(x, ids, buffer=cluster)
            ep.combine(rows.x, rows.handle)

    def trip(self):
        received = self.low_latency.dispatch(self.x, self.ids)
        return self.low_latency.combine(received.x, received.handle), received.handle

    def check(self, dead=-1):
        y, handle = self.trip()
        torch.testing.assert_close(y, (self.ids // (EXPERTS // W) != dead).sum(dim=1, keepdim=True) * self.x)
        return handle

    def check_whole(self):
        for _ in range(3):
            self.check()
        for _ in range(3):  # in a graph, where there is one
            if self._graph is None:
                self.check()
            else:
                self._y.zero_()
                self._graph.replay()
                torch.testing.assert_close(self._y, TOPK * self.x)
        assert self.low_latency.masked_ranks() == [] and self.low_latency.active_ranks.tolist() == [1] * W
        assert not self.low_latency.dropped_choices.any()
        rows = ep.dispatch(self.x, self.ids, buffer=self.low_latency.buffer)
        torch.testing.assert_close(ep.combine(rows.x, rows.handle), TOPK * self.x)

    def capture(self):
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._y, _ = self.trip()

    def lose(self, dead):
        """The handle of a dispatch without the dead rank."""
        while not self.low_latency.masked_ranks():
            self.trip()
            if self.x.is_cuda:
                torch.cuda.synchronize()
        handle = self.check(dead)
        assert self.low_latency.masked_ranks() == [dead]
        return handle


CUT_OFF = 7  # the exit status of a rank that came too late


def run_rank(rank, folder, nodes, lost, is_late, born, device, told):
    """lost: who is, one after the other: killed, or if is_late by coming too late. born: 0, or the number of the
    comeback that this process is. told: hears whenever all is well on this rank."""
    topology, own = ep.Topology(nodes, W // nodes), Rank(rank, device)
    if born == 0:
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=W)
        own.low_latency = ep.LowLatency(ep.Buffer(None, CONFIG, topology, device=device), **SETTINGS)
        own.check_whole()
        if device == "cuda":
            own.capture()
        told.send("whole")
    for time, dead in enumerate(lost, 1):
        store = dist.FileStore(f"{folder}/comeback {time}")
        if time == born:
            own.low_latency = ep.rejoin(store, rank, W, CONFIG, topology, device=device, **SETTINGS)
        elif time > born and rank == dead:
            if is_late:
                sleep(2 * SETTINGS["mask_timeout"])
            try:
                while True:
                    own.check()  # until it is killed
            except ep.EPMaskedError:
                assert is_late
                os._exit(CUT_OFF)
        elif time > born:
            handle = own.lose(dead)
            own.low_latency.readmit(dead, store)
            try:
                handle.check()
                raise AssertionError("its dispatch was without a rank")
            except ValueError as error:
                assert "left masked ranks out" in str(error), error
        if time >= born:
            own.check_whole()
            told.send("whole")
    own.low_latency.buffer.close()


def rejoin_in_vain(path, rank, config, topology, settings, told):
    """A process that comes back as this rank, and cannot."""
    try:
        ep.rejoin(dist.FileStore(path), rank, W, config, topology, **settings)
    except ep.EPError as error:
        told.send(str(error))


def check_comebacks(folder, nodes, killed=(), late=(), device="cpu", patience=60):
    processes = []

    def start(rank, born):
        arguments = (rank, folder, nodes, killed or late, bool(late), born, device)
        processes.append(LinkedProcess(run_rank, *arguments))
        return processes[-1]

    try:
        ranks = [start(rank, 0) for rank in range(W)]
        assert [rank.hear(patience) for rank in ranks] == ["whole"] * W
        for time, dead in enumerate(killed or late, 1):
            if killed:
                ranks[dead].kill()
            assert ranks[dead].wait(patience) == (-signal.SIGKILL if killed else CUT_OFF)
            ranks[dead] = start(dead, time)
            assert [rank.hear(patience) for rank in ranks] == ["whole"] * W
        assert [rank.wait(patience) for rank in ranks] == [0] * W
    finally:
        for process in processes:
            process.kill()

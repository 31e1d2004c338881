"""Inference that goes on when a rank dies: three of four ranks keep answering after the fourth has been killed.

    python examples/survivors.py

torchrun ends all ranks when one dies; this small supervisor leaves the others alone. `LowLatency.readmit` and
`megatron_ep.rejoin` take back a rank that was started again.
"""

import multiprocessing.synchronize
import os
import signal
import tempfile

import torch
import torch.distributed as dist

import megatron_ep as ep

RANKS, VICTIM, EXPERTS, TOPK, HIDDEN, TOKENS, STEPS_AFTER = 4, 1, 8, 3, 64, 16, 20


def serve(rank: int, store: str, ready: multiprocessing.synchronize.Semaphore) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    buffer = ep.Buffer(None, ep.Config(num_experts=EXPERTS, timeout=30))
    sizes = {"max_tokens": TOKENS, "hidden": HIDDEN, "topk": TOPK, "dtype": torch.float32}
    low_latency = ep.LowLatency(buffer, **sizes, on_dead_rank="mask", mask_timeout=5.0)
    dist.barrier()  # a rank that comes later than mask_timeout would be masked
    ready.release()
    torch.manual_seed(rank)
    x, ids = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS).topk(TOPK, dim=1).indices
    weights, steps = torch.full((TOKENS, TOPK), 1 / TOPK), 0
    while steps < STEPS_AFTER:
        received = low_latency.dispatch(x, ids)
        # The experts return what they get, so a token gets itself back. `renormalize`: with a choice lost, too.
        y = low_latency.combine(received.x, received.handle, weights, renormalize=True)
        masked = low_latency.masked_ranks()
        kept = torch.isin(ids // (EXPERTS // RANKS), torch.tensor(masked), invert=True).any(dim=1)
        if steps:  # in the step that masked it, dispatch may have had the rank and combine not
            torch.testing.assert_close(y[kept], x[kept])
        steps += bool(masked)
    print(f"rank {rank} took {steps} steps without ranks {masked}", flush=True)
    buffer.close()
    os._exit(0)  # gloo would wait for the dead rank


if __name__ == "__main__":
    context = multiprocessing.get_context("fork")  # what is imported above is imported once; no GPU is in use yet
    ready = context.Semaphore(0)  # who is killed in a Barrier may leave the others in it
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=serve, args=(i, f"{folder}/store", ready), daemon=True) for i in range(RANKS)]
        for process in ranks:
            process.start()
        assert all(ready.acquire(timeout=120) for _ in ranks)
        os.kill(ranks[VICTIM].pid, signal.SIGKILL)
        for process in ranks:
            process.join(timeout=60)
    assert (statuses := [process.exitcode for process in ranks]) == [0, -signal.SIGKILL, 0, 0], statuses
    print("the others went on")

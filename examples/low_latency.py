"""The low-latency mode: one decoding step with masked rows and a hook, then with grouped rows that travel as fp8.

    torchrun --standalone --nproc-per-node 4 examples/low_latency.py [--device cuda]

Expert e multiplies by e + 1, so that the sum over a token's experts is known.
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import float8

EXPERTS_OF_A_RANK, TOPK, HIDDEN, MAX_TOKENS = 2, 2, 256, 32

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
device = parser.parse_args().device
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
config = ep.Config(num_experts=EXPERTS_OF_A_RANK * world, timeout=30)
buffer = ep.Buffer(None, config, device=device)
low_latency = ep.LowLatency(buffer, max_tokens=MAX_TOKENS, hidden=HIDDEN, topk=TOPK)  # once; all shapes follow

torch.manual_seed(rank)
x = torch.randn(MAX_TOKENS - rank, HIDDEN, device=device, dtype=torch.bfloat16)
ids = torch.rand(len(x), config.num_experts, device=device).topk(TOPK, dim=1).indices
weights = torch.rand(len(x), TOPK, device=device)
factors = torch.arange(EXPERTS_OF_A_RANK, device=device) + rank * EXPERTS_OF_A_RANK + 1  # of this rank's experts
expected = x.float() * (weights * (ids + 1)).sum(dim=1, keepdim=True)

# Masked rows, x [L, W * MAX_TOKENS, H]: the first recv_counts[e] rows of expert e are there, the others hold
# anything. Between the two halves nothing runs: time for other work.
received, hook = low_latency.dispatch(x, ids, return_recv_hook=True)
shared = torch.nn.functional.silu(x)  # for example a shared expert
hook()  # from here on `received` is good
y = low_latency.combine(received.x * factors[:, None, None], received.handle, weights)
torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.05)

# Grouped rows, x [R, H]: the rows of expert e are x[expert_starts[e]:][:recv_counts[e]].
received = low_latency.dispatch(x, ids, layout="grouped", expert_alignment=8, fp8="fp32")
rows = float8.dequantize(received.x, received.scales, torch.bfloat16)  # or a GEMM that takes fp8 and scales
starts = received.expert_starts.tolist()  # on a GPU a grouped GEMM reads them on the device, and the host never waits
for expert, (begin, end) in enumerate(itertools.pairwise(starts)):
    rows[begin:end] *= factors[expert]
y = low_latency.combine(rows, received.handle, weights)
torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.3)  # e4m3 keeps three bits of a number

buffer.synchronize()  # raises what failed on a GPU
print(f"rank {rank} of {world}: {len(x)} tokens sent, {starts[-1]} rows received, every sum is right", flush=True)
buffer.close()
dist.destroy_process_group()

"""The same over processes: every process is a rank and runs the experts that it owns.

    torchrun --standalone --nproc-per-node 4 examples/torchrun.py [--nodes 2] [--device cuda]

On the CPU the processes share memory; on GPUs they map each other's heaps. Several machines need a network: NVSHMEM,
NCCL, a card or TCP.
"""

import argparse
import os

import torch
import torch.distributed as dist

import megatron_ep as ep

EXPERTS_OF_A_RANK, TOPK, HIDDEN, TOKENS = 2, 2, 64, 100

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=1, help="nodes that the ranks are dealt to")
parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
options = parser.parse_args()
if options.device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
num_experts = EXPERTS_OF_A_RANK * world

torch.manual_seed(rank)  # every rank has tokens of its own, and not equally many
x = torch.randn(TOKENS + rank, HIDDEN, device=options.device)
ids = torch.rand(len(x), num_experts, device=options.device).topk(TOPK, dim=1).indices

topology = ep.Topology(options.nodes, world // options.nodes)
config = ep.Config(num_experts=num_experts, timeout=30)
with ep.Buffer(None, config, topology, device=options.device) as buffer:
    received = ep.dispatch(x, ids, buffer=buffer)
    # expert e multiplies by e + 1, so that the sum over a token's experts is known
    scales = torch.arange(EXPERTS_OF_A_RANK, device=options.device) + rank * EXPERTS_OF_A_RANK + 1
    rows = received.x * scales.repeat_interleave(received.tokens_per_expert.to(options.device)).unsqueeze(1)
    y = ep.combine(rows, received.handle)
    buffer.synchronize()

torch.testing.assert_close(y, x * (ids + 1).sum(dim=1, keepdim=True))
print(f"rank {rank} of {world}: {len(x)} tokens sent, {len(received.x)} rows received, every sum is right", flush=True)
dist.destroy_process_group()

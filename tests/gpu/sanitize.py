"""Small cases on every path of the kernels, for compute-sanitizer, which takes a program and slows it down a lot."""

import torch

import megatron_ep as ep
from megatron_ep.buffer.arguments import summable_dtypes

# Rows for the copy engine, for vectors, and for neither.
ROWS = ((1536, torch.bfloat16), (64, torch.float32), (33, torch.float16), (3, torch.float64))


def main() -> None:
    torch.zeros(1, device="cuda").cpu()
    print("the GPU answers", flush=True)  # so this tool works here
    generator = torch.Generator().manual_seed(0)
    for nodes, ranks_per_node in ((1, 2), (2, 2)):
        world, experts = nodes * ranks_per_node, 8
        config = ep.Config(
            num_experts=experts,
            num_sms=2,
            timeout=60,
            tuning=ep.Tuning(channels=2, nvl_ring_bytes=16 << 10, rdma_ring_bytes=32 << 10),
        )
        with ep.LocalCluster(nodes, ranks_per_node, config, device="cuda") as cluster:
            for hidden, dtype in (row for row in ROWS if row[1] in summable_dtypes("cuda")):
                ids = [torch.rand(9, experts, generator=generator).topk(3, dim=1).indices.cuda() for _ in range(world)]
                x = [torch.randint(-4, 5, (9, hidden), generator=generator).to(dtype).cuda() for _ in range(world)]
                weights = [torch.rand(9, 3, generator=generator).cuda() for _ in range(world)]
                rows = ep.dispatch(x, ids, weights, buffer=cluster, expert_alignment=4)
                for y, token in zip(ep.combine(rows.x, rows.handle), x, strict=True):
                    assert torch.equal(y, 3 * token)
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                halves = [torch.full((len(r),), 0.5, dtype=wide, device="cuda") for r in rows.x]
                for y, token in zip(ep.combine(rows.x, rows.handle, halves), x, strict=True):
                    assert torch.equal(y, 1.5 * token)
                ep.dispatch(x, ids, weights, buffer=cluster, max_recv_tokens=7)
            low_latency_round_trip(cluster, generator)
            cluster.synchronize()
            print(f"{nodes} x {ranks_per_node}: done", flush=True)


def low_latency_round_trip(cluster: ep.LocalCluster, generator: torch.Generator) -> None:
    world, experts = cluster.topology.world_size, cluster.config.num_experts
    for hidden, dtype in ((1536, torch.bfloat16), (33, torch.float32)):
        low_latency = ep.LowLatency(cluster, max_tokens=9, hidden=hidden, topk=3, dtype=dtype)
        ids = [torch.rand(9, experts, generator=generator).topk(3, dim=1).indices.cuda() for _ in range(world)]
        x = [torch.randint(-4, 5, (9, hidden), generator=generator).to(dtype).cuda() for _ in range(world)]
        for sum_at in ("token", "expert", "token"):  # so a bank is used again
            received = low_latency.dispatch(x, ids)
            for y, token in zip(low_latency.combine(received.x, received.handle, sum_at=sum_at), x, strict=True):
                assert torch.equal(y, 3 * token)


if __name__ == "__main__":
    main()

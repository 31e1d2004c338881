"""Random cases of dispatch and combine between processes, on either device: each rank compares what it has, bit by bit,
with its part of what ranks of one process give on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cases import Case, before, slot_bytes, summed_on_gpus

import megatron_ep as ep
from megatron_ep import reference


@dataclass(frozen=True)
class Sizes:
    """Of a buffer, and of cases on it."""

    num_experts: int
    max_tokens: int
    tuning: ep.Tuning

    def config(self) -> ep.Config:
        return ep.Config(num_experts=self.num_experts, timeout=60, num_sms=2, tuning=self.tuning)

    def case(self, seed: int, topology: ep.Topology, device: str) -> Case:
        """Whose rows fit the rings: a ring holds one of them, or many."""
        case = Case(seed, self.max_tokens, device=device)
        case.nodes, case.ranks_per_node, case.world = topology.nodes, topology.ranks_per_node, topology.world_size
        case.num_experts = self.num_experts
        case.topk = case.random.choice([1, self.num_experts, case.random.randint(1, self.num_experts)])
        ring = min(self.tuning.nvl_ring_bytes, self.tuning.rdma_ring_bytes)
        size = case.dtype.itemsize
        beside = slot_bytes(ring, case.dtype, case.topk) - ring * size
        widest = (ring - beside) // size
        anything = case.random.randint(1, widest)
        case.hidden = case.random.choice([widest, widest // 16 * 8, anything, anything])
        return case


# Few tokens: where processes share a GPU, what waits for another one's row waits for the turns of all.
SIZES = {
    "one_channel": Sizes(
        4, 12, ep.Tuning(channels=1, nvl_ring_bytes=2048, rdma_ring_bytes=2048, rdma_chunk_tokens=1, local_pass=False)
    ),
    "two_channels": Sizes(
        8,
        24,
        ep.Tuning(channels=2, nvl_ring_bytes=16 << 10, rdma_ring_bytes=8 << 10, rdma_chunk_tokens=2, local_pass=True),
    ),
    "five_channels": Sizes(
        16,
        40,
        ep.Tuning(channels=5, nvl_ring_bytes=4096, rdma_ring_bytes=20 << 10, rdma_chunk_tokens=16, local_pass=False),
    ),
    "wide_rows": Sizes(8, 24, ep.Tuning(channels=2, nvl_ring_bytes=32 << 10, rdma_ring_bytes=32 << 10)),
}


@dataclass(frozen=True)
class Inputs:
    """Of each rank."""

    x: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    again: list[torch.Tensor]  # for the same handle
    row_weights: list[torch.Tensor]  # of rows that arrive
    grads: list[torch.Tensor]  # of both sums
    settings: dict[str, Any]
    with_gradient: bool

    @classmethod
    def draw(cls, case: Case, host: ep.LocalCluster) -> Inputs:
        r, tokens = case.random, case.num_tokens()
        ids, weights, x = case.ids(tokens), case.weights(tokens), case.reals(tokens)
        aligned = {"expert_alignment": case.alignment}
        settings = r.choice([aligned, {"expert_capacity": r.choice([1, 7])}, {"layout": "flat"}])
        rows = ep.dispatch(x, ids, buffer=host, **settings).x
        if r.random() < 0.5:  # room for some of them, for all, or for more
            most = max(map(len, rows))
            # a GPU that does not ask for counts has room for what passes through it only if it has for what arrives
            arriving = [len(reference.flat_rows(ids, rank, case.num_experts)) for rank in range(case.world)]
            size = max(1, *tokens, *arriving, r.choice([most // 3, most - 1, most, most + 17]))
            settings["max_recv_tokens"] = size
            rows = ep.dispatch(x, ids, buffer=host, **settings).x
        row_weights = case.row_weights([len(received) for received in rows])
        again, grads, with_gradient = case.reals(tokens), case.reals(tokens), r.random() < 0.5
        return cls(x, ids, weights, again, row_weights, grads, settings, with_gradient)

    def of(self, rank: int, device: str) -> Inputs:
        def own(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensors[rank].to(device)]

        lists = (self.x, self.ids, self.weights, self.again, self.row_weights, self.grads)
        return Inputs(*map(own, lists), self.settings, self.with_gradient)


def results(inputs: Inputs, buffer: ep.Buffer | ep.LocalCluster) -> dict[str, list[torch.Tensor]]:
    """What the buffer's ranks have of dispatch, combine, weighted combine, their gradients, and a dispatch with the
    handle; by rank."""
    is_cluster = isinstance(buffer, ep.LocalCluster)

    def given(tensors: list[torch.Tensor]) -> Any:
        return tensors if is_cluster else tensors[0]

    def taken(tensors: Any) -> list[torch.Tensor]:
        return tensors if is_cluster else [tensors]

    def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.detach().clone().requires_grad_(inputs.with_gradient) for tensor in tensors]

    x, weights, row_weights = leaves(inputs.x), leaves(inputs.weights), leaves(inputs.row_weights)
    rows = ep.dispatch(given(x), given(inputs.ids), given(weights), buffer=buffer, **inputs.settings)
    received, probs, counts = taken(rows.x), taken(rows.probs), taken(rows.tokens_per_expert)
    y = taken(ep.combine(rows.x, rows.handle))
    weighted = taken(ep.combine(rows.x, rows.handle, given(row_weights)))
    again = taken(ep.dispatch(given(inputs.again), handle=rows.handle).x)
    found = {"y": y, "weighted": weighted, "tokens_per_expert": counts}
    if inputs.settings.get("layout") == "flat":
        found["topk_idx"] = taken(rows.topk_idx)
        filled = [int((ids >= 0).any(dim=1).sum()) for ids in found["topk_idx"]]
    else:
        filled = [min(len(part), int(n.sum())) for part, n in zip(received, counts, strict=True)]
    found["overflow"] = [flag != 0 for flag in taken(rows.overflow)]  # by how much is nobody's business
    found |= {"x": received, "probs": probs} if inputs.with_gradient else {}  # zeros behind the last expert's, too
    found |= {"rows": before(filled, received), "probs of rows": before(filled, probs), "again": before(filled, again)}
    if "expert_capacity" in inputs.settings:  # what padding holds without a gradient is nobody's business
        for name in ("rows", "again"):
            found[name] = [rows[kept != 0] for rows, kept in zip(found[name], found["probs of rows"], strict=True)]
    if inputs.with_gradient:
        grads_of_probs = [part.detach() + 1 for part in probs]
        torch.autograd.backward([*y, *weighted, *probs], [*inputs.grads, *inputs.grads, *grads_of_probs])
        found |= {"x.grad": [leaf.grad for leaf in x], "weights.grad": [leaf.grad for leaf in weights]}
        found["row_weights.grad"] = before(filled, [leaf.grad for leaf in row_weights])
    buffer.synchronize()
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8)


def check_cases(buffer: ep.Buffer, sizes: Sizes, seeds: range) -> None:
    """On all ranks of a buffer of these sizes. Raises AssertionError."""
    topology, device = buffer.topology, buffer.device.type
    nodes = topology.nodes if buffer._group.one_hop is None else 1  # in one hop the bits are those within a node
    with ep.LocalCluster(nodes, topology.world_size // nodes, sizes.config()) as host:
        for seed in seeds:
            inputs = Inputs.draw(sizes.case(seed, topology, device), host)
            found, expected = results(inputs.of(buffer.rank, device), buffer), results(inputs, host)
            assert found.keys() == expected.keys()
            for name, [ours] in found.items():
                theirs = expected[name][buffer.rank]
                assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (seed, name, ours.shape, theirs.shape)
                if name == "row_weights.grad" and device == "cuda":  # torch sums over H in another order
                    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-3)
                else:
                    assert torch.equal(bits(ours), bits(theirs)), f"{name} of case {seed} differs"


# ---- the low-latency mode

TOPK, MAX_TOKENS, TOKENS = 3, 70, (33, 70, 0, 5)
# Rows of several chunks of the copy engine, and rows that it does not copy.
ROWS = [(7168, torch.bfloat16), (520, torch.float32), (65, torch.float64)]


def low_latency_of(buffer: Any, hidden: int, dtype: torch.dtype, **options: Any) -> ep.LowLatency:
    sizes = {"max_tokens": MAX_TOKENS, "hidden": hidden, "topk": TOPK, "dtype": dtype}
    return ep.LowLatency(buffer, **sizes, **options)


def low_latency_inputs(
    seed: int, world: int, experts: int, hidden: int, dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """x, ids and weights of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [TOKENS[(rank + seed) % len(TOKENS)] for rank in range(world)]
    ids = [torch.rand(t, experts, generator=generator).topk(TOPK, dim=1).indices for t in tokens]
    for idx in ids:
        idx[torch.rand(idx.shape, generator=generator) < 0.1] = -1
    x = [torch.randn(t, hidden, generator=generator).to(dtype) for t in tokens]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [x, ids, [torch.rand(t, TOPK, generator=generator).to(wide) for t in tokens]]


def low_latency_results(
    mode: ep.LowLatency, x: Any, ids: Any, weights: Any, layout: str, fp8: str | None
) -> Iterator[list[torch.Tensor]]:
    """What a dispatch and all forms of combine give, each by rank; of rows those that hold a token."""

    def listed(tensors: Any) -> list[torch.Tensor]:
        return tensors if isinstance(tensors, list) else [tensors]

    received = mode.dispatch(x, ids, weights, layout=layout, fp8=fp8)
    handle = received.handle
    kept = [handle.is_row(rank) for rank in range(len(handle.layouts))]

    def rows(tensors: Any) -> list[torch.Tensor]:
        ends = 2 if handle.masked else 1
        flat = [t.flatten(0, ends - 1) for t in listed(tensors)]
        flat = [t.view(torch.uint8) if t.itemsize == 1 else t for t in flat]  # torch does not index all kinds of fp8
        return [t[keep] for t, keep in zip(flat, kept, strict=True)]

    yield rows(received.x)
    yield rows(received.probs)
    yield listed(received.recv_counts)
    if fp8:
        yield rows(received.scales)
        return
    yield listed(mode.combine(received.x, handle))
    yield listed(mode.combine(received.x, handle, sum_at="expert"))
    yield listed(mode.combine(received.x, handle, weights))


def check_low_latency_cases(buffer: ep.Buffer, seeds: range) -> None:
    """The same for the low-latency mode, with a reset after half of the seeds. Raises AssertionError."""
    topology, device, rank = buffer.topology, buffer.device.type, buffer.rank
    experts = buffer.config.num_experts
    with ep.LocalCluster(topology.nodes, topology.ranks_per_node, ep.Config(num_experts=experts)) as host:
        summed = summed_on_gpus(*ROWS) if device == "cuda" else ROWS
        modes = {row: (low_latency_of(buffer, *row), low_latency_of(host, *row)) for row in summed}
        for seed in seeds:
            for row, (ours, theirs) in modes.items():
                everyone = low_latency_inputs(seed, topology.world_size, experts, *row)
                own = [part[rank].to(device) for part in everyone]
                for fp8 in (None, "pow2") if row[1] == torch.bfloat16 else (None,):
                    settings = (("masked", "grouped")[seed % 2], fp8)
                    results = (
                        low_latency_results(ours, *own, *settings),
                        low_latency_results(theirs, *everyone, *settings),
                    )
                    for a, b in zip(*results, strict=True):
                        assert torch.equal(bits(a[0]), bits(b[rank].contiguous())), (seed, row, settings)
            if seed == seeds[len(seeds) // 2]:
                buffer.reset()
        buffer.synchronize()

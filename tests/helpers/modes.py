"""Both modes of a buffer behind the same few names, on the host and on GPUs: for scenarios that hold in each of them.
All ranks of `LocalRanks` run these at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import megatron_ep as ep
from megatron_ep import reference

W, EXPERTS, TOKENS = 4, 8, (5, 0, 17, 64)  # tokens of each rank


@dataclass(frozen=True)
class Place:
    device: str
    hidden: int
    dtype: torch.dtype  # of the low-latency mode
    timeout: float  # of a wait for a rank that stays away

    def small_rings(self) -> ep.Tuning:
        """Of a row or two."""
        size = 136 + 8 * self.hidden
        return ep.Tuning(nvl_ring_bytes=size, rdma_ring_bytes=size)


HOST, GPU = Place("cpu", 33, torch.float32, 4.0), Place("cuda", 520, torch.bfloat16, 2.0)


class Calls:
    """A buffer of all ranks, on two nodes or so many, and the calls of a mode with what this rank sends in a round."""

    absent: ClassVar[dict[str, tuple[str, str]]]  # by phase: who waits for a rank that stays away, what is said of it

    def __init__(self, place: Place, nodes: int = 2, timeout: float | None = None, **settings: Any) -> None:
        config = ep.Config(num_experts=EXPERTS, timeout=timeout or place.timeout, num_sms=2, **settings)
        self.place, self.world = place, dist.get_world_size()
        self.buffer = ep.Buffer(None, config, ep.Topology(nodes, self.world // nodes), device=place.device)
        self.rank = self.buffer.rank

    def inputs(self, topk: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Of all ranks, on the host."""
        generator = torch.Generator().manual_seed(topk)
        tokens = TOKENS[: self.world]
        ids = [torch.rand(t, EXPERTS, generator=generator).topk(topk, dim=1).indices for t in tokens]
        x = [torch.randint(-8, 9, (t, self.place.hidden), generator=generator).float() for t in tokens]
        return x, ids, [torch.rand(t, topk, generator=generator) for t in tokens]

    def own(self, topk: int = 2) -> list[torch.Tensor]:
        return [part[self.rank].to(self.place.device) for part in self.inputs(topk)]

    def is_usable_again(self) -> None:
        self.buffer.reset()
        self.round_trips()
        self.buffer.close()


class Normal(Calls):
    absent: ClassVar = {
        "dispatch": ("notify, channel 0", r"has not entered notify 1 \(it finished 0\)"),
        "combine": ("combine_receiver, channel 0", r"has not entered call 2 \(it finished 1\)"),
        "backward": ("receiver, channel 0", r"has not entered call 3 \(it finished 2\)"),
        "compiled backward": ("receiver, channel 0", r"has not entered call 3 \(it finished 2\)"),
    }

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> ep.Received:
        return ep.dispatch(x, ids, weights, buffer=self.buffer)

    def combine(self, received: ep.Received, weights: torch.Tensor | None = None) -> torch.Tensor:
        return ep.combine(received.x, received.handle, weights)

    def round_trips(self) -> None:
        for topk in (1, 2, 3):
            x, ids, weights = self.own(topk)
            leaf = x.requires_grad_()
            rows = self.dispatch(leaf, ids, weights)
            expected, probs, counts = (part[self.rank] for part in reference.dispatch(*self.inputs(topk), EXPERTS))
            assert torch.equal(rows.x.cpu(), expected) and torch.equal(rows.probs.cpu(), probs)
            assert torch.equal(rows.tokens_per_expert, counts)
            y = self.combine(rows)
            assert torch.equal(y, topk * leaf)
            y.sum().backward()
            assert torch.equal(leaf.grad, torch.full_like(leaf, topk))
            halves = torch.full_like(rows.probs, 0.5).requires_grad_()
            y = ep.combine(rows.x.detach(), rows.handle, halves)
            assert torch.equal(y, topk * leaf / 2)
            y.sum().backward()
            assert torch.equal(halves.grad, rows.x.detach().sum(dim=1))
        self.buffer.synchronize()


class OneHop(Normal):
    absent: ClassVar = {
        "dispatch": ("one_hop_receiver", r"has not entered call \d \(it finished 0\)"),
        "combine": ("one_hop_combine", r"has not entered call \d \(it finished 1\)"),
        "backward": ("one_hop_receiver", r"has not entered call \d \(it finished 2\)"),
    }

    def __init__(self, place: Place, nodes: int = 2, timeout: float | None = None, **settings: Any) -> None:
        super().__init__(place, nodes, timeout, max_tokens=max(TOKENS), **settings)
        assert self.buffer._group.one_hop is not None


class LowLatency(Calls):
    absent: ClassVar = {
        "dispatch": ("low_latency_receiver", r"has not sent low-latency dispatch \d \(it finished \d\)"),
        "combine": ("low_latency_combine", r"has not sent low-latency combine \d \(it finished \d\)"),
    }

    def __init__(self, place: Place, nodes: int = 2, timeout: float | None = None, **options: Any) -> None:
        super().__init__(place, nodes, timeout)
        sizes = {"max_tokens": max(TOKENS), "hidden": place.hidden, "topk": 3, "dtype": place.dtype}
        self.mode = ep.LowLatency(self.buffer, **sizes, **options)

    def inputs(self, topk: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        x, ids, weights = super().inputs(topk)
        return [part.to(self.place.dtype) for part in x], ids, weights

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> ep.LowLatencyReceived:
        return self.mode.dispatch(x, ids, weights)

    def combine(self, received: ep.LowLatencyReceived, weights: torch.Tensor | None = None) -> torch.Tensor:
        return self.mode.combine(received.x, received.handle, weights)

    def round_trips(self, active: torch.Tensor | None = None) -> None:
        """With these active ranks of every rank; None: with all."""
        active = torch.ones(self.world, self.world, dtype=torch.int32) if active is None else active
        for topk in (1, 2, 3) * 2:
            own, (x, ids, weights) = self.own(topk), self.inputs(topk)
            kept = reference.without_masked(ids, active, EXPERTS)
            received = self.dispatch(*own)
            rows, _, counts = (part[self.rank] for part in reference.dispatch(x, kept, weights, EXPERTS))
            assert torch.equal(received.recv_counts.cpu(), counts.int())
            found = [part[:count] for part, count in zip(received.x.cpu(), counts, strict=True)]
            assert torch.equal(torch.cat(found), rows)
            choices = (kept[self.rank] >= 0).sum(dim=1, keepdim=True).to(own[0].device)
            assert torch.equal(self.combine(received), choices * own[0])
        self.buffer.synchronize()


MODES = {"normal": Normal, "one hop": OneHop, "low latency": LowLatency}

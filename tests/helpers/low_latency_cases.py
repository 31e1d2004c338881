"""Random shapes for the tests of the low-latency mode."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from cases import Case

import megatron_ep as ep
from megatron_ep import reference


class LowLatencyCase(Case):
    """A random case. Everything follows from the seed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        r = self.random
        self.topk = r.choice([1, min(8, self.num_experts), r.randint(1, min(32, self.num_experts))])
        self.hidden = r.choice([1, 8, 128, r.randint(1, 300)])
        if self.device == "cuda" and self.seed % 2:  # rows for the copy engine
            self.hidden = r.choice([512, 520, 2052, 4096])
        most = r.choice([1, r.randint(1, 40), r.randint(1, 70), r.randint(1, 100)])
        self.max_tokens = most if self.hidden <= 300 else min(most, 40)
        self.masked = r.random() < 0.5
        self.layout = "masked" if self.masked else "grouped"
        self.alignment = 1 if self.masked else r.choice([1, 4, 16])

    def low_latency(self, cluster: ep.LocalCluster, **options: object) -> ep.LowLatency:
        sizes = {"max_tokens": self.max_tokens, "hidden": self.hidden, "topk": self.topk, "dtype": self.dtype}
        return ep.LowLatency(cluster, **sizes, **options)

    def dispatch_options(self) -> dict:
        return {"layout": self.layout} | ({} if self.masked else {"expert_alignment": self.alignment})

    def num_rows(self) -> int:
        """What a rank makes room for, with or without a token."""
        local_experts = self.num_experts // self.world
        if self.masked:
            return local_experts * self.world * self.max_tokens
        most = self.world * self.max_tokens * min(self.topk, local_experts)
        return most + local_experts * (self.alignment - 1)

    def new_round(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """ids, weights, x of one call."""
        tokens = self.num_tokens()
        return self.ids(tokens), self.weights(tokens), self.reals(tokens)

    def check_rows(
        self, received: ep.LowLatencyReceived, expected: list[torch.Tensor], ids: list[torch.Tensor]
    ) -> None:
        """What each row with a token holds, and where it lies."""
        local_experts = self.num_experts // self.world
        for rank in range(self.world):
            at = reference.places(ids, rank, self.num_experts, self.alignment)
            counts = [len(token) for _, token, _ in at]
            assert received.recv_counts[rank].tolist() == counts
            starts = received.expert_starts[rank].tolist()
            rows = received.x[rank].cpu().reshape(-1, received.x[rank].shape[-1])
            for expert in range(local_experts):
                first, count = at[expert][0], counts[expert]
                if self.masked:
                    assert starts[expert] == expert * self.world * self.max_tokens
                else:
                    assert starts[expert] == first
                ours = rows[starts[expert] : starts[expert] + count]
                assert torch.equal(ours, expected[rank][first : first + count]), f"rank {rank}, expert {expert}"


def fill(
    case: LowLatencyCase, received: ep.LowLatencyReceived, rows: list[torch.Tensor], ids: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Tensors in the layout of what was received, where it was: `rows` where tokens are, NaN elsewhere."""
    out = []
    for rank in range(case.world):
        shape = received.x[rank].shape
        lead = shape[:2] if case.masked else shape[:1]
        tensor = torch.full((*lead, *rows[rank].shape[1:]), torch.nan, dtype=rows[rank].dtype)
        flat = tensor.view(-1, *rows[rank].shape[1:])
        starts = received.expert_starts[rank].tolist()
        for (first, token, _), start in zip(
            reference.places(ids, rank, case.num_experts, case.alignment), starts[:-1], strict=True
        ):
            flat[start : start + len(token)] = rows[rank][first : first + len(token)]
        out.append(tensor)
    return case.there(out)


def receive_in_any_order(
    steps: int, kind_of_next: Callable[[], str], starts: dict[str, Callable[[], Callable[[], None]]], r: random.Random
) -> None:
    """So many calls, of which up to two of a kind are under way; r decides when each is received.

    starts: for "dispatch" and "combine" what begins one and returns its receiving half.
    """
    under_way: dict[str, list[Callable[[], None] | None]] = {kind: [None, None] for kind in starts}
    for _ in range(steps):
        kind = kind_of_next()
        before_last, last = under_way[kind]
        if before_last is not None:
            before_last()
        under_way[kind] = [last, starts[kind]()]
        for halves in under_way.values():
            for i, receive in enumerate(halves):
                if receive is not None and r.random() < 0.3:
                    receive()
                    halves[i] = None
    for halves in under_way.values():
        for receive in filter(None, halves):
            receive()

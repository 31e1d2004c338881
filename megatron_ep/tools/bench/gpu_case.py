"""The cases of benchmarks on GPUs: tokens and settings. T tokens per rank, H hidden, K choices, E experts."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch

import megatron_ep as ep
from megatron_ep.config import MAX_LOW_LATENCY_TOKENS
from megatron_ep.fabrics.gpu import check_device
from megatron_ep.reference import SCALE_BLOCK
from megatron_ep.tools.arguments import add_rounds, add_sizes, add_tokens, positive

HOT = 16.0  # probability of the hot expert over that of any other
ROUTINGS = ("uniform", "hot", "zipf")


def draw_experts(
    routing: str, num_tokens: int, topk: int, num_experts: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights float32 [T, K], not normalised, and distinct ids int64 [T, K] on the generator's device.

    routing: probabilities of experts. "uniform": equal. "hot": one expert is 16 times as likely as any other. "zipf":
        1 / i for the i-th expert in a random order, equal on all ranks.
    """
    device = generator.device
    likely = torch.ones(num_experts, device=device)
    if routing == "hot":
        likely[num_experts // 2] = HOT
    elif routing == "zipf":
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0)).to(device)
        likely = 1.0 / (1 + order)
    else:
        assert routing == "uniform", routing
    # The K largest of log p + Gumbel noise are K draws without replacement (Vieira 2014).
    noise = torch.rand(num_tokens, num_experts, generator=generator, device=device).clamp_(1e-12, 1 - 1e-7)
    scores = likely.log() - (-noise.log()).log()
    ids = scores.topk(topk, dim=1).indices
    return noise.gather(1, ids), ids


@dataclass(frozen=True)
class Case:
    nodes: int
    ranks_per_node: int
    num_sms: int  # SMs of each rank
    channels: int | None
    ring_slots: int  # rows of bf16 that an NVLink ring holds
    network_slots: int | None  # rows of bf16 that a network ring holds; None: the default of a buffer
    tokens: int
    hidden: int
    topk: int
    experts: int
    local_pass: bool | None = None
    routing: str = "uniform"  # see `draw_experts`
    promises: bool = False  # whether `Config.max_tokens` is the number of tokens

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def config(self) -> ep.Config:
        slot_bytes = 2 * self.hidden + 1024  # more than the metadata of a row
        return ep.Config(
            num_experts=self.experts,
            num_sms=self.num_sms,
            timeout=10,
            max_tokens=self.tokens if self.promises else None,
            tuning=ep.Tuning(
                channels=self.channels,
                nvl_ring_bytes=self.ring_slots * slot_bytes,
                rdma_ring_bytes=self.network_slots and self.network_slots * slot_bytes,
                local_pass=self.local_pass,
            ),
        )

    @property
    def sizes(self) -> str:
        routing = "" if self.routing == "uniform" else f" {self.routing}"
        return f"T={self.tokens} H={self.hidden} K={self.topk} E={self.experts}{routing}"

    def __str__(self) -> str:
        channels = f" channels={self.channels}" if self.channels else ""
        slots = f"{self.ring_slots}+{self.network_slots or 'default'}" if self.nodes > 1 else f"{self.ring_slots}"
        local_pass = {True: " intra-rank pass", False: " no intra-rank pass", None: ""}[self.local_pass]
        local_pass += " max_tokens=T" if self.config.max_tokens else ""
        return f"{self.nodes}x{self.ranks_per_node} sms={self.num_sms}{channels} slots={slots}{local_pass} {self.sizes}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds settings, each with several values, sizes and rounds."""
    parser.add_argument("--num-sms", nargs="+", type=positive, default=[4, 8, 16, 24], help="per rank (%(default)s)")
    parser.add_argument("--channels", nargs="+", type=positive, default=[None], help="(those that fit the SMs)")
    parser.add_argument("--ring-slots", nargs="+", type=positive, default=[4], help="rows of a ring (%(default)s)")
    parser.add_argument(
        "--network-slots",
        nargs="+",
        type=positive,
        default=[None],
        help="of one between nodes (as many as a buffer takes)",
    )
    parser.add_argument(
        "--local-pass", nargs="+", choices=("on", "off"), default=[None], help="Tuning.local_pass (where it saves time)"
    )
    add_tokens(parser, several=True)
    add_sizes(parser, hidden=7168, experts=256)
    add_rounds(parser, warmup=3, iters=30)


def cases_of(
    arguments: argparse.Namespace, nodes: int, ranks_per_node: int, tokens: int, routing: str = "uniform"
) -> list[Case]:
    """Returns the cases of one number of tokens and one routing."""
    sizes = (tokens, arguments.hidden, arguments.topk, arguments.experts)
    network_slots = arguments.network_slots if nodes > 1 else arguments.network_slots[:1]
    local_passes = [{"on": True, "off": False}.get(choice) for choice in arguments.local_pass]
    promises = (
        [False, True] if getattr(arguments, "max_tokens", False) and tokens <= MAX_LOW_LATENCY_TOKENS else [False]
    )
    lists = (arguments.num_sms, arguments.channels, arguments.ring_slots, network_slots, local_passes, promises)
    return [
        Case(nodes, ranks_per_node, num_sms, channels, slots, of_network, *sizes, local_pass, routing, promise)
        for num_sms, channels, slots, of_network, local_pass, promise in itertools.product(*lists)
    ]


def row_bytes(hidden: int, *, fp8: bool = False) -> int:
    """Returns the bytes of a row of bf16, or of fp8 with its scales."""
    return hidden + 4 * -(-hidden // SCALE_BLOCK) if fp8 else 2 * hidden


def require_gpu(command: str) -> None:
    """Ends the program if this build or machine has no GPU for it."""
    try:
        check_device("cuda")
    except ValueError as error:
        raise SystemExit(f"{command}: {error}") from None

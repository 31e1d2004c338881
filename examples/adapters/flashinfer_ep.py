"""megatron_ep in FlashInfer's benchmark of expert parallelism, bench_moe_ep.py, which runs unchanged:

    torchrun --nproc-per-node 2 flashinfer_ep.py bench_moe_ep.py --reference --algorithm ll --baseline

docs/benchmarks.md says where it is. The benchmark knows FlashInfer's transports by name, so this library takes the
place of one, and is called nccl_ep in its output.

ll, expert_major: the low-latency mode; weights travel with the dispatch, and rows are summed at the expert's rank.
ht: the normal mode, one row per (token, rank), into as many rows as can arrive: the host waits for no counts.
"""

from __future__ import annotations

import runpy
import sys

import torch
from flashinfer import moe_ep

import megatron_ep as ep
from megatron_ep.config import MAX_LOW_LATENCY_TOKENS

REPLACED = "nccl_ep"


class MegatronFleet(moe_ep.Fleet):
    """The buffer of a layer."""

    def __init__(self, bootstrap, params, algo_knobs=()):
        if algo_knobs:
            raise ValueError(f"algo_knobs are {list(algo_knobs)}, must be none")
        if params.layout is not moe_ep.EpLayout.EXPERT_MAJOR:
            raise ValueError(f"layout is {params.layout}, must be expert_major, or the algorithm ht")
        self.params = params
        self.most_rows = bootstrap.world_size * params.max_tokens_per_rank
        device = "cuda" if torch.cuda.is_available() else "cpu"
        row_bytes = params.token_hidden_size * params.dtype_bytes
        self.is_low_latency = params.algorithm is moe_ep.EpAlgorithm.LOW_LATENCY
        has_few = not self.is_low_latency and params.max_tokens_per_rank <= MAX_LOW_LATENCY_TOKENS
        few = params.max_tokens_per_rank if has_few else None
        config = ep.Config(num_experts=params.num_experts, row_bytes=row_bytes, max_tokens=few)
        self.buffer = ep.Buffer(bootstrap.process_group, config, device=device)
        self._low_latency: ep.LowLatency | None = None

    def low_latency(self, topk: int) -> ep.LowLatency:
        if self._low_latency is None:
            self._low_latency = ep.LowLatency(
                self.buffer,
                max_tokens=self.params.max_tokens_per_rank,
                hidden=self.params.token_hidden_size,
                topk=topk,
            )
        return self._low_latency

    def create_handle(self, params, algo_knobs=()):
        [weights] = [knob.weights for knob in algo_knobs if isinstance(knob, moe_ep.HandleAlgoKnobTopKWeights)]
        return (LowLatencyHandle if self.is_low_latency else FlatHandle)(self, params.topk_ids, weights)

    def update_topology(self, bootstrap, algo_knobs=()):
        raise NotImplementedError("the ranks of a buffer are fixed")

    def destroy(self):
        self.buffer.close()


class StepHandle(moe_ep.Handle):
    """A dispatch and its combine."""

    def __init__(self, fleet, topk_ids, weights):
        self.fleet, self.topk_ids, self.weights = fleet, topk_ids, weights
        self.received = None

    def update(self, params):
        self.topk_ids = params.topk_ids

    def complete(self):
        """Does nothing: calls run on the current stream."""


class LowLatencyHandle(StepHandle):
    def dispatch(self, params):
        mode = self.fleet.low_latency(self.topk_ids.shape[1])
        self.received = mode.dispatch(params.x[0], self.topk_ids, self.weights)
        return moe_ep.DispatchOutput(
            self.received.x, num_tokens=self.fleet.most_rows, expert_counts=self.received.recv_counts
        )

    def combine(self, params):
        mode = self.fleet.low_latency(self.topk_ids.shape[1])
        probs = self.received.probs
        return moe_ep.CombineOutput(
            mode.combine(params.x[0], self.received.handle, row_weights=probs, sum_at="expert", out=params.out)
        )


class FlatHandle(StepHandle):
    def dispatch(self, params):
        fleet = self.fleet
        self.received = received = ep.dispatch(
            params.x[0],
            self.topk_ids,
            self.weights,
            buffer=fleet.buffer,
            layout="flat",
            max_recv_tokens=fleet.most_rows,
        )
        return moe_ep.DispatchOutput(
            received.x.view(-1, fleet.params.max_tokens_per_rank, received.x.shape[1]),
            num_tokens=fleet.most_rows,
            recv_topk_idx=received.topk_idx.long(),
            recv_topk_weights=received.probs,
        )

    def combine(self, params):
        out = ep.combine(params.x[0].flatten(0, 1), self.received.handle)
        return moe_ep.CombineOutput(out if params.out is None else params.out.copy_(out))


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("name FlashInfer's bench_moe_ep.py, and then its arguments")
    moe_ep.register_fleet(REPLACED)(MegatronFleet)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

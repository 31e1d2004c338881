"""megatron_ep as a backend of CollectiveX, the expert-parallel benchmark of InferenceX.

docs/benchmarks.md says how to put it in. CollectiveX creates one instance per case, with a case's mode and precision,
and calls its methods; it has the inputs, the timing and the check of all results.

normal: one row per (token, rank), which arrives with the token's local experts and their weights; combine adds rows.
Buffers for few tokens get CollectiveX's limit as Config.max_tokens.
low-latency: one row per (token, expert), both ways; combine multiplies by the weights at the token, as the check of
CollectiveX does.
fp8: values of float8_e4m3fn with a float32 scale per 128 elements, converted within the measured dispatch.
"""

import types

import torch
from ep_backend import EPBackend  # CollectiveX's, experimental/CollectiveX/bench/ep_backend.py

import megatron_ep as ep
from megatron_ep import float8
from megatron_ep.config import MAX_LOW_LATENCY_TOKENS


class MegatronEPBackend(EPBackend):
    name = "megatron-ep"
    maturity = "candidate"
    library_version = ep.__version__
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")

    def __init__(self, args, rank, world_size, local_rank, device):
        super().__init__(args, rank, world_size, local_rank, device)
        self.is_fp8 = self.precision == "fp8"
        self.first_expert = rank * (args.experts // world_size)
        self.stage_device_work = self.is_fp8  # rows return as bfloat16
        self.kernel_generation = self.mode
        if self.is_fp8:
            self.dispatch_dtype = "fp8-e4m3fn"
            self.dispatch_value_bytes = 1
            self.dispatch_scale_bytes_per_copy = -(-args.hidden // 128) * 4
        if self.mode == "low-latency":
            self.receive_layout = "token-expert"
            self.combine_weight_semantics = "weighted-kernel-sum"

    def buffer_cap(self, args):
        return MAX_LOW_LATENCY_TOKENS if self.mode == "low-latency" else None

    def create_buffer(self, spec):
        few = spec.max_tokens_per_rank if spec.max_tokens_per_rank <= MAX_LOW_LATENCY_TOKENS else None
        config = ep.Config(num_experts=self.args.experts, max_tokens=few if self.mode == "normal" else None)
        self.buffer = ep.Buffer(None, config, device=self.device.type)
        if self.mode == "low-latency":
            self.low_latency = ep.LowLatency(
                self.buffer, max_tokens=spec.max_tokens_per_rank, hidden=self.args.hidden, topk=self.args.topk
            )

    def semantic_payload(self, x):
        return float8.dequantize(*float8.quantize(x)) if self.is_fp8 else x

    def dispatch(self, p):
        if self.mode == "low-latency":
            fp8 = "fp32" if self.is_fp8 else None
            return self._handle(self.low_latency.dispatch(p.dispatch_x, p.topk_idx, fp8=fp8))
        x, scales = float8.quantize(p.dispatch_x) if self.is_fp8 else (p.dispatch_x, None)
        return self._handle(
            ep.dispatch(x, p.topk_idx, p.topk_weights, scales=scales, buffer=self.buffer, layout="flat")
        )

    def stage(self, p, h):
        h.combine_input = self._rows(h)

    def combine(self, p, h):
        if self.mode == "low-latency":
            return self.low_latency.combine(h.combine_input, h.received.handle, p.topk_weights)
        return ep.combine(h.combine_input, h.received.handle)

    def recv_tokens(self, h):
        if self.mode == "low-latency":
            return int(h.received.recv_counts.sum())
        return len(h.received.x)

    def inspect_dispatch(self, p, h):
        rows, received = self._rows(h), h.received
        if self.mode == "low-latency":
            counts = received.recv_counts.long()
            experts, slots = self._taken(received)
            return types.SimpleNamespace(
                payload=rows[experts, slots], expert_ids=experts + self.first_expert, local_expert_counts=counts
            )
        local = received.topk_idx.long()
        return types.SimpleNamespace(
            payload=rows,
            expert_ids=torch.where(local >= 0, local + self.first_expert, local),
            weights=received.probs,
            local_expert_counts=received.tokens_per_expert.to(rows.device),
        )

    def combine_transformed(self, p, h, transformed):
        h.combine_input = transformed.bfloat16()
        if self.mode == "low-latency":
            h.combine_input = torch.zeros(h.received.x.shape, dtype=torch.bfloat16, device=self.device)
            h.combine_input[self._taken(h.received)] = transformed.bfloat16()
        return self.combine(p, h)

    def finalize(self, rc):
        self.buffer.close()
        return super().finalize(rc)

    @staticmethod
    def _handle(received):
        return types.SimpleNamespace(received=received, combine_input=None)

    def _rows(self, h):
        """Rows as bfloat16: in normal mode [R, H], in low-latency mode [L, W * max_tokens, H]."""
        received = h.received
        return float8.dequantize(received.x, received.scales) if self.is_fp8 else received.x

    @staticmethod
    def _taken(received):
        """Experts and slots of the rows that arrived, in low-latency mode: the first recv_counts[e] of expert e."""
        slots = torch.arange(received.x.shape[1], device=received.x.device)
        return (slots < received.recv_counts[:, None]).nonzero(as_tuple=True)

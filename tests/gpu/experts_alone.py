"""The experts of one MoE layer on one GPU: Transformer Engine's (TEGroupedMLP) beside grouped experts, forward and
backward, with gradients added to fp32 main_grad and without. Prints ms of the GPU with the host hidden, ms of the
host, and whether outputs and gradients have the same bits.

    PYTHONPATH=$PWD python tests/gpu/experts_alone.py [CASE ...]

megatron-core and transformer_engine must be importable. NVTE_USE_CUTLASS_GROUPED_GEMM=1 is Transformer Engine's faster
form: with it, one launch for the products of all experts but those of weight gradients.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ep.megatron import grouped_products
from megatron_ep.megatron.experts import GroupedExperts

CASES = {  # L experts of H x ffn, R rows, and how uneven the load is
    "Qwen3-30B, EP 2": (64, 2048, 768, 32768, 0),
    "Qwen3-30B, EP 8": (16, 2048, 768, 32768, 0),
    "Qwen3-30B, EP 2, uneven": (64, 2048, 768, 32768, 3),
    "DeepSeek-V3, 16 experts": (16, 7168, 2048, 32768, 0),
    "DeepSeek-V3, 32 experts": (32, 7168, 2048, 32768, 0),
    "Qwen3-30B, EP 2, few rows": (64, 2048, 768, 4096, 0),
}
WARM_UP, TIMED = 3, 12


def make(kind, config, main_grads):
    submodules = MLPSubmodules(linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    experts = kind(config.num_moe_experts, config, submodules, pg_collection=get_default_pg_collection()).cuda()
    for parameter in experts.parameters() if main_grads else ():
        parameter.main_grad = torch.zeros(parameter.shape, device="cuda")
        parameter.grad_added_to_main_grad = False
    return experts


def gradients(experts, num_experts):
    """Of both linear layers, [L, out, in] each."""
    named = {name: getattr(p, "main_grad", None) for name, p in experts.named_parameters()}
    named = {name: p.grad if named[name] is None else named[name] for name, p in experts.named_parameters()}
    for linear in ("linear_fc1", "linear_fc2"):
        joined = named.get(f"{linear}.weight")
        parts = [named.get(f"{linear}.weight{i}") for i in range(num_experts)]
        yield torch.stack(parts) if joined is None else joined


def times(step):
    """Median ms of the GPU and of the host."""
    for _ in range(WARM_UP):
        step()
    host, gpu = [], []
    for _ in range(TIMED):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        host.append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    for _ in range(TIMED):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(2e6 * (2 * statistics.median(host) + 1)))  # until the host has enqueued all
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        gpu.append(start.elapsed_time(end))
    return statistics.median(gpu), statistics.median(host)


def run(name, num_experts, hidden, ffn, rows, uneven):
    torch.manual_seed(0)
    share = torch.rand(num_experts) ** uneven + 0.02
    counts = torch.multinomial(share, rows, replacement=True).bincount(minlength=num_experts)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probs = torch.rand(rows, device="cuda", requires_grad=True)
    grad = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    for main_grads in (False, True):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=hidden,
            num_attention_heads=16,
            moe_ffn_hidden_size=ffn,
            num_moe_experts=num_experts,
            params_dtype=torch.bfloat16,
            bf16=True,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            bias_activation_fusion=True,
            add_bias_linear=False,
            moe_grouped_gemm=True,
            gradient_accumulation_fusion=main_grads,
        )
        results = {}
        variants = [("TE", TEGroupedMLP, counts, None), ("grouped", GroupedExperts, counts.cuda(), None)]
        if main_grads:
            variants.append(("grouped, add", GroupedExperts, counts.cuda(), "add"))
        for variant, kind, of_experts, override in variants:
            grouped_products.OVERRIDE = override
            experts = make(kind, config, main_grads)

            def step(experts=experts, of_experts=of_experts):
                for parameter in (x, probs, *experts.parameters()):
                    parameter.grad = None
                output, _ = experts(x, of_experts, probs)
                output.backward(grad)
                return output

            try:
                output = step()
                first = [output.detach().clone(), x.grad, probs.grad, *gradients(experts, num_experts)]
                results.setdefault(variant, [t.detach().float().clone() for t in first])
                gpu, host = times(step)
            except Exception as error:
                print(f"{name:26} {variant}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            finally:
                grouped_products.OVERRIDE = None
            same = "" if variant == "TE" or "TE" not in results else compared(results[variant], results["TE"])
            what = f"{variant}{', main_grad' if main_grads else ''}"
            print(f"{name:26} {what:28} gpu {gpu:7.3f} ms  host {host:7.3f} ms  {same}", flush=True)
            del experts, first, output
            torch.cuda.empty_cache()


def compared(ours, theirs):
    words = []
    for name, a, b in zip(("y", "dx", "dprobs", "dW1", "dW2"), ours, theirs, strict=True):
        apart = (a - b).abs().max() / b.abs().max()
        words.append(f"{name} {'equal' if torch.equal(a, b) else f'{float(apart):.0e}'}")
    return ", ".join(words)


def main(names):
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"})
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    print(torch.cuda.get_device_name(0), "torch", torch.__version__)
    for name in names or CASES:
        run(name, *CASES[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

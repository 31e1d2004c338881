"""A MoE layer in two chunks, and with weight gradients beside the backward pass of dispatch, on two GPUs:

    CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONPATH=.:tests/helpers torchrun --nproc-per-node 2 tests/gpu/chunks.py

EPMoELayer with Transformer Engine's grouped experts in bf16, which add gradients to main_grad in fp32; forward and
backward passes, in turns. After each dispatch and combine a kernel keeps the call's SMs busy for as long as a network
would that takes 45 % of the layer without chunks. Prints a row for each variant; exits with 1 if gradients differ, two
chunks are less than 1.15 times as fast, or take over 10 % more memory. Takes less than a minute.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from gpu_layers import join, make_config

from megatron_ep.megatron import chunks, shared_buffers
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.normal import plan

HOLD = """
extern "C" __global__ void hold(int us) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)us * 1000ull);
}"""
NUM_SMS = 24
HIDDEN, FFN, EXPERTS = 7168, 2048, 16  # of a rank
SHARE = 0.45  # of the network in the layer without chunks
SHARED = 120 << 10  # more than half of an SM's, so that no two blocks share one
GAIN, MEMORY, ROUNDING = 1.15, 1.10, 2e-2  # of gradients in bf16 and fp32, of the largest


def slowest(values):
    values = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()


class Network:
    """While it is open, a call of all tokens takes `us` longer, and others in proportion to their bytes."""

    def __init__(self, us, elements):
        self._us, self._elements = us, elements
        self._kernel = torch.cuda._compile_kernel(HOLD, "hold")
        self._kernel.set_shared_memory_config(SHARED)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._hold(10)
        start.record()
        self._hold(1000)
        end.record()
        end.synchronize()
        assert 0.9 < start.elapsed_time(end) < 1.3, "the kernel holds for another time than asked for"

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        for kind in (plan.DispatchPlan, plan.CombinePlan):
            self._patches.enter_context(mock.patch.object(kind, "run", self._slow(kind.run)))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def _slow(self, run):
        def slow(of, *given, **settings):
            result = run(of, *given, **settings)
            us = int(self._us * sum(of.num_tokens) * of.hidden / self._elements)
            if us:
                self._hold(us)
            return result

        return slow

    def _hold(self, us):
        self._kernel(grid=(NUM_SMS, 1, 1), block=(512, 1, 1), args=[us], shared_mem=SHARED)


def make_layer(number, delays):
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    config = make_config(
        hidden_size=HIDDEN,
        num_attention_heads=8,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS * dist.get_world_size(),
        moe_router_topk=8,
        moe_grouped_gemm=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=True,
        **({chunks.DELAYS: True} if delays else {}),
    )
    spec = get_moe_module_spec(use_te=True, num_experts=config.num_moe_experts, moe_grouped_gemm=True)
    shared_buffers.configure(num_sms=NUM_SMS, timeout=60.0, moe_chunks=number)
    return ep_layer_spec(spec)(config=config).cuda()


def share(weights, layer, mains):
    """Gives all layers the memory of one's weights and of their gradients."""
    for name, parameter in layer.named_parameters():
        parameter.data = weights.setdefault(name, parameter.data)
        if name not in mains:
            mains[name] = torch.zeros(parameter.shape, device="cuda")
        parameter.main_grad, parameter.grad_added_to_main_grad = mains[name], False

        def hook(parameter):  # as Megatron's DDP
            assert parameter.grad is not None
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(hook)


def step(layer, x, grad):
    for parameter in layer.parameters():
        parameter.grad_added_to_main_grad = False
    leaf = x.detach().requires_grad_()
    a, b, c = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    a.record()
    output, _ = layer(leaf)
    b.record()
    output.backward(grad)
    c.record()
    return output.detach(), leaf.grad, (a, b, c)


def times(layers, x, grad, rounds):
    """ms of the forward pass, of both and of the host's work for both, and peak GB, by variant: medians of the slowest
    rank, in turns."""
    found, peaks = {name: [] for name in layers}, {}
    for _ in range(rounds):
        for name, layer in layers.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            events, began = [], []
            for _ in range(3):
                began.append(time.perf_counter())
                events.append(step(layer, x, grad)[2])
            host = 1e3 * (time.perf_counter() - began[1]) / 2  # as long as the GPU's if the host must wait for it
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() / 1e9
            found[name] += [(a.elapsed_time(b), a.elapsed_time(c), host) for a, b, c in events[1:]]
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    return {name: slowest([*medians[name], peaks[name]]) for name in layers}


def calls_alone(layer, x, grad):
    """ms of dispatch, combine and their backward passes, without experts."""

    class Nothing(torch.nn.Module):
        def forward(self, rows, counts, probs):
            return rows * 1, None

    with mock.patch.dict(layer._modules, experts=Nothing()):
        whole = times({"calls": layer}, x, grad, 4)["calls"][1]
    dispatcher = layer.token_dispatcher
    with (
        mock.patch.object(type(dispatcher), "token_dispatch", lambda _, x, probs: (x, probs[:, 0])),
        mock.patch.object(type(dispatcher), "token_combine", lambda _, x: x),
        mock.patch.object(type(dispatcher), "dispatch_postprocess", lambda _, x, probs: (x, None, probs)),
        mock.patch.dict(layer._modules, experts=Nothing()),
    ):
        rest = times({"rest": layer}, x, grad, 4)["rest"][1]
    return whole - rest


def differences(layers, x, grad, mains):
    """The largest differences of outputs and gradients from those of the first layer, over the largest value."""
    results = {}
    for name, layer in layers.items():
        for main in mains.values():
            main.zero_()
        output, of_x, _ = step(layer, x, grad)
        torch.cuda.synchronize()
        results[name] = [output, of_x, *(main.clone() for main in mains.values())]
    first = next(iter(results.values()))
    off = {
        name: max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(result, first, strict=True))
        for name, result in results.items()
    }
    return {name: slowest([value])[0] for name, value in off.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16384, help="per rank; with few the host is the limit")
    tokens = parser.parse_args().tokens
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    join()
    plain = make_layer(1, False)
    layers, weights, mains = {"plain": plain, "two chunks": make_layer(2, False)}, {}, {}
    if hasattr(plain.config, chunks.DELAYS):
        layers |= {"wgrad": make_layer(1, True), "two chunks, wgrad": make_layer(2, True)}
    for layer in layers.values():
        share(weights, layer, mains)
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    shape = (2, tokens, 1, HIDDEN)
    x, grad = torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)
    off = differences(layers, x, grad, mains)
    for _ in range(3):  # with the streams at other places in each
        off = {name: max(value, off[name]) for name, value in differences(layers, x, grad, mains).items()}
    fast = times(layers, x, grad, 6)
    own = calls_alone(plain, x, grad)
    us = max(0.0, 1e3 * (SHARE * fast["plain"][1] - own) / (4 * (1 - SHARE)))
    with Network(us, tokens * HIDDEN):
        slow = times(layers, x, grad, 6)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {dist.get_world_size()} x {torch.cuda.get_device_name()}, T = {tokens}")
        print(f"calls take {own:.2f} of {fast['plain'][1]:.2f} ms; with a network {us:.0f} us more each")
        print(
            f"{'ms':18} {'forward':>8} {'both':>8} {'x plain':>8} {'host':>8} {'peak GB':>8} | "
            f"within the node {'x plain':>8} {'host':>8} off"
        )
        for name, (forward, both, host, peak) in slow.items():
            gain, within = slow["plain"][1] / both, fast["plain"][1] / fast[name][1]
            row = f"{name:18} {forward:8.2f} {both:8.2f} {gain:8.3f} {host:8.2f} {peak:8.2f}"
            print(f"{row} | {fast[name][1]:15.2f} {within:8.3f} {fast[name][2]:8.2f} {off[name]:.0e}")
    torch.cuda.synchronize()
    shared_buffers.close_buffers()
    dist.barrier()
    dist.destroy_process_group()
    wrong = [f"{name}: off by {value:.0e}" for name, value in off.items() if not value <= ROUNDING]
    if slow["plain"][1] / slow["two chunks"][1] < GAIN:
        wrong.append(f"two chunks: less than {GAIN} times as fast")
    if slow["two chunks"][3] > MEMORY * slow["plain"][3]:
        wrong.append(f"two chunks: over {MEMORY} times the memory")
    sys.exit("; ".join(wrong) or None)


if __name__ == "__main__":
    main()

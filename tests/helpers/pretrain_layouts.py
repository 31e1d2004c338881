"""How pretrain_gpt.py is spread over ranks in the tests.

Every run starts from the same checkpoint of one rank. `equal_to`: "single": the run of one rank; "alltoall": Megatron's
dispatcher in the same layout.
"""

from dataclasses import dataclass

MODEL = """--num-layers 4 --moe-layer-freq [0,1,1,1] --moe-shared-expert-intermediate-size 24 --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.3"""
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
CP2 = "--context-parallel-size 2"  # with the attention of context_attention.py
NO_MTP = "--mtp-loss-scaling-factor 0"  # its mean is over a context-parallel rank, in Megatron
ADAM = "--optimizer adam --adam-eps 1"  # steps in proportion to the gradients, as SGD's, or noise decides over signs
DISTRIBUTED = f"{ADAM} --use-distributed-optimizer"
# Fp8 is Transformer Engine's; the local spec takes its flags for those of the padding alone.
PADDED = "--fp8-format hybrid --fp8-recipe tensorwise --moe-router-padding-for-quantization"
PACKED = "--packed-mock-data --micro-batch-size 1"  # documents, and other numbers of tokens on the ranks
HYBRID = "--hybrid-override-pattern *E-E"
SIGMOID = """--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4
    --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5"""


@dataclass(frozen=True)
class Layout:
    world: int
    parallel: str  # flags that change nothing of what is computed
    model: str = ""  # flags that do, of the runs that it is compared with, too
    ep_flags: tuple = ()
    equal_to: tuple = ("single", "alltoall")
    tolerance: float = 2e-5  # of losses, norms and the largest change of a parameter

    @property
    def flags(self):
        return self.parallel.split() + self.model.split()


BF16 = "--bf16 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32"
GROUPED = ("--ep-experts", "grouped")
OVERLAP = "--overlap-moe-expert-parallel-comm"
PAD = "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"
ALL = {
    "TP 2, ETP 2, EP 2, sequence parallel": Layout(
        4,
        f"{TP2} {EP2} --expert-tensor-parallel-size 2",
        equal_to=("single",),  # Megatron's all-to-all gathers unequal counts over TP ranks, which gloo cannot
    ),
    "PP 2, VPP 2, EP 2, full recompute": Layout(
        4,
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {EP2} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        equal_to=("single",),
    ),
    "EP 4, distributed optimizer, fused sigmoid router with padding": Layout(
        4, f"{EP4} {DISTRIBUTED} {PADDED}", SIGMOID, ep_flags=("--ep-router", "fused"), equal_to=("single",)
    ),
    "EP 2": Layout(2, EP2),
    "EP 4": Layout(4, EP4),
    "EP 8": Layout(8, "--expert-model-parallel-size 8"),
    "TP 2, EP 2, PP 2": Layout(8, f"{TP2} {EP2} --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2"),
    "TP 2, EP 4, ETP 1": Layout(4, f"{TP2} {EP4} --expert-tensor-parallel-size 1"),
    "VPP 2": Layout(4, f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {EP2}"),
    "CP 2, EP 2": Layout(4, f"{CP2} {EP2}", NO_MTP),
    "CP 2, EP 4": Layout(4, f"{CP2} {EP4}", NO_MTP),
    "CP 2, TP 2, EP 4, ETP 1": Layout(4, f"{CP2} {TP2} {EP4} --expert-tensor-parallel-size 1", NO_MTP),
    "DP 2, EP 4, distributed optimizer": Layout(8, f"{EP4} {DISTRIBUTED}"),
    "distributed optimizer, overlapped reduction": Layout(
        4, f"{EP2} {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
    ),
    "shared experts overlapped": Layout(4, f"{EP4} --moe-shared-expert-overlap"),
    "TP 2, shared experts overlapped": Layout(
        4, f"{TP2} {EP4} --expert-tensor-parallel-size 1 --moe-shared-expert-overlap"
    ),
    "selective recompute": Layout(
        4, f"{EP4} --recompute-granularity selective --recompute-modules moe shared_experts core_attn"
    ),
    "capacity": Layout(4, EP4, "--moe-expert-capacity-factor 1.0"),
    "capacity with padding": Layout(4, EP4, PAD),
    "sigmoid router": Layout(4, EP4, SIGMOID),
    "fused router": Layout(4, EP4, ep_flags=("--ep-router", "fused")),
    "router with padding": Layout(4, f"{EP4} {PADDED}"),
    "TP 2, EP 2, ETP 2, router with padding": Layout(
        4, f"{TP2} {EP2} --expert-tensor-parallel-size 2 {PADDED}", equal_to=("single",)
    ),
    "packed sequences": Layout(4, EP4, PACKED),
    "packed sequences, attention on other ranks": Layout(4, EP4, PACKED, ep_flags=("--ep-sequences",)),
    "packed sequences, attention on other ranks, selective recompute": Layout(
        4,
        f"{EP4} --recompute-granularity selective --recompute-modules core_attn",
        PACKED,
        ep_flags=("--ep-sequences",),
        equal_to=("single",),
    ),
    "packed sequences, fused router with padding": Layout(
        4, f"{EP4} {PADDED}", PACKED, ep_flags=("--ep-router", "fused"), equal_to=("single",)
    ),
    "hybrid model, PP 2, EP 2": Layout(4, f"--pipeline-model-parallel-size 2 {EP2}", HYBRID),
    "probabilities on combine": Layout(4, EP4, ep_flags=("--ep-moe-apply-probs-on-combine",)),
    "fused router, PP 2, TP 2": Layout(
        8,
        f"{TP2} {EP2} --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2",
        SIGMOID,
        ep_flags=("--ep-router", "fused"),
        equal_to=("single",),
    ),
    "grouped experts, TP 2, ETP 2, EP 2": Layout(
        4,
        f"{TP2} {EP2} --expert-tensor-parallel-size 2",
        "--moe-ffn-hidden-size 32",
        ep_flags=GROUPED,
        equal_to=("single",),
    ),
    "grouped experts, PP 2, VPP 2, full recompute": Layout(
        4,
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {EP2} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ep_flags=(*GROUPED, "--ep-router", "fused"),
        equal_to=("single",),
    ),
    "grouped experts, distributed optimizer, selective recompute": Layout(
        4,
        f"{EP2} {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather "
        "--recompute-granularity selective --recompute-modules moe shared_experts",
        ep_flags=GROUPED,
        equal_to=("single",),
    ),
    "grouped experts, the capacity of a rank": Layout(
        4, EP4, ep_flags=(*GROUPED, "--ep-moe-expert-rank-capacity-factor", "4"), equal_to=("single",)
    ),
    "grouped experts in two chunks": Layout(
        4, f"{EP4} --moe-token-dispatcher-type flex", ep_flags=(*GROUPED, "--ep-moe-chunks", "2"), equal_to=("single",)
    ),
    "grouped experts, hybrid model": Layout(2, EP2, HYBRID, ep_flags=GROUPED, equal_to=("single",)),
    "global auxiliary loss": Layout(  # its running counts depend on how many ranks share a global batch
        4, EP4, "--moe-router-load-balancing-type global_aux_loss --moe-z-loss-coeff 1e-3", equal_to=("alltoall",)
    ),
    "bf16": Layout(4, f"{EP4}", BF16, equal_to=("alltoall",)),
    "bf16, PP 2, VPP 2, 1F1B overlap": Layout(
        4,
        f"--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {EP2} {OVERLAP}",
        BF16,
        equal_to=("alltoall",),
        tolerance=2e-2,
    ),
}

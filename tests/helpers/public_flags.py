"""Flags of public training scripts around Megatron-LM, as far as they describe model, layout and dispatcher."""

from dataclasses import dataclass

LACKING = {  # what the host does not have (Transformer Engine, GPUs, so many layers), and how many values it has
    **dict.fromkeys(("--moe-grouped-gemm", "--moe-router-fusion", "--tp-comm-overlap", "--use-flash-attn"), 0),
    **dict.fromkeys(("--cross-entropy-loss-fusion", "--te-rng-tracker", "--delay-wgrad-compute"), 0),
    **dict.fromkeys(("--attention-backend", "--cross-entropy-fusion-impl", "--pipeline-model-parallel-layout"), 1),
    **dict.fromkeys(("--decoder-last-pipeline-num-layers", "--context-parallel-size"), 1),
    **dict.fromkeys(("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"), 0),
    **dict.fromkeys(("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"), 1),
    **{"--multi-latent-attention": 0, "--rotary-scaling-factor": 1, "--mscale": 1, "--mscale-all-dim": 1},
    **{"--recompute-modules": 2, "--use-transformer-engine-op-fuser": 0, "--moe-use-grouped-tensor": 0},
}
SMALL = {
    **{"--num-layers": "4", "--hidden-size": "32", "--ffn-hidden-size": "48", "--num-attention-heads": "4"},
    **{"--num-query-groups": "2", "--kv-channels": "8", "--seq-length": "16", "--max-position-embeddings": "16"},
    **{"--num-experts": "8", "--moe-router-topk": "2", "--moe-ffn-hidden-size": "24", "--moe-layer-freq": "[0,1,1,1]"},
    **{"--moe-shared-expert-intermediate-size": "24", "--moe-router-num-groups": "4", "--moe-router-group-topk": "2"},
    **{"--num-layers-per-virtual-pipeline-stage": "1", "--global-batch-size": "16"},
}

MIXTRAL = """--disable-bias-linear --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --no-masked-softmax-fusion
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --bf16 --seq-length 4096 --max-position-embeddings 32768 --micro-batch-size 1"""
MIXTRAL_8X7B = f"{MIXTRAL} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336"
DEEPSEEK = """--num-attention-heads 128 --kv-channels 128 --hidden-size 7168 --ffn-hidden-size 18432 --swiglu
    --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-base 10000
    --untie-embeddings-and-output-weights --disable-bias-linear --multi-latent-attention --qk-layernorm
    --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
    --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-num-groups 8
    --moe-router-group-topk 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-grouped-gemm --bf16
    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1"""
DEEPSEEK_V3 = f"{DEEPSEEK} --num-layers 61 --num-experts 256 --moe-layer-freq [0]*3+[1]*58"
QWEN3 = """--disable-bias-linear --qk-layernorm --group-query-attention --num-query-groups 4 --kv-channels 128
    --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope --rotary-percent 1.0
    --rotary-base 1000000 --swiglu --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --num-experts 128 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --bf16
    --seq-length 4096 --max-position-embeddings 40960 --micro-batch-size 1"""
QWEN3_30B = f"{QWEN3} --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32"
QWEN3_30B += " --moe-ffn-hidden-size 768"
QWEN3_235B = f"{QWEN3} --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64"
QWEN3_235B += " --moe-ffn-hidden-size 1536 --moe-grouped-gemm --moe-router-dtype fp32"
KIMI = DEEPSEEK.replace("--num-attention-heads 128", "--num-attention-heads 64").replace("-groups 8", "-groups 1")
KIMI = KIMI.replace("group-topk 4", "group-topk 1") + " --num-layers 61 --num-experts 384 --moe-layer-freq [0]+[1]*60"
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --train-iters 2 --lr 1e-4 --min-lr 1e-5"
ZERO = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = """--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion
    --init-model-with-meta-device --ckpt-format fsdp_dtensor --fsdp-double-buffer --use-nccl-ub --overlap-grad-reduce
    --overlap-param-gather --fsdp-manual-registration --outer-dp-sharding-strategy no_shard"""
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PRECISION_AWARE = """--use-precision-aware-optimizer --main-grads-dtype fp32 --main-params-dtype fp32
    --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"""


@dataclass(frozen=True)
class Public:
    world: int
    sizes: tuple[int, int, int, int]
    others: str
    on_host: bool = True
    since: str = "0.16"

    @property
    def flags(self):
        return [*layout(*self.sizes), *self.others.split()]

    @property
    def host_flags(self):
        """For four ranks."""
        tensor, pipeline, _, expert_tensor = (min(size, 2) for size in self.sizes)
        words = self.others.split()
        for flag, values in LACKING.items():
            while flag in words:
                at = words.index(flag)
                del words[at : at + 1 + values]
        small = [word for pair in SMALL.items() if pair[0] in words for word in pair]
        expert = 4 // pipeline // expert_tensor
        return [*words, *small, *layout(tensor, pipeline, expert, expert_tensor), "--adam-eps", "1"]


def layout(tensor, pipeline, expert, expert_tensor):
    names = ("tensor-model", "pipeline-model", "expert-model", "expert-tensor")
    sizes = zip(names, (tensor, pipeline, expert, expert_tensor), strict=True)
    words = [word for name, size in sizes for word in (f"--{name}-parallel-size", str(size))]
    return words + (["--sequence-parallel"] if tensor > 1 else [])


# world, sizes: ranks, and those of TP, PP, EP and expert TP. on_host: whether two steps there show anything.
# since: the oldest Megatron that knows what `megatron_ep.pretrain` leaves of the flags.
PUBLIC = {
    "megatron/mixtral_8x7b": Public(
        32, (1, 4, 8, 1), f"{MIXTRAL_8X7B} {ZERO} --global-batch-size 256 --moe-token-dispatcher-type alltoall"
    ),
    "moe_guide/mixtral_8x7b": Public(
        32,
        (1, 4, 8, 1),
        f"{MIXTRAL_8X7B} {ZERO} --global-batch-size 128 --moe-permute-fusion --moe-token-dispatcher-type alltoall",
    ),
    "moe_guide/overlap": Public(
        32,
        (1, 4, 8, 1),
        f"{MIXTRAL_8X7B} --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 128 "
        "--use-distributed-optimizer --moe-permute-fusion --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    ),
    "moe_guide/allgather": Public(
        8, (4, 1, 2, 4), f"{MIXTRAL_8X7B} {ZERO} --global-batch-size 128 --moe-token-dispatcher-type allgather"
    ),
    "moe_guide/paged_stash": Public(
        8,
        (1, 1, 8, 1),
        f"{DEEPSEEK_V3} --global-batch-size 128 --cuda-graph-impl full_iteration "
        "--no-check-for-nan-in-loss-and-grad --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
        "--use-transformer-engine-op-fuser --moe-expert-rank-capacity-factor 1.5 --moe-paged-stash",
        on_host=False,
        since="0.19",
    ),
    "megatron_rl/qwen3_30b": Public(
        8,
        (4, 1, 2, 1),
        f"{QWEN3_30B} --attention-backend flash --te-rng-tracker --attention-softmax-in-fp32 "
        "--no-masked-softmax-fusion --moe-layer-freq 1 --global-batch-size 256 --moe-token-dispatcher-type alltoall",
    ),
    "megatron/deepseek_v3_proxy": Public(
        64,
        (2, 4, 16, 1),
        f"{DEEPSEEK} --num-layers 14 --num-experts 64 --moe-layer-freq [0]*3+[1]*11 {ZERO} "
        "--pipeline-model-parallel-layout Et*2|(tt|)*5t|tmL --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 "
        "--moe-router-pre-softmax --moe-permute-fusion --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend hybridep --global-batch-size 512 --cross-entropy-loss-fusion "
        "--cross-entropy-fusion-impl native",
    ),
    "model_zoo/mixtral_8x22b": Public(
        128,
        (2, 8, 8, 1),
        f"{MIXTRAL} --num-layers 56 --hidden-size 6144 --ffn-hidden-size 16384 {ZERO} "
        "--tp-comm-overlap --use-flash-attn --moe-permute-fusion --moe-router-fusion --global-batch-size 256 "
        "--moe-token-dispatcher-type alltoall",
    ),
    "model_zoo/deepseek_v3_h100": Public(
        1024,
        (1, 16, 64, 1),
        f"{DEEPSEEK_V3} {ZERO} --decoder-first-pipeline-num-layers 4 "
        "--decoder-last-pipeline-num-layers 1 --global-batch-size 8192 --moe-permute-fusion --moe-router-fusion "
        f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --fp8-recipe blockwise "
        f"--fp8-format e4m3 --fp8-param-gather {PRECISION_AWARE} --moe-router-padding-for-fp8",
        on_host=False,
    ),
    "model_zoo/deepseek_v3_gb300": Public(
        128,
        (1, 4, 32, 1),
        f"{DEEPSEEK_V3} {ZERO} --pipeline-model-parallel-layout Et*4|(tttt|)*14tmL "
        "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 --global-batch-size 4096 --moe-permute-fusion "
        "--moe-router-fusion --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
        "--moe-hybridep-num-sms 32 --fp8-recipe mxfp8 --fp8-format e4m3 --fp8-param-gather "
        f"--reuse-grad-buf-for-mxfp8-param-ag {PRECISION_AWARE} --moe-router-padding-for-quantization "
        "--recompute-granularity selective --recompute-modules mlp --moe-router-force-load-balancing",
        on_host=False,
    ),
    "model_zoo/qwen3_235b": Public(
        256,
        (2, 8, 32, 1),
        f"{QWEN3_235B} --num-layers-per-virtual-pipeline-stage 3 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --global-batch-size 2048 "
        "--use-distributed-optimizer --moe-permute-fusion --moe-router-fusion --delay-wgrad-compute "
        "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep "
        "--moe-deepep-num-sms 20 --recompute-granularity selective --recompute-modules moe_act layernorm "
        "--moe-router-force-load-balancing",
    ),
    "model_zoo/qwen3_30b": Public(
        32,
        (1, 1, 8, 1),
        f"{QWEN3_30B} {ZERO} --moe-grouped-gemm --moe-router-dtype fp32 --use-flash-attn "
        "--moe-permute-fusion --global-batch-size 256 --moe-token-dispatcher-type alltoall",
    ),
    "slime/kimi_k2": Public(
        256,
        (8, 8, 32, 1),
        f"{KIMI} --context-parallel-size 4 --decoder-last-pipeline-num-layers 5 {FULL_RECOMPUTE} "
        "--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash "
        "--global-batch-size 1024 --moe-permute-fusion --moe-enable-deepep --moe-token-dispatcher-type flex",
    ),
    "slime/qwen3_30b": Public(
        8,
        (4, 1, 8, 1),
        f"{QWEN3_30B} {FULL_RECOMPUTE} --moe-grouped-gemm --moe-router-dtype fp32 "
        "--moe-token-drop-policy probs --moe-permute-fusion --moe-layer-freq ([1]*48) --global-batch-size 32 "
        "--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --moe-token-dispatcher-type alltoall",
    ),
    "bridge/qwen3_30b_blackwell": Public(
        8,
        (1, 1, 8, 1),
        f"{QWEN3_30B} {ZERO} --moe-grouped-gemm --moe-router-dtype fp32 --global-batch-size 512 "
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep --moe-flex-dispatcher-num-sms 32 "
        "--use-transformer-engine-op-fuser --moe-use-grouped-tensor",
        since="0.20",
    ),
}
assert len(PUBLIC) == 15

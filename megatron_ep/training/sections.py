"""The sections of a recipe. Keys of `model` have the names of Megatron-Core's TransformerConfig.

Each section is checked when it is created: unknown keys, missing keys, types, and relations between its values.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_ep.config import MAX_TIMEOUT_S, MAX_TOPK, Config
from megatron_ep.megatron.options import NAMES, Options

Fraction = Annotated[float, Field(ge=0, lt=1)]


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Section(BaseModel):
    """A section of a recipe, without unknown keys, silent conversions and changes after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Topology(Section):
    """The ranks, each a process: of the expert-parallel group, or of all machines that a real model is trained on."""

    nodes: PositiveInt
    ranks_per_node: PositiveInt

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def require_job(self) -> None:
        """Raises ValueError unless the job of this rank has as many ranks."""
        if int(os.environ["WORLD_SIZE"]) != self.world_size:
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the recipe's topology is {self.nodes} x "
                f"{self.ranks_per_node} = {self.world_size} ranks"
            )


class Model(Section):
    """The architecture, with the names of Megatron-Core's TransformerConfig."""

    num_layers: PositiveInt
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt | None = None
    kv_channels: PositiveInt | None = None
    qk_layernorm: bool = False
    rotary_base: PositiveInt = 10000
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: PositiveFloat = 1e-6
    activation_func: Literal["silu", "gelu"] = "silu"
    gated_linear_unit: bool = True
    add_bias_linear: bool = False
    share_embeddings_and_output_weights: bool = False
    init_method_std: PositiveFloat = 0.02
    hidden_dropout: Fraction = 0.0
    attention_dropout: Fraction = 0.0
    recompute_granularity: Literal["full", "selective"] | None = None
    # for selective recomputation
    recompute_modules: list[Literal["core_attn", "layernorm", "mlp", "moe", "shared_experts"]] | None = None
    recompute_method: Literal["uniform", "block"] | None = None  # for full recomputation
    recompute_num_layers: PositiveInt | None = None  # for full recomputation

    num_moe_experts: PositiveInt
    moe_layer_freq: list[Literal[0, 1]] | PositiveInt = 1
    moe_ffn_hidden_size: PositiveInt
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    moe_shared_expert_overlap: bool = False
    moe_router_topk: Annotated[int, Field(gt=0, le=MAX_TOPK)]
    moe_router_num_groups: PositiveInt | None = None
    moe_router_group_topk: PositiveInt | None = None
    moe_router_score_function: Literal["sigmoid", "softmax"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"] = "none"
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    moe_z_loss_coeff: PositiveFloat | None = None
    moe_expert_capacity_factor: PositiveFloat | None = None
    moe_pad_expert_input_to_capacity: bool = False

    @model_validator(mode="after")
    def _relations_of_routing(self) -> Model:
        experts, topk = self.num_moe_experts, self.moe_router_topk
        groups, group_topk = self.moe_router_num_groups, self.moe_router_group_topk
        require(topk <= experts, f"moe_router_topk {topk} exceeds num_moe_experts {experts}")
        require(
            (groups is None) == (group_topk is None),
            f"moe_router_num_groups ({groups}) and moe_router_group_topk ({group_topk}) must be given together",
        )
        if groups is not None and group_topk is not None:
            require(experts % groups == 0, f"moe_router_num_groups {groups} does not divide num_moe_experts {experts}")
            require(group_topk <= groups, f"moe_router_group_topk {group_topk} exceeds moe_router_num_groups {groups}")
            require(
                topk % group_topk == 0, f"moe_router_group_topk {group_topk} does not divide moe_router_topk {topk}"
            )
            require(
                topk <= group_topk * (experts // groups),
                f"moe_router_topk {topk} exceeds the {group_topk} x {experts // groups} experts of the groups kept",
            )
        if isinstance(self.moe_layer_freq, list):
            length = len(self.moe_layer_freq)
            require(length == self.num_layers, f"moe_layer_freq has {length} entries, num_layers is {self.num_layers}")
            require(1 in self.moe_layer_freq, "moe_layer_freq has no MoE layer (no 1)")
        return self

    @model_validator(mode="after")
    def _relations_of_scores(self) -> Model:
        softmax = self.moe_router_score_function == "softmax"
        require(
            not (softmax and self.moe_router_enable_expert_bias),
            "moe_router_enable_expert_bias needs moe_router_score_function sigmoid, got softmax",
        )
        require(
            softmax or not self.moe_router_pre_softmax, "moe_router_pre_softmax needs moe_router_score_function softmax"
        )
        require(
            not softmax or self.moe_router_topk > 1 or self.moe_router_pre_softmax,
            "moe_router_topk 1 with moe_router_score_function softmax needs moe_router_pre_softmax: "
            "the softmax of a single score is 1",
        )
        require(
            "moe_router_bias_update_rate" not in self.model_fields_set or self.moe_router_enable_expert_bias,
            "moe_router_bias_update_rate needs moe_router_enable_expert_bias",
        )
        require(
            (self.moe_router_load_balancing_type == "none") == (self.moe_aux_loss_coeff == 0),
            f"moe_router_load_balancing_type {self.moe_router_load_balancing_type} with moe_aux_loss_coeff "
            f"{self.moe_aux_loss_coeff}: neither does anything without the other",
        )
        return self

    @model_validator(mode="after")
    def _relations_of_layers(self) -> Model:
        full = self.recompute_granularity == "full"
        for name in ("recompute_method", "recompute_num_layers"):
            require((getattr(self, name) is not None) == full, f"{name} belongs to recompute_granularity full")
        require(
            self.recompute_modules is None or self.recompute_granularity == "selective",
            "recompute_modules belongs to recompute_granularity selective",
        )
        require(
            self.moe_shared_expert_intermediate_size is not None or not self.moe_shared_expert_overlap,
            "moe_shared_expert_overlap needs moe_shared_expert_intermediate_size",
        )
        require(
            not self.add_bias_linear or self.moe_shared_expert_intermediate_size is None,
            "add_bias_linear: Megatron-Core's shared experts have no bias (moe_shared_expert_intermediate_size is set)",
        )
        heads, query_groups = self.num_attention_heads, self.num_query_groups or self.num_attention_heads
        require(
            self.kv_channels is not None or self.hidden_size % heads == 0,
            f"num_attention_heads {heads} does not divide hidden_size {self.hidden_size}",
        )
        require(
            heads % query_groups == 0, f"num_query_groups {query_groups} does not divide num_attention_heads {heads}"
        )
        require(
            self.moe_expert_capacity_factor is not None or not self.moe_pad_expert_input_to_capacity,
            "moe_pad_expert_input_to_capacity needs moe_expert_capacity_factor",
        )
        return self


class Train(Section):
    """Length, batch and process settings. Batch sizes count sequences.

    device: cpu, or cuda: the GPUs of the machine, assigned to ranks in turn; ranks may share one.
    """

    device: Literal["cpu", "cuda"]
    train_iters: PositiveInt
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    threads_per_rank: PositiveInt = 1
    # limit, in seconds, of a rank's wait for others in a collective
    distributed_timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] = 300.0


class Optimizer(Section):
    """The optimizer, AdamW, with the names of Megatron-Core's OptimizerConfig."""

    lr: PositiveFloat
    min_lr: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0

    @model_validator(mode="after")
    def _relations(self) -> Optimizer:
        require(self.min_lr <= self.lr, f"min_lr {self.min_lr} exceeds lr {self.lr}")
        return self


class Scheduler(Section):
    """The learning rate over steps: linear warm-up from 0 to lr, then decay to min_lr. It does not depend on
    train_iters, so that the first steps of longer and shorter runs are equal."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_warmup_iters: NonNegativeInt = 0
    lr_decay_iters: PositiveInt

    @model_validator(mode="after")
    def _relations(self) -> Scheduler:
        require(
            self.lr_warmup_iters < self.lr_decay_iters,
            f"lr_warmup_iters {self.lr_warmup_iters} is not below lr_decay_iters {self.lr_decay_iters}",
        )
        return self


class Ddp(Section):
    """Megatron-Core's DistributedDataParallelConfig."""

    overlap_grad_reduce: bool = False
    check_for_nan_in_grad: bool = True
    bucket_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _relations(self) -> Ddp:
        require(self.bucket_size is None or self.overlap_grad_reduce, "bucket_size needs overlap_grad_reduce")
        return self


class Dataset(Section):
    """The text. path: None for the language reference that ships with Python. packed: whether attention is limited to
    tokens of the same document."""

    path: str | None = None
    seq_length: PositiveInt
    packed: bool = False


class Tokenizer(Section):
    """The tokenizer. byte: UTF-8 bytes and an end-of-document token."""

    type: Literal["byte"] = "byte"


class Checkpoint(Section):
    """Checkpoints. save_interval: in steps; the last step is always saved."""

    save_interval: PositiveInt = 100


class Logger(Section):
    """The log. log_interval: in steps; loss.csv has all steps."""

    log_interval: PositiveInt = 10


class Dispatcher(Section):
    """The dispatcher. ep: this project's; alltoall and allgather: Megatron-Core's, which ignore the other keys.

    router: fused: this project's router, which passes ids directly to the dispatcher; megatron: Megatron-Core's.
    experts: grouped: a rank's experts as two grouped products (`megatron_ep.megatron.experts`); megatron: its own.
    sequences: balances attention of packed sequences over ranks (`megatron_ep.megatron.attention`).
    trace: a directory for the numbers of tokens that each router sends to each expert (`megatron-ep balance`).
    moe_...: see `megatron_ep.megatron.options.Options`. All others: fields of `megatron_ep.Config` (None: the default);
    num_sms matters only with train.device cuda.
    """

    type: Literal["ep", "alltoall", "allgather"] = "ep"
    router: Literal["fused", "megatron"] = "fused"
    experts: Literal["grouped", "megatron"] = "megatron"
    sequences: bool = False
    trace: str | None = None
    timeout: PositiveFloat | None = None
    row_bytes: PositiveInt | None = None
    num_sms: PositiveInt | None = None
    moe_expert_rank_capacity_factor: PositiveFloat | None = None
    moe_apply_probs_on_combine: bool = False
    moe_dispatch_fwd_dtype: Literal["fp8"] | None = None
    moe_combine_bwd_dtype: Literal["fp8"] | None = None
    moe_low_latency_max_tokens: PositiveInt | None = None
    moe_chunks: Literal[1, 2] = 1

    def settings(self) -> dict[str, Any]:
        """Returns the given settings of `megatron_ep.Config` and the options."""
        return self.model_dump(exclude={"type", "router", "experts", "sequences", "trace"}, exclude_defaults=True)

    @model_validator(mode="after")
    def _relations(self) -> Dispatcher:
        require(not self.sequences or self.type == "ep", f"sequences is true, must be false with type {self.type}")
        require(self.trace is None or self.type == "ep", f"trace is {self.trace}, which needs type ep, got {self.type}")
        settings = self.settings()
        Options(**{name: settings.pop(name) for name in NAMES if name in settings})
        Config(1, **settings)  # both raise ValueError for a value out of range
        return self

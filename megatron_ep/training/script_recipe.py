"""Recipes of real models, with a section `parallel`, which Megatron-LM's pretrain_gpt.py trains.

Layout, precision and architecture have Megatron's names. `script_flags` converts a recipe to flags of the script, and
runs it through `megatron_ep.pretrain`. Unknown keys are errors, as in the small recipes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from megatron_ep.training import recipe
from megatron_ep.training.sections import (
    Dispatcher,
    Optimizer,
    Scheduler,
    Section,
    Topology,
    require,
)


class Verified(Section):
    """The run that verified the recipe, and the file in the repository with its results."""

    on: Literal["cpu", "1 GPU", "2 GPUs", "4 GPUs", "not run"]
    results: str | None = None

    @model_validator(mode="after")
    def _relations(self) -> Verified:
        require((self.on == "not run") == (self.results is None), "results: a file if, and only if, it was run")
        return self


class Parallel(Section):
    """The parallel layout of the model, with the names of Megatron-LM's flags."""

    tensor_model_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: PositiveInt = 1
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    pipeline_model_parallel_layout: str | None = None
    decoder_first_pipeline_num_layers: PositiveInt | None = None
    decoder_last_pipeline_num_layers: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt
    expert_tensor_parallel_size: PositiveInt = 1
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    distributed_timeout_minutes: PositiveInt | None = None


class Precision(Section):
    """Data types of weights, optimizer moments and matrix products."""

    bf16: bool = True
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    fp8_param_gather: bool = False
    moe_router_padding_for_quantization: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: Literal["fp32", "bf16"] | None = None
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] | None = None
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] | None = None

    @model_validator(mode="after")
    def _relations(self) -> Precision:
        fp8 = self.fp8_format is not None
        require(fp8 == (self.fp8_recipe is not None), "fp8_format and fp8_recipe must be given together")
        return self


class ScriptModel(recipe.Model):
    """The model of small recipes, with further settings of real models."""

    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    multi_latent_attention: bool = False
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_head_dim: PositiveInt | None = None
    qk_pos_emb_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    rotary_scaling_factor: PositiveFloat | None = None
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    mtp_num_layers: PositiveInt | None = None
    mtp_loss_scaling_factor: PositiveFloat | None = None
    moe_grouped_gemm: bool = True
    transformer_impl: Literal["transformer_engine", "local"] = "transformer_engine"

    @model_validator(mode="after")
    def _latent(self) -> ScriptModel:
        for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "q_lora_rank"):
            require(self.multi_latent_attention or getattr(self, name) is None, f"{name} needs multi_latent_attention")
        require(
            self.mtp_num_layers is not None or self.mtp_loss_scaling_factor is None,
            "mtp_loss_scaling_factor needs mtp_num_layers",
        )
        return self


class ScriptTrain(Section):
    train_iters: PositiveInt
    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    eval_iters: NonNegativeInt = 0
    eval_interval: PositiveInt = 1000


class Data(Section):
    """Megatron's indexed datasets (.bin and .idx), or its mock data.

    data_path: prefixes, or alternating weights and prefixes. split: shares of training, validation and test.
    """

    seq_length: PositiveInt
    mock_data: bool = False
    data_path: list[str | float] | None = None
    split: str | None = None
    num_workers: NonNegativeInt = 2

    @model_validator(mode="after")
    def _relations(self) -> Data:
        require(self.mock_data == (self.data_path is None), "exactly one of mock_data and data_path is needed")
        return self


class ScriptTokenizer(Section):
    tokenizer_type: str = "NullTokenizer"
    tokenizer_model: str | None = None


class ScriptCheckpoint(Section):
    save: str | None = None
    load: str | None = None
    save_interval: PositiveInt = 500
    ckpt_format: Literal["torch_dist"] = "torch_dist"


class ScriptLogger(Section):
    log_interval: PositiveInt = 1
    log_throughput: bool = True
    tensorboard_dir: str | None = None


class ScriptRecipe(Section):
    """A recipe for pretrain_gpt.py. `load` reads one from a file."""

    topology: Topology
    verified: Verified
    parallel: Parallel
    precision: Precision = Precision()
    model: ScriptModel
    train: ScriptTrain
    optimizer: Optimizer
    scheduler: Scheduler
    dataset: Data
    tokenizer: ScriptTokenizer = ScriptTokenizer()
    checkpoint: ScriptCheckpoint = ScriptCheckpoint()
    logger: ScriptLogger = ScriptLogger()
    dispatcher: Dispatcher = Dispatcher()
    environment: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _relations(self) -> ScriptRecipe:
        world, p = self.topology.world_size, self.parallel
        dense = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
        require(world % dense == 0, f"parallel: TP x PP x CP is {dense}, which does not divide the {world} ranks")
        experts = p.expert_tensor_parallel_size * p.expert_model_parallel_size * p.pipeline_model_parallel_size
        require(world % experts == 0, f"parallel: ETP x EP x PP is {experts}, which does not divide the {world} ranks")
        require(
            self.model.num_moe_experts % p.expert_model_parallel_size == 0,
            f"model.num_moe_experts {self.model.num_moe_experts} is not a multiple of "
            f"parallel.expert_model_parallel_size {p.expert_model_parallel_size}",
        )
        batch = world // dense * self.train.micro_batch_size
        require(
            self.train.global_batch_size % batch == 0,
            f"train.global_batch_size {self.train.global_batch_size} is not a multiple of train.micro_batch_size "
            f"{self.train.micro_batch_size} x {world // dense} data-parallel ranks",
        )
        require(
            p.tensor_model_parallel_size == 1 or p.sequence_parallel,
            "parallel.sequence_parallel is false, must be true with experts and tensor_model_parallel_size over 1",
        )
        return self


def is_script_recipe(path: str | Path) -> bool:
    """Returns whether a file is for pretrain_gpt.py, by its section `parallel`. Raises ValueError, see `load`."""
    return "parallel" in recipe.read(path)


def load(path: str | Path, overrides: Iterable[str] = ()) -> ScriptRecipe:
    """Loads a recipe with a section `parallel`, see `recipe.load`."""
    return recipe.load(path, overrides, ScriptRecipe)

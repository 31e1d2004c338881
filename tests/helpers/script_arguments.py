"""`python script_arguments.py TREE RECIPE...`: flags of recipes and public scripts through the parser, the validator
and the model's configuration of a Megatron-LM tree, for rank 0 of their ranks. Prints a line of figures for each, and
all flags that the parser has."""

import argparse
import importlib.util
import os
import sys
import types
import typing
from unittest import mock

import typing_extensions

KERNELS = (  # of Megatron 0.19 and later, in Triton
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.ssm.ops.common.causal_conv1d_varlen",
    "megatron.core.ssm.ops.mamba2.batch_invariant_decode",
)


def stand_in():
    """What Megatron 0.19 imports at start and need not be here: Triton, for kernels that nobody calls, and a name of
    Python 3.12's."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override
    if importlib.util.find_spec("triton") is None:
        for name in KERNELS:
            module = sys.modules[name] = types.ModuleType(name)
            module.__getattr__ = lambda name: mock.MagicMock()


def main(tree, *paths):
    stand_in()
    sys.path.insert(0, tree)
    from megatron_ep.megatron import flags
    from megatron_ep.megatron.stand_ins import host_script

    host_script.enable()
    import public_flags
    from megatron.core import __version__ as core_version
    from megatron.core import utils
    from megatron.training import arguments
    from packaging.version import Version

    from megatron_ep.megatron.dispatcher import _expert_alignment
    from megatron_ep.training import script_flags, script_recipe

    def configured(words, world, is_fp8):
        if is_fp8 and importlib.util.find_spec("transformer_engine") is None:
            utils.get_te_version = lambda: Version("2.9")  # Megatron asks for its version
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        # Fused rotary embeddings are Transformer Engine's, which is not here.
        sys.argv = ["pretrain_gpt.py", *flags.translated(words).arguments, "--no-rope-fusion"]
        args = arguments.parse_args()
        arguments.validate_args(args, {})
        return args, arguments.core_transformer_config_from_args(args)

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    print("FLAGS", core_version, [flag for action in parser._actions for flag in action.option_strings], flush=True)
    for name, public in public_flags.PUBLIC.items():
        if Version(core_version).release < Version(public.since).release:
            continue
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32" if flags.OVERLAP in public.flags else "1"}
        words = [*public.flags, *public_flags.DATA.split()]
        args, config = configured(words, public.world, True)
        figures = {
            "dispatcher": config.moe_token_dispatcher_type,
            "backend": config.moe_flex_dispatcher_backend,
            "overlap": config.overlap_moe_expert_parallel_comm,
            "experts": config.num_moe_experts,
            "expert_parallel": config.expert_model_parallel_size,
        }
        print("PUBLIC", name, figures, flush=True)
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    words = [*public_flags.layout(1, 1, 8, 1), *f"{public_flags.MIXTRAL_8X7B} {public_flags.FSDP}".split()]
    args, _ = configured([*words, "--global-batch-size", "64", *public_flags.DATA.split()], 8, False)
    names = ("use_megatron_fsdp", "nccl_ub", "fsdp_double_buffer", "init_model_with_meta_device")
    print("FSDP", core_version, [args.ckpt_format, *(getattr(args, name) for name in names)], flush=True)
    for path in paths:
        recipe = script_recipe.load(path)
        os.environ |= script_flags.environment(recipe)
        is_fp8 = bool(recipe.precision.fp8_format)
        args, config = configured(script_flags.flags(recipe), recipe.topology.world_size, is_fp8)
        figures = {
            "layers": config.num_layers,
            "experts": config.num_moe_experts,
            "hidden": config.hidden_size,
            "topk": config.moe_router_topk,
            "data_parallel": args.data_parallel_size,
            "expert_parallel": config.expert_model_parallel_size,
            "mtp": config.mtp_num_layers,
            "latent": type(config).__name__ == "MLATransformerConfig",
            "head": args.kv_channels if recipe.model.kv_channels else None,
            "query_norm": config.qk_layernorm,
            "epsilon": config.layernorm_epsilon,
            "gated": config.gated_linear_unit,
            "bias": config.add_bias_linear,
            "kv": config.num_query_groups,
            "fp8": (config.fp8, config.fp8_recipe if config.fp8 else None, _expert_alignment(config)),
            "dispatcher": config.moe_token_dispatcher_type,
        }
        print("FIGURES", path, figures, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

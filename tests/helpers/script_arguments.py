"""`python script_arguments.py TREE RECIPE...`: each recipe's flags through the parser, the validator and the model's
configuration of a Megatron-LM tree, for rank 0 of the recipe's ranks. Prints a line of figures for each."""

import os
import sys


def main(tree, *paths):
    sys.path.insert(0, tree)
    from megatron_ep.megatron import flags, host_script

    host_script.enable()
    from megatron.training import arguments

    from megatron_ep.training import script_flags, script_recipe

    for path in paths:
        recipe = script_recipe.load(path)
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(recipe.topology.world_size), "LOCAL_RANK": "0"}
        os.environ |= script_flags.environment(recipe)
        words = flags.with_dispatcher(script_flags.flags(recipe))
        sys.argv = ["pretrain_gpt.py", *words, "--no-rope-fusion"]  # it is Transformer Engine's, which is not here
        args = arguments.parse_args()
        arguments.validate_args(args, {})
        config = arguments.core_transformer_config_from_args(args)
        figures = {
            "layers": config.num_layers,
            "experts": config.num_moe_experts,
            "hidden": config.hidden_size,
            "topk": config.moe_router_topk,
            "data_parallel": args.data_parallel_size,
            "expert_parallel": config.expert_model_parallel_size,
            "mtp": config.mtp_num_layers,
            "latent": type(config).__name__ == "MLATransformerConfig",
            "epsilon": config.layernorm_epsilon,
            "gated": config.gated_linear_unit,
            "bias": config.add_bias_linear,
            "kv": config.num_query_groups,
            "dispatcher": config.moe_token_dispatcher_type,
        }
        print("FIGURES", path, figures, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

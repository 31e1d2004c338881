"""A rank of Megatron-Bridge's own `pretrain()` on the host, under torchrun.

bridge_pretrain.py RECIPE ep|alltoall STEPS
"""

import importlib
import sys
import types

import megatron_bridge
import torch

from megatron_ep.megatron import announce, plugin
from megatron_ep.megatron.stand_ins import host_script

VOCABULARY = 63


def take_restarter():
    """Bridge imports a type of the in-process restarter, which is not used here."""
    name = "nvidia_resiliency_ext.inprocess"
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].CallWrapper = object


def given(name, dispatcher, steps):
    """The recipe, with mock data and what a host has."""
    recipe = megatron_bridge.recipe(name)
    sections = {
        "model": {"transformer_layer_spec": megatron_bridge.megatrons, "use_cpu_initialization": True},
        "train": {"train_iters": steps, "global_batch_size": 8, "micro_batch_size": 1},
        "validation": {"eval_iters": 0, "eval_interval": steps + 1},
        "dist": {"distributed_backend": "gloo"},
        "checkpoint": {"save": None, "load": None},
        "logger": {"log_interval": 1, "tensorboard_dir": None},
        "ddp": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "optimizer": {"bf16": False, "params_dtype": torch.float32, "use_precision_aware_optimizer": False}
        | dict.fromkeys(("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), torch.float32),
        "scheduler": {"lr_decay_iters": 10, "lr_warmup_iters": 1},
        "dataset": {"seq_length": recipe.model.seq_length, "sequence_length": recipe.model.seq_length, "mock": True}
        | {"num_workers": 0, "persistent_workers": False, "pin_memory": False},
        "tokenizer": {"tokenizer_type": "NullTokenizer", "tokenizer_model": None, "vocab_size": VOCABULARY}
        | {"hf_tokenizer_kwargs": {}, "use_tokenizer_vocab_size": False},
    }
    if dispatcher == "alltoall":
        sections["model"] |= {"moe_token_dispatcher_type": "alltoall", "moe_flex_dispatcher_backend": None}
    for section, values in sections.items():
        for field, value in values.items():
            assert hasattr(getattr(recipe, section), field), (section, field)
            setattr(getattr(recipe, section), field, value)
    recipe.mixed_precision = recipe.comm_overlap = None
    return recipe


def main(name, dispatcher, steps):
    host_script.enable()
    megatron_bridge.bridge()
    take_restarter()
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    if dispatcher == "ep":
        plugin.enable()
        announce.show()
    with megatron_bridge.on_host():
        pretrain(given(name, dispatcher, int(steps)), forward_step)


if __name__ == "__main__":
    main(*sys.argv[1:])

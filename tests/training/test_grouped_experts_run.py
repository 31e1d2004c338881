"""`--ep-experts grouped` around Megatron-LM's own pretrain_gpt.py, against SequentialMLP: every digit, and checkpoints
that either kind of experts continues."""

import megatron_trees
import pytest
import torch
from pretrain_gpt_runs import Scripts
from pretrain_layouts import DISTRIBUTED, EP2, MODEL
from test_pretrain import weights

pytestmark = [
    pytest.mark.needs(megatron_trees.LACK),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
GROUPED = ("--ep-experts", "grouped")
FLAGS = f"{MODEL} {EP2} {DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather".split()
CONTINUE = ("--finetune", "--no-load-optim", "--no-load-rng", "--no-save-optim", "--no-save-rng")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    with Scripts(megatron_trees.INSTALLED, tmp_path_factory.mktemp("grouped")) as scripts:
        yield scripts


def experts(rank):
    """The gradients of a rank's experts by linear layer: [L, ...]."""
    found = {}
    for name, gradient in rank["gradients"].items():
        layer, _, rest = name.partition(".experts.")
        if rest.startswith("local_experts."):
            found.setdefault(f"{layer} {rest.split('.')[2]}", []).append(gradient)
        elif rest:
            found[f"{layer} {rest.split('.')[0]}"] = [*gradient]
    return found


def check_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == other["losses"]
        assert mine["norms"] == pytest.approx(other["norms"], rel=1e-6)  # a sum over parameters, in another order
        assert experts(mine).keys() == experts(other).keys() and experts(mine)
        for name, gradients in experts(other).items():
            assert all(torch.equal(*pair) for pair in zip(experts(mine)[name], gradients, strict=True)), name


def test_a_run_and_its_checkpoints(scripts, tmp_path):
    """A run of each kind, and its continuation by the other."""
    runs = {}
    for kind, ep_flags in {"megatron": (), "grouped": GROUPED}.items():
        saves = ("--save", tmp_path / kind, "--save-interval", 3, "--no-save-optim", "--train-iters", 3)
        runs[kind] = scripts.run(kind, 2, *FLAGS, *saves, ep_flags=ep_flags)
    check_equal(runs["grouped"], runs["megatron"])
    saved = [weights(tmp_path / kind) for kind in runs]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])
    for kind, ep_flags in {"megatron": GROUPED, "grouped": ()}.items():
        load = ("--load", tmp_path / kind, "--train-iters", 2, *CONTINUE)
        runs[f"after {kind}"] = scripts.run(f"after {kind}", 2, *FLAGS, *load, ep_flags=ep_flags)
    check_equal(runs["after megatron"], runs["after grouped"])

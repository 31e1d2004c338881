from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ep.training import recipe

RECIPES = sorted(Path(__file__).parents[2].glob("recipes/tiny_*.yaml"))
TINY = Path(__file__).parents[2] / "recipes" / "tiny_moe_cpu.yaml"
TREE = yaml.load(TINY.read_text(), recipe._Loader)
KEYS = [(section, key) for section, keys in TREE.items() for key in keys]


@pytest.fixture
def write(tmp_path):
    def write(tree):
        path = tmp_path / "recipe.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return path

    return write


def fault(path, *overrides):
    with pytest.raises(ValueError) as error:
        recipe.load(path, overrides)
    return str(error.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_in_the_repository_load(path):
    recipe.load(path)


def test_tiny_recipe_is_deepseek_shaped():
    tiny = recipe.load(TINY)
    assert (tiny.topology.nodes, tiny.topology.ranks_per_node) == (2, 2)
    assert tiny.model.moe_router_score_function == "sigmoid" and tiny.model.moe_router_enable_expert_bias
    assert tiny.model.moe_router_group_topk < tiny.model.moe_router_num_groups
    assert tiny.model.moe_shared_expert_intermediate_size == tiny.model.moe_ffn_hidden_size
    assert tiny.dispatcher.type == "ep" and tiny.train.train_iters >= 200


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KEYS), st.integers(0, 100), st.sampled_from("xz_"))
def test_a_misspelt_key_is_named_with_the_right_one(tmp_path_factory, place, position, letter):
    section, key = place
    position %= len(key) + 1
    misspelt = key[:position] + letter + key[position:]
    if misspelt in getattr(recipe, section.capitalize()).model_fields:
        return
    tree = {**TREE, section: {k: v for k, v in TREE[section].items() if k != key} | {misspelt: TREE[section][key]}}
    path = tmp_path_factory.getbasetemp() / "misspelt.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert f"{section}.{misspelt}: unknown key; did you mean {key}?" in fault(path)


def test_a_misspelt_section_is_named_with_the_right_one(write):
    message = fault(write({**TREE, "optimiser": {}}))
    assert "optimiser: unknown key; did you mean optimizer?" in message


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (section, name)
        for section in TREE
        for name, field in getattr(recipe, section.capitalize()).model_fields.items()
        if field.is_required()
    ],
)
def test_a_missing_key_is_named(write, section, key):
    tree = {**TREE, section: {k: v for k, v in TREE[section].items() if k != key}}
    assert f"{section}.{key}: missing" in fault(write(tree))


def test_a_missing_section_is_named(write):
    assert "model: missing" in fault(write({k: v for k, v in TREE.items() if k != "model"}))


def test_all_faults_are_reported_at_once(write):
    message = fault(write({**TREE, "train": TREE["train"] | {"seeed": 1, "global_batch_size": "many"}}))
    assert "train.seeed: unknown key" in message and "train.global_batch_size: " in message and "'many'" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.train_iters=7", lambda r: r.train.train_iters == 7),
        ("optimizer.lr=5e-4", lambda r: r.optimizer.lr == 5e-4),
        ("optimizer.lr=1", lambda r: r.optimizer.lr == 1.0),
        ("model.moe_layer_freq=[0, 0, 1]", lambda r: r.model.moe_layer_freq == [0, 0, 1]),
        ("model.moe_layer_freq=1", lambda r: r.model.moe_layer_freq == 1),
        ("dispatcher.timeout=2.5", lambda r: r.dispatcher.timeout == 2.5),
        ("dispatcher.type=alltoall", lambda r: r.dispatcher.type == "alltoall"),
        ("dispatcher.moe_dispatch_fwd_dtype=fp8", lambda r: r.dispatcher.settings()["moe_dispatch_fwd_dtype"] == "fp8"),
        ("dispatcher.moe_combine_bwd_dtype=fp8", lambda r: r.dispatcher.settings()["moe_combine_bwd_dtype"] == "fp8"),
        ('dataset.path="a=b: c.txt"', lambda r: r.dataset.path == "a=b: c.txt"),
        ("model.moe_shared_expert_overlap=true", lambda r: r.model.moe_shared_expert_overlap),
        ("ddp.overlap_grad_reduce=true", lambda r: r.ddp.overlap_grad_reduce),  # a section that the file does not have
    ],
)
def test_overrides(override, expected):
    assert expected(recipe.load(TINY, [override]))


def test_the_last_override_wins():
    assert recipe.load(TINY, ["train.seed=1", "train.seed=2"]).train.seed == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.trainiters=7", ["train.trainiters", "did you mean train_iters?"]),
        ("train.seed=one", ["train.seed", "valid integer", "'one'"]),
        ("train.seed=1.5", ["train.seed", "1.5"]),
        ("train.seed=-1", ["train.seed", "-1"]),
        ("train.device=gpu", ["train.device", "'cpu'", "'cuda'", "'gpu'"]),
        ("dispatcher.num_sms=0", ["dispatcher.num_sms", "0"]),
        ("dispatcher.moe_dispatch_fwd_dtype=mxfp8", ["dispatcher.moe_dispatch_fwd_dtype", "'fp8'"]),
        ("dispatcher.moe_rank_capacity_factor=1", ["unknown key; did you mean moe_expert_rank_capacity_factor?"]),
        ("dispatcher.type=deepep", ["dispatcher.type", "'ep'", "'alltoall'", "'allgather'", "'deepep'"]),
        ("model.add_bias_linear=0", ["model.add_bias_linear", "boolean"]),
        ("seed", ["--set seed", "section.key=value"]),
        ("=3", ["--set =3", "section.key=value"]),
        ("train.seed=[1", ["--set train.seed=[1", "YAML"]),
        ("train.seed.x=1", ["--set train.seed.x=1", "seed is not a section"]),
        ("topology.nodes=3", ["num_moe_experts 16", "6 ranks", "3 x 2"]),
        ("train.global_batch_size=10", ["global_batch_size 10", "micro_batch_size 4", "4 ranks"]),
        (
            "dispatcher.moe_expert_rank_capacity_factor=2",
            ["moe_expert_rank_capacity_factor is 2.0", "num_moe_experts is 16", "ranks are 4", "2 x 2"],
        ),
        ("model.moe_router_topk=17", ["moe_router_topk 17", "num_moe_experts 16"]),
        ("model.moe_router_topk=33", ["moe_router_topk", "32"]),
        ("model.moe_router_topk=3", ["moe_router_group_topk 2", "moe_router_topk 3"]),
        ("model.moe_router_topk=10", ["moe_router_topk 10", "2 x 4 experts"]),
        ("model.moe_router_num_groups=5", ["moe_router_num_groups 5", "num_moe_experts 16"]),
        ("model.moe_router_num_groups=null", ["moe_router_num_groups (None)", "moe_router_group_topk (2)"]),
        ("model.moe_router_score_function=softmax", ["expert_bias", "sigmoid", "softmax"]),
        ("model.moe_layer_freq=[0, 1]", ["moe_layer_freq", "2 entries", "num_layers is 3"]),
        ("model.moe_layer_freq=[0, 0, 0]", ["moe_layer_freq", "no MoE layer"]),
        ("model.num_attention_heads=3", ["num_attention_heads 3", "hidden_size 128"]),
        ("model.moe_pad_expert_input_to_capacity=true", ["moe_expert_capacity_factor"]),
        ("model.recompute_granularity=full", ["recompute_method", "full"]),
        ("model.recompute_num_layers=1", ["recompute_num_layers", "full"]),
        ("model.recompute_modules=[moe]", ["recompute_modules", "selective"]),
        ("model.add_bias_linear=true", ["add_bias_linear", "shared experts"]),
        ("model.moe_aux_loss_coeff=0.0", ["moe_router_load_balancing_type seq_aux_loss", "coeff 0.0"]),
        ("model.moe_router_load_balancing_type=none", ["moe_router_load_balancing_type none", "coeff 0.0001"]),
        ("model.moe_router_enable_expert_bias=false", ["moe_router_bias_update_rate needs"]),
        ("model.moe_router_pre_softmax=true", ["moe_router_pre_softmax needs", "softmax"]),
        ("model.recompute_modules=[foo]", ["recompute_modules.0", "'core_attn'", "'foo'"]),
        ("ddp.bucket_size=1000", ["ddp: bucket_size needs overlap_grad_reduce"]),
        ("dispatcher.num_sms=100000", ["dispatcher: Config.num_sms is 100000, must be"]),
        ("dispatcher.timeout=.inf", ["dispatcher.timeout", "finite"]),
        ("train.distributed_timeout=1e9", ["train.distributed_timeout", "1000000"]),
        ("train.seed=99999999999", ["train.seed", "99999999999"]),
        ("optimizer.lr=.inf", ["optimizer.lr", "finite"]),
        ("optimizer.min_lr=1", ["min_lr 1", "lr 0.002"]),
        ("scheduler.lr_warmup_iters=240", ["lr_warmup_iters 240", "lr_decay_iters 240"]),
    ],
)
def test_wrong_values_are_explained(override, words):
    message = fault(TINY, override)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            "model.moe_shared_expert_overlap=true dispatcher.type=allgather",
            "must be false with dispatcher.type allgather",
        ),
        (
            "model.moe_shared_expert_overlap=true model.moe_shared_expert_intermediate_size=null",
            "needs moe_shared_expert",
        ),
        (
            "model.moe_router_topk=1 model.moe_router_group_topk=null model.moe_router_num_groups=null "
            "model.moe_router_score_function=softmax model.moe_router_enable_expert_bias=false",
            "needs moe_router_pre_softmax",
        ),
        ("ddp.overlap_grad_reduce=true train.device=cuda", "ddp.overlap_grad_reduce is true, must be false"),
        ("dataset.packed=true train.micro_batch_size=2", "dataset.packed is true, train.micro_batch_size must be 1"),
        ("dispatcher.sequences=true", "dispatcher.sequences is true, dataset.packed must be, too"),
        (
            "dataset.packed=true train.micro_batch_size=1 dispatcher.sequences=true dispatcher.type=alltoall",
            "sequences is true, must be false with",
        ),
        ("dispatcher.trace=here dispatcher.type=alltoall", "trace is here, which needs type ep, got alltoall"),
    ],
)
def test_what_contradicts_is_explained(overrides, words):
    assert words in fault(TINY, *overrides.split())


def test_the_recipes_for_host_and_gpu_are_one_model():
    host, gpu = recipe.load(TINY), recipe.load(TINY.with_name("tiny_moe_gpu.yaml"))
    assert (host.train.device, gpu.train.device) == ("cpu", "cuda")
    assert gpu.train.model_copy(update={"device": "cpu"}) == host.train
    for section in ("model", "optimizer", "scheduler", "dataset"):
        assert getattr(host, section) == getattr(gpu, section)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "expected sections"),
        ("- 1", "expected sections"),
        ("a: [", "not YAML"),
        ("a: 1\na: 2", "a appears twice"),
        ("? [a]\n: 1", "is no name"),
    ],
)
def test_files_that_are_no_recipes(write, text, word):
    assert word in fault(write(text))


def test_a_file_that_is_not_there():
    assert "no/such.yaml: No such file" in fault("no/such.yaml")


def test_a_recipe_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert recipe.load("tiny_moe_cpu") == recipe.load(TINY)
    Path("tiny_moe_cpu").write_text("- a file of that name comes first")
    assert "recipe tiny_moe_cpu: expected sections" in fault("tiny_moe_cpu")

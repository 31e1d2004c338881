"""Recipes of real models: their keys, their flags in the eyes of Megatron-LM's own parser, and how they are started."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import megatron_trees
import pytest
from nightly import at_night

pytest.importorskip("pydantic")

from packaging.version import Version
from public_flags import PUBLIC
from training_runs import LAUNCHERS

from megatron_ep import pretrain
from megatron_ep.cli import main as cli
from megatron_ep.megatron import flags
from megatron_ep.training import script_flags, script_recipe

ROOT = Path(__file__).parents[2]
RECIPES = [path for path in sorted(ROOT.glob("recipes/*.yaml")) if script_recipe.is_script_recipe(path)]
SLICE = ROOT / "recipes" / "deepseek_v3_slice_4gpu.yaml"
DEEPSEEK = ROOT / "recipes" / "deepseek_v3.yaml"


def test_the_models_that_are_promised():
    names = {path.stem for path in RECIPES}
    assert names == {
        *("deepseek_v3", "deepseek_v3_slice_4gpu", "qwen3_30b_a3b", "qwen3_235b_a22b", "mixtral_8x7b", "mixtral_8x22b"),
        *("small_moe_fp8", "small_moe_routing"),
    }


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_what_is_verified_can_be_looked_up(path):
    verified = script_recipe.load(path).verified
    assert verified.on == "not run" or (ROOT / verified.results).is_file()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.expert_parallel_size=4", "parallel.expert_parallel_size: unknown key; did you mean expert_"),
        ("model.num_expert=4", "model.num_expert: unknown key; did you mean num_moe_experts?"),
        ("parallel.expert_model_parallel_size=3", "ETP x EP x PP is 3, which does not divide the 4 ranks"),
        ("parallel.tensor_model_parallel_size=2", "sequence_parallel is false, must be true"),
        ("train.global_batch_size=6", "not a multiple of train.micro_batch_size 1 x 4 data-parallel ranks"),
        ("precision.fp8_format=e4m3", "fp8_format and fp8_recipe must be given together"),
        ("model.multi_latent_attention=false", "kv_lora_rank needs multi_latent_attention"),
        ('dataset.data_path=["a"]', "exactly one of mock_data and data_path"),
        ("verified.results=null", "results: a file if, and only if, it was run"),
    ],
)
def test_mistakes_are_named(override, words):
    with pytest.raises(ValueError) as error:
        script_recipe.load(SLICE, [override])
    assert words in str(error.value)


def test_flags_of_one_model():
    words = " ".join(script_flags.flags(script_recipe.load(SLICE))) + " "
    for flag in (
        "--num-experts 32 --moe-layer-freq [0,1,1,1] ",
        "--expert-model-parallel-size 4 ",
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 ",
        "--moe-router-enable-expert-bias ",
        "--bf16 ",
        "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights ",
        "--mock-data ",
    ):
        assert flag in words
    assert "False" not in words and "None" not in words and "--moe-token-dispatcher-type" not in words
    data = script_recipe.load(SLICE, ["dataset.mock_data=false", "dataset.data_path=[0.3, a, 0.7, b]"])
    assert "--data-path 0.3 a 0.7 b" in " ".join(script_flags.flags(data)) and "--mock-data" not in data


@pytest.mark.parametrize(("activation", "gated"), [("gelu", True), ("silu", False)])
def test_activations_without_a_flag_are_refused(activation, gated):
    changes = [f"model.activation_func={activation}", f"model.gated_linear_unit={str(gated).lower()}"]
    with pytest.raises(ValueError, match=f"activation_func is {activation} with model.gated_linear_unit {gated}, must"):
        script_flags.flags(script_recipe.load(SLICE, changes))
    plain = ["model.activation_func=gelu", "model.gated_linear_unit=false"]
    assert "--swiglu" not in script_flags.flags(script_recipe.load(SLICE, plain))


def test_show_refuses_a_small_recipe(capsys):
    assert cli.main(["recipe", "show", "tiny_moe_cpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "tiny_moe_cpu has no section parallel" in error and "megatron-ep train tiny_moe_cpu runs it" in error


def test_overlap_takes_more_than_one_hardware_queue():
    connections = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert script_flags.environment(script_recipe.load(SLICE))[connections] == "1"
    overlapped = script_recipe.load(SLICE, ["parallel.overlap_moe_expert_parallel_comm=true"])
    assert script_flags.environment(overlapped)[connections] == "32"
    own = script_recipe.load(SLICE, ["environment.CUDA_DEVICE_MAX_CONNECTIONS='8'"])
    assert script_flags.environment(own)[connections] == "8"


@pytest.mark.parametrize("form", ["flags", "env", "torchrun", "sbatch"])
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_show(path, form, capsys):
    assert cli.main(["recipe", "show", str(path), "--as", form]) == 0
    shown = capsys.readouterr().out
    checked = subprocess.run(["bash", "-n"], input=shown if form != "flags" else f"x {shown}", text=True, check=False)
    assert checked.returncode == 0
    if form == "sbatch":
        topology = script_recipe.load(path).topology
        for line in (
            f"#SBATCH --nodes={topology.nodes}\n",
            f"#SBATCH --ntasks-per-node={topology.ranks_per_node}\n",
            "#SBATCH --requeue\n",
            "export MASTER_ADDR=",
            "srun \\\n    --kill-on-bad-exit=1 python \\\n    -m megatron_ep.pretrain",
        ):
            assert line in shown


SCRIPT = """
import json, os, sys
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron_ep.megatron import plugin, shared_buffers
line = json.dumps([os.environ["RANK"], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"], plugin.is_enabled(),
                   shared_buffers._config | vars(shared_buffers._options), sys.argv[1:]])
os.write(1, line.encode() + b"\\n")  # at once: print's line and its end are two writes where output is not buffered
"""


PRETENDED_GPU = """
import torch
from megatron_ep.fabrics import gpu
torch.cuda.is_available = lambda: True
gpu.check_device = lambda device: None
"""


def test_the_options_of_pretrain():
    changes = ("moe_apply_probs_on_combine=true", "moe_expert_rank_capacity_factor=1.5", "router=fused")
    changes += ("moe_low_latency_max_tokens=64",)
    words = script_flags.ep_flags(script_recipe.load(SLICE, [f"dispatcher.{change}" for change in changes]))
    room = ["--ep-moe-expert-rank-capacity-factor", "1.5"]
    decoding = ["--ep-moe-low-latency-max-tokens", "64"]
    assert words == ["--ep-router", "fused", "--ep-num-sms", "24", *room, "--ep-moe-apply-probs-on-combine", *decoding]
    parsed = vars(pretrain._parser().parse_args([*words, "pretrain_gpt.py"]))
    assert (parsed["ep_moe_expert_rank_capacity_factor"], parsed["ep_moe_apply_probs_on_combine"]) == (1.5, True)
    assert parsed["ep_moe_low_latency_max_tokens"] == 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dispatcher.trace=runs/trace", ["--ep-trace", "runs/trace"]),
        ("dispatcher.sequences=true", ["--ep-sequences"]),
        ("model.transformer_impl=local", []),
    ],
)
def test_what_is_not_asked_for_is_not_told(change, words):
    real = ROOT / "recipes" / "qwen3_30b_a3b.yaml"
    plain = script_flags.ep_flags(script_recipe.load(real))
    told = script_flags.ep_flags(script_recipe.load(real, [change]))
    assert [word for word in told if word not in plain] == words and set(plain) <= set(told)


@pytest.mark.parametrize(("setting", "value"), [("row_bytes", 16384), ("timeout", 1.5)])
def test_the_settings_of_pretrain(setting, value):
    recipe = script_recipe.load(SLICE, [f"dispatcher.{setting}={str(value).lower()}"])
    parsed = pretrain._parser().parse_args([*script_flags.ep_flags(recipe), "--ep-host", "pretrain_gpt.py"])
    assert parsed.script == "pretrain_gpt.py"
    assert pretrain._checked(parsed)[1] == {"num_sms": 24, setting: value}


@pytest.mark.nightly
def test_train_runs_the_script_in_all_ranks(tmp_path):
    pytest.importorskip("megatron.core")
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    (tmp_path / "sitecustomize.py").write_text(PRETENDED_GPU)
    command = [sys.executable, "-m", "megatron_ep.cli.main", "train", SLICE, "--megatron-lm", tmp_path, "--steps", "3"]
    changes = ["topology.ranks_per_node=2", "parallel.expert_model_parallel_size=2", "dispatcher.num_sms=8"]
    changes += ["dispatcher.moe_apply_probs_on_combine=true", "dispatcher.moe_dispatch_fwd_dtype=fp8"]
    changes += ["dispatcher.moe_combine_bwd_dtype=fp8", "dispatcher.row_bytes=16384"]
    environment = {key: value for key, value in os.environ.items() if key not in (*LAUNCHERS, "MEGATRON_LM")}
    environment |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command += [word for change in changes for word in ("--set", change)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = [json.loads(line) for line in done.stdout.splitlines() if line[:2] == '["']
    options = {"moe_expert_rank_capacity_factor": None, "moe_apply_probs_on_combine": True}
    options |= {"moe_dispatch_fwd_dtype": "fp8", "moe_combine_bwd_dtype": "fp8"}
    options |= {"moe_low_latency_max_tokens": None, "moe_chunks": 1}
    assert sorted(rank for rank, *_ in seen) == ["0", "1"]
    for _, connections, enabled, settings, words in seen:
        assert connections == "1" and enabled is True and settings == {"num_sms": 8, "row_bytes": 16384} | options
        assert words[words.index("--train-iters") + 1] == "3"
        assert words[-2:] == ["--moe-token-dispatcher-type", "alltoall"]


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        ([], {}, "--megatron-lm: needed for this recipe"),
        (["--megatron-lm", "/nowhere"], {}, "has no pretrain_gpt.py"),
        (["--data", "x"], {}, "--data: of small recipes"),
        (["--megatron-lm", "."], {"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2"),
        (["--megatron-lm", ".", "--set", "topology.nodes=2"], {}, "megatron-ep recipe show --as sbatch"),
    ],
)
def test_train_refuses(tmp_path, monkeypatch, capsys, arguments, variables, words):
    (tmp_path / "pretrain_gpt.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in (*LAUNCHERS, "MEGATRON_LM", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(script_flags.os, "execve", lambda *_: pytest.fail("started"))
    assert cli.main(["train", str(SLICE), *arguments]) == 2
    assert words in capsys.readouterr().err


# ---- what parsers of Megatron-LM say

FLAGS = re.compile(r"moe|expert|dispatch|ep-overlap|delay-wgrad|op-fuser|megatron-fsdp$|torch-fsdp2$")


@functools.cache
def parsed(tree):
    """What a process says that takes all recipes to the tree's parser: kind, name and value of each line."""
    helper = ROOT / "tests" / "helpers" / "script_arguments.py"
    done = subprocess.run(
        [sys.executable, helper, tree, *map(str, RECIPES)],
        env=os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [
        line.split(" ", 2)
        for line in done.stdout.splitlines()
        if line.startswith(("FIGURES ", "PUBLIC ", "FLAGS ", "FSDP "))
    ]
    return [(kind, name, ast.literal_eval(value)) for kind, name, value in lines]


def said(tree, kind):
    return [(name, value) for of, name, value in parsed(tree) if of == kind]


every_tree = pytest.mark.parametrize(
    "tree", [*megatron_trees.ALL[:1], *map(at_night, megatron_trees.ALL[1:])], ids=lambda tree: tree.name
)


def flags_table():
    """Rows of docs/megatron.md: flags with a value, versions, verdict, reason."""
    text = (ROOT / "docs" / "megatron.md").read_text().split("## Megatron's flags")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(re.findall("`(.*?)`", words), versions.split(), verdict, why) for words, versions, verdict, why in rows]


def test_the_table_of_flags_says_what_happens():
    for words, _, verdict, _ in flags_table():
        for given in words:
            found = flags.translated(given.split())
            if verdict == "refused":
                assert [line.startswith(given.split()[0]) for line in found.refusals] == [True], given
            elif verdict == "taken":
                assert set(given.split()) <= set(found.arguments) and not found.notes + found.refusals, given
            else:
                assert verdict in ("translated", "no effect") and not found.refusals
                assert len(found.notes) == 1 and found.notes[0].startswith(given.split()[0])
                assert ("no effect here" in found.notes[0]) == (verdict == "no effect"), given


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("router", ["megatron", "fused"])
def test_public_scripts_are_taken(name, router):
    options, moved = pretrain._options(["--ep-host", "--ep-router", router, "pretrain_gpt.py", *PUBLIC[name].flags])
    arguments, settings, notes = pretrain._checked(options, moved)
    left = flags.translated(arguments, router == "fused")
    assert left.arguments == arguments and left.notes == [], "what is left needs no translation"
    sms = {"model_zoo/qwen3_235b": 20, "model_zoo/deepseek_v3_gb300": 32, "bridge/qwen3_30b_blackwell": 32}
    assert settings.get("num_sms") == sms.get(name)
    assert all(note.startswith("--moe-") for note in notes)


@pytest.mark.needs(megatron_trees.LACK_ALL)
@every_tree
def test_no_flag_is_unknown(tree):
    ((version, known),) = said(tree, "FLAGS")
    version = ".".join(version.split(".")[:2])
    expected = {word.split()[0] for words, versions, *_ in flags_table() for word in words if version in versions}
    found = {flag for flag in known if FLAGS.search(flag)}
    assert found - expected == set(), f"flags of Megatron-LM {version} that the table in docs/megatron.md lacks"
    assert expected - found == set(), f"flags that Megatron-LM {version} does not have"


@pytest.mark.needs(megatron_trees.LACK_ALL)
@every_tree
def test_megatron_accepts_the_flags_of_public_scripts(tree):
    version = said(tree, "FLAGS")[0][0]
    figures = dict(said(tree, "PUBLIC"))
    assert [*figures] == [
        name for name, public in PUBLIC.items() if Version(version).release >= Version(public.since).release
    ]
    for name, of in figures.items():
        asked = PUBLIC[name].flags
        is_flex = "flex" in asked or flags.OVERLAP in asked
        assert of["dispatcher"] == ("flex" if is_flex else "alltoall"), name
        assert of["backend"] == "hybridep" or not is_flex, name
        assert of["overlap"] == (flags.OVERLAP in asked)
        assert of["expert_parallel"] == PUBLIC[name].sizes[2]


@pytest.mark.needs(megatron_trees.LACK_ALL)
@every_tree
def test_megatron_accepts_the_corrected_flags_of_fsdp(tree):
    ((_, taken),) = said(tree, "FSDP")
    assert taken == ["torch_dist", False, False, False, False]


@pytest.mark.needs(megatron_trees.LACK_ALL)
@every_tree
def test_megatron_accepts_the_flags_of_every_recipe(tree):
    lines = said(tree, "FIGURES")
    assert [path for path, _ in lines] == [str(path) for path in RECIPES]
    for path, figures in lines:
        recipe = script_recipe.load(path)
        model, parallel = recipe.model, recipe.parallel
        assert figures == {
            "layers": model.num_layers,
            "experts": model.num_moe_experts,
            "hidden": model.hidden_size,
            "topk": model.moe_router_topk,
            "data_parallel": recipe.topology.world_size
            // parallel.tensor_model_parallel_size
            // parallel.pipeline_model_parallel_size,
            "expert_parallel": parallel.expert_model_parallel_size,
            "mtp": model.mtp_num_layers,
            "latent": model.multi_latent_attention,
            "head": model.kv_channels,
            "query_norm": model.qk_layernorm,
            "epsilon": model.layernorm_epsilon,
            "gated": model.gated_linear_unit,
            "bias": model.add_bias_linear,
            "kv": model.num_query_groups or model.num_attention_heads,
            "fp8": (recipe.precision.fp8_format, recipe.precision.fp8_recipe, 16 if recipe.precision.fp8_format else 1),
            "dispatcher": "flex" if parallel.overlap_moe_expert_parallel_comm else "alltoall",
        }

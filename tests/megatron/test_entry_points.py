"""The ways into a model that somebody else builds: flags, the plugin, specs by name."""

import atexit
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import rank_processes
import torch
from run_on import run_on
from shared_settings import configured

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

import megatron_ep as ep
from megatron_ep import pretrain
from megatron_ep.megatron import dispatcher, flags, plugin, shared_buffers
from megatron_ep.megatron.dispatcher import EPTokenDispatcher
from megatron_ep.megatron.equivalence import join_layout, make_config
from megatron_ep.megatron.layer import ep_layer_spec
from megatron_ep.megatron.router import EPTopKRouter, fused_router

HYBRIDEP = ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "hybridep"]


# ---- flags


ALLTOALL = ["--moe-token-dispatcher-type", "alltoall"]
RUNS = "this project's dispatcher runs"
GRAPH = "--recompute-modules core_attn layernorm --cuda-graph-impl transformer_engine --cuda-graph-modules"


@pytest.mark.parametrize(
    ("given", "left", "notes"),
    [
        ("--bf16", ["--bf16", *ALLTOALL], []),
        ("--moe-token-dispatcher-type=alltoall", ALLTOALL, []),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", HYBRIDEP, []),
        ("--overlap-moe-expert-parallel-comm", ["--overlap-moe-expert-parallel-comm", *HYBRIDEP], []),
        ("--moe-expert-rank-capacity-factor 1.5", ["--moe-expert-rank-capacity-factor", "1.5", *HYBRIDEP], []),
        (
            "--moe-token-dispatcher-type allgather",
            ALLTOALL,
            [f"--moe-token-dispatcher-type allgather: {RUNS}, and Megatron is told alltoall"],
        ),
        (
            "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
            ["--overlap-moe-expert-parallel-comm", *HYBRIDEP],
            [f"--moe-token-dispatcher-type alltoall: {RUNS}, and Megatron is told flex"],
        ),
        (
            "--moe-token-dispatcher-type flex --bf16 --moe-enable-deepep",
            ["--bf16", *HYBRIDEP],
            [f"--moe-enable-deepep: {RUNS}"],
        ),
        (
            "--moe-flex-dispatcher-backend ncclep --moe-expert-rank-capacity-factor 2",
            HYBRIDEP,
            [
                "--moe-expert-rank-capacity-factor 2: no effect here: it sets up buffers of NCCL EP, and here all rows "
                "have room",
                f"--moe-flex-dispatcher-backend ncclep: {RUNS}, and Megatron is told hybridep",
            ],
        ),
        (
            "--moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 2 --moe-use-grouped-tensor",
            ["--moe-expert-rank-capacity-factor", "2", "--moe-use-grouped-tensor", *HYBRIDEP],
            [],
        ),
        (f"{GRAPH} moe_router moe_preprocess", [*GRAPH.split(), "moe_router", "moe_preprocess", *HYBRIDEP], []),
        (f"{GRAPH} moe_router", [*GRAPH.split(), "moe_router", *ALLTOALL], []),
        ("--moe-deepep-num-sms 20", ALLTOALL, ["--moe-deepep-num-sms 20: taken as --ep-num-sms 20"]),
    ],
)
def test_what_megatron_is_told(given, left, notes):
    found = flags.translated(given.split())
    assert (found.arguments, found.notes, found.refusals) == (left, notes, [])


def test_one_number_of_sms_wins():
    given = ["--moe-hybridep-num-sms", "16", "--moe-flex-dispatcher-num-sms", "12"]
    assert flags.translated(given).num_sms == 12
    found = flags.translated(given, num_sms=8)
    assert found.num_sms is None and all("no effect here: --ep-num-sms is given" in note for note in found.notes)


def test_the_fused_router_takes_the_place_of_transformer_engines():
    assert flags.translated(["--moe-router-fusion"]).arguments == ["--moe-router-fusion", *ALLTOALL]
    found = flags.translated(["--moe-router-fusion"], fused_router=True)
    assert found.arguments == ALLTOALL and len(found.notes) == 1
    found = flags.translated(["--moe-router-load-balancing-type", "aux_loss", "sinkhorn", "--bf16"], fused_router=True)
    assert found.refusals == [
        "--moe-router-load-balancing-type is sinkhorn, which --ep-router fused does not have: leave that out"
    ]
    assert not found.fused_router and "sinkhorn" in found.arguments


@pytest.mark.parametrize(
    ("given", "timeout", "variable", "fitting"),
    [
        ("", None, None, None),
        ("", 600, None, 600),
        ("--inprocess-soft-timeout 20", None, None, None),  # without a restarter it is nobody's
        ("--inprocess-restart", None, None, 45),
        ("--inprocess-restart --inprocess-soft-timeout=20", None, None, 15),
        ("--inprocess-restart --inprocess-soft-timeout 120", None, None, 90),
        ("--inprocess-restart --inprocess-soft-timeout 600", None, None, 450),
        ("--inprocess-restart --inprocess-soft-timeout 1200 --distributed-timeout-minutes 2", None, None, 120),
        ("--inprocess-restart --inprocess-soft-timeout 600", 300, None, 300),
        ("--inprocess-restart --inprocess-soft-timeout 600", None, "300", 300),
        ("--inprocess-restart", 60, None, "--ep-timeout. is 60 s, must be below --inprocess-soft-timeout .60 s"),
        ("--inprocess-restart", None, "90", "MEGATRON_EP_TIMEOUT is 90 s, must be below --inprocess-soft-timeout"),
    ],
)
def test_waits_end_before_the_restarter_loses_patience(given, timeout, variable, fitting, monkeypatch):
    monkeypatch.delenv("MEGATRON_EP_TIMEOUT", raising=False)
    if variable:
        monkeypatch.setenv("MEGATRON_EP_TIMEOUT", variable)
    if isinstance(fitting, str):
        with pytest.raises(ValueError, match=fitting):
            flags.fitting_timeout(given.split(), timeout)
    else:
        assert flags.fitting_timeout(given.split(), timeout) == fitting


@pytest.mark.parametrize(
    ("options", "shown", "value"),
    [
        (["--inprocess-restart", "--inprocess-soft-timeout", "30"], "shared_buffers._config['timeout']", "22.5"),
        (["--ep-sequences"], "bool(attention._originals)", "True"),
        ([], "bool(attention._originals)", "False"),
    ],
)
def test_what_pretrain_has_set_when_the_script_runs(tmp_path, options, shown, value):
    script = tmp_path / "script.py"
    script.write_text(f"from megatron_ep.megatron import attention, shared_buffers\nprint({shown})")
    done = rank_processes.run_one(["-m", "megatron_ep.pretrain", "--ep-host", script, *options])
    assert done.stdout.splitlines()[-1:] == [value], done.stderr[-2000:]


@pytest.mark.parametrize("module", ["six", "regex", "nobodys"])
def test_packages_that_scripts_need_are_named(tmp_path, module):
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.modules['{module}'] = None; import {module}")
    done = rank_processes.run_one(["-m", "megatron_ep.pretrain", "--ep-host", script])
    told = f"megatron_ep.pretrain: {script} needs {module}: pip install 'megatron_ep[megatron,script]'"
    assert (done.returncode, told in done.stderr.splitlines()) == ((1, False) if module == "nobodys" else (2, True))


def test_flags_of_megatrons_that_begin_as_ours_are_taken():
    options, _ = pretrain._options(["script.py", "--ep-overlap-early-attn-memory-release"])
    assert options.arguments == ["--ep-overlap-early-attn-memory-release"]


def _timeout_in_force():
    sys.argv = ["a_service.py", "--inprocess-restart", "--inprocess-soft-timeout", "30"]
    buffer = shared_buffers.shared_buffer(torch.distributed.group.WORLD, 8, torch.device("cpu"))
    shared_buffers.close_buffers()
    return buffer.config.timeout_seconds


def test_the_library_reads_nobodys_command_line(four_ranks):
    (seconds,) = {*four_ranks.run(_timeout_in_force)}
    assert seconds == four_ranks.timeout, "that of the group"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], ["no script nowhere.py"]),
        (
            ["--ep-timeout", "80", __file__, "--inprocess-restart"],
            ["--ep-timeout) is 80 s, must be below --inprocess-"],
        ),
        (["--ep-num-sms", "0", __file__], ["Config.num_sms is 0"]),
        (["--ep-num-sm", "4", __file__], ["no option --ep-num-sm; did you mean --ep-num-sms?"]),
        ([__file__, "--ep-moe-chunk=2"], ["no option --ep-moe-chunk; did you mean --ep-moe-chunks?"]),
        (["--ep-num-sms", "x", __file__], ["argument --ep-num-sms: invalid int value: 'x'"]),
        ([__file__, "--ep-num-sms", "x"], ["argument --ep-num-sms: invalid int value: 'x'"]),
        ([__file__, "--moe-token-dispatcher-type"], ["--moe-token-dispatcher-type: expected one argument"]),
        ([__file__, "--moe-deepep-num-sms", "0"], ["--moe-deepep-num-sms is 0: Config.num_sms is 0"]),
        (
            ["--ep-moe-expert-rank-capacity-factor", "-1", __file__],
            ["moe_expert_rank_capacity_factor is -1.0, must be"],
        ),
        (
            f"--ep-host --ep-router fused --ep-row-bytes 9 {__file__} --moe-enable-deepep --use-megatron-fsdp "
            "--bf16 --moe-deepep-num-sms 20 --moe-megakernel-backend mok --moe-router-load-balancing-type sinkhorn "
            "--moe-dispatch-fwd-dtype mxfp8 --moe-combine-bwd-dtype bf16 --ckpt-format fsdp_dtensor "
            "--data-parallel-sharding-strategy optim --fsdp-double-buffer --megatron-fsdp-grad-comm-dtype=bf16 "
            "--init-model-with-meta-device --lr 1".split(),
            [
                "--use-megatron-fsdp has never run with this dispatcher",
                "--moe-megakernel-backend is mok: its kernels compute the whole MoE layer",
                "--moe-dispatch-fwd-dtype is mxfp8",
                "--moe-router-load-balancing-type is sinkhorn",
                f"corrected: python -m megatron_ep.pretrain --ep-host --ep-num-sms 20 --ep-row-bytes 9 {__file__} "
                "--bf16 --moe-router-load-balancing-type sinkhorn --moe-combine-bwd-dtype bf16 --lr 1 "
                "--use-distributed-optimizer "
                "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep\n",
            ],
        ),
        (
            f"--ep-host --ep-strict {__file__} --moe-permute-fusion --bf16 --ep-num-sms=16".split(),
            [
                "--ep-strict: --ep-num-sms: taken, though it stands behind the script",
                "--ep-strict: --moe-permute-fusion: no effect here: rows arrive grouped",
                f"corrected: python -m megatron_ep.pretrain --ep-host --ep-strict --ep-num-sms 16 {__file__} --bf16 "
                "--moe-token-dispatcher-type alltoall\n",
            ],
        ),
    ],
)
def test_pretrain_refuses_before_anything_starts(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(pretrain, "_enable", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as end:
        pretrain.main(arguments)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("megatron_ep.pretrain: ")
    assert [word for word in words if word not in said] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_sentence_says_so():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megatron_ep.pretrain", __file__], capture_output=True, text=True
    )
    imported, said = ([], [])
    for line in done.stderr.splitlines():
        (imported if line.startswith("import time:") else said).append(line)
    assert done.returncode == 2 and len(said) == 1
    assert said[0].endswith("finds no GPU on this machine; --ep-host runs without one")
    assert not any(" megatron.core" in line for line in imported)


@pytest.mark.nightly
def test_a_refusal_is_the_last_thing_that_torchrun_shows():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "megatron_ep.pretrain", "--ep-host", __file__, "--use-megatron-fsdp"]
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=120)
    *_, refusal, correction, end = done.stderr.rstrip().splitlines()
    assert done.returncode == 1 and set(end) == {"="}
    assert "--use-megatron-fsdp has never run with this dispatcher" in refusal
    assert correction.strip().startswith("corrected: python -m megatron_ep.pretrain --ep-host ")


# ---- the plugin


def _build(layer_number=1):
    return get_moe_module_spec(use_te=False, num_experts=8)(config=make_config(), layer_number=layer_number)


class OwnRouter(TopKRouter):
    pass


@run_on("four_ranks")
def test_the_plugin_takes_every_layer_and_gives_them_back():
    join_layout(1, 4)
    before = MoELayer.__init__
    plugin.enable(fused_router)
    try:
        with pytest.raises(RuntimeError, match="already enabled"):
            plugin.enable()
        layer = _build()
        assert type(layer) is MoELayer, "checkpoints and isinstance see Megatron's own class"
        assert isinstance(layer.token_dispatcher, EPTokenDispatcher) and isinstance(layer.router, EPTopKRouter)
        assert layer.config.moe_token_dispatcher_type == "alltoall"
        for router, kind in ((None, EPTopKRouter), (OwnRouter, OwnRouter)):
            own = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=8), router=router)(config=make_config())
            assert isinstance(own.token_dispatcher, EPTokenDispatcher) and type(own.router) is kind
    finally:
        plugin.disable()
    assert MoELayer.__init__ is before
    assert isinstance(_build().token_dispatcher, MoEAlltoAllTokenDispatcher)


OVERLAP = "overlap_moe_expert_parallel_comm"
ALL_TO_ALL, GROUPED = ("alltoall", "deepep"), ("flex", "hybridep")


@pytest.mark.parametrize("by_plugin", [True, False])
@run_on("four_ranks")
def test_what_pretrain_translates_plugin_and_spec_translate(by_plugin):
    join_layout(1, 4)
    spec = get_moe_module_spec(use_te=False, num_experts=8)
    if by_plugin:
        plugin.enable()
    try:
        for given, settings, told in (
            (ALL_TO_ALL, {}, ALL_TO_ALL),
            (ALL_TO_ALL, {OVERLAP: True}, GROUPED),
            (("flex", "deepep"), {OVERLAP: True}, GROUPED),
            (("allgather", "deepep"), {OVERLAP: True}, GROUPED),
            (("flex", "ncclep"), {OVERLAP: True}, ("flex", "ncclep")),
            (GROUPED, {OVERLAP: True}, GROUPED),
        ):
            config = make_config()
            for name, value in ((flags.field_of(flags.TYPE), given[0]), (flags.field_of(flags.BACKEND), given[1])):
                setattr(config, name, value)
            for name, value in settings.items():
                setattr(config, name, value)
            layer = (spec if by_plugin else ep_layer_spec(spec))(config=config)
            configs = {id(each.config): each.config for each in layer.modules() if hasattr(each, "config")}
            assert id(config) in configs
            for of in configs.values():
                assert (of.moe_token_dispatcher_type, of.moe_flex_dispatcher_backend) == told, (given, settings)
    finally:
        plugin.disable()


@run_on("four_ranks")
def test_a_configs_number_of_sms_is_taken():
    join_layout(1, 4)
    spec = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=8))
    for settings, ours, number in (
        ({}, {}, None),
        ({"moe_hybridep_num_sms": 12}, {}, 12),
        ({"moe_hybridep_num_sms": 12, "moe_deepep_num_sms": 10}, {"num_sms": 8}, 8),
    ):
        config = make_config()
        for name, value in settings.items():
            setattr(config, name, value)
        with configured(**ours):
            layer = spec(config=config)
            layer(torch.randn(3, 1, 32, dtype=torch.float64))
            (buffer,) = shared_buffers._buffers.values()
            assert buffer.config.num_sms == number
    config.moe_hybridep_num_sms = 0
    with pytest.raises(ValueError, match="moe_hybridep_num_sms is 0, must be"):
        spec(config=config)


def _announced(is_shown):
    """What each rank prints in two steps of two layers, in a program that shows the line or leaves it to logging."""
    import contextlib
    import io

    join_layout(1, 2)
    dispatcher.announce.__globals__["_layers"].clear()  # of earlier tests in this process
    spec = ep_layer_spec(get_moe_module_spec(use_te=False, num_experts=8))
    layers = [spec(config=make_config(), layer_number=number) for number in (1, 2)]
    from megatron_ep.megatron import announce

    with contextlib.redirect_stdout(io.StringIO()) as printed, mock.patch.object(announce.log, "handlers", []):
        if is_shown:
            announce.show()
        for _ in range(2):
            x = torch.randn(3, 1, 32, dtype=torch.float64)
            for layer in layers:
                x, _ = layer(x)
    shared_buffers.close_buffers()
    return printed.getvalue()


def test_one_line_says_what_is_used(four_ranks):
    line = "megatron_ep: 2 MoE layers dispatch over 2 groups of 2 ranks (1 x 2, shared memory)\n"
    assert four_ranks.run(_announced, True) == [line, "", "", ""]
    assert four_ranks.run(_announced, False) == [""] * 4


# ---- alignment


@pytest.mark.parametrize("size", [0, 16, 32, 128, 256])
@pytest.mark.parametrize("trusted", [False, True])
def test_the_installed_megatron_says_what_experts_are_padded_to(monkeypatch, size, trusted):
    config = SimpleNamespace(moe_router_padding_for_quantization=False, moe_token_dispatcher_type="flex")
    monkeypatch.setattr(dispatcher.moe_utils, "skip_routed_expert_padding", lambda _: trusted, raising=False)
    monkeypatch.setattr(dispatcher, "get_align_size_for_quantization", lambda _: size)
    assert dispatcher._expert_alignment(config) == (max(1, size) if trusted else 1)


# ---- the end of a process


def _forked(work, capfd):
    """The status and the error output of a process in which `work` runs while the end of the process would hang."""
    pid = os.fork()
    if pid == 0:
        atexit._clear()
        atexit.register(time.sleep, 60)
        try:
            work()
        finally:
            os._exit(77)
    began = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert time.monotonic() - began < 20
    return status, capfd.readouterr().err


@pytest.mark.parametrize("kind", [ep.EPTimeoutError, ep.EPStuckError])
def test_a_failed_call_ends_the_process_though_its_end_would_hang(capfd, kind):
    def work():
        try:
            raise kind("rank 0 timed out first")
        except kind as error:
            pretrain._end_process(error)

    with mock.patch.object(pretrain, "EXIT_S", 0.2 if kind is ep.EPTimeoutError else 60.0):
        status, text = _forked(work, capfd)
    assert status == 1 and f"{kind.__name__}: rank 0 timed out first" in text


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_failure_that_no_call_raises_ends_the_process(capfd, is_raised):
    def work():
        pretrain._end_unless_raised("rank 0 timed out first")
        time.sleep(1.0)

    with (
        mock.patch.object(pretrain, "RAISE_S", 0.1),
        mock.patch.object(pretrain.failures, "has_unseen", lambda: not is_raised),
    ):
        status, text = _forked(work, capfd)
    assert (status, "rank 0 timed out first" in text) == ((77, False) if is_raised else (1, True))

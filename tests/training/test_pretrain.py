"""`python -m megatron_ep.pretrain` around Megatron-LM's own pretrain_gpt.py: loss, norms and every parameter after two
steps against Megatron's dispatcher and against a run of one rank, in many layouts."""

import dataclasses

import megatron_trees
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from nightly import at_night
from pretrain_gpt_runs import PLUGIN, STALLED, Scripts
from pretrain_layouts import ADAM, ALL, MODEL, Layout
from public_flags import PUBLIC

from megatron_ep.megatron import flags
from megatron_ep.tools.balance import trace

pytestmark = [
    pytest.mark.needs(megatron_trees.LACK),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
AT_EACH_CHANGE = "TP 2, ETP 2, EP 2, sequence parallel"  # the others: nightly
SAVE = ("--no-save-optim", "--no-save-rng", "--save-interval", "1000")
CONTINUE = (*SAVE, "--finetune", "--no-load-optim", "--no-load-rng", "--train-iters", "2")


class Runs:
    """Runs of one rank, made when a layout asks for them; one for each model."""

    def __init__(self, scripts, out):
        self.scripts, self.out, self._single, self._start = scripts, out, {}, {}

    def start(self, model):
        """The checkpoint from which all runs of a model begin."""
        if model not in self._start:
            name = f"start {len(self._start)}"
            saved = self.out / f"{name} saved"
            saves = ("--train-iters", 1, "--save", saved, "--save-interval", 1)
            self.scripts.run(name, 1, *MODEL.split(), *model.split(), *saves, ep_flags=None)
            self._start[model] = saved
        return self._start[model]

    def single(self, model, optimizer):
        if (model, optimizer) not in self._single:
            name = f"single {len(self._single)}"
            records = self.train(name, Layout(1, optimizer, model), None)
            self._single[model, optimizer] = (records, weights(self.out / f"{name} saved"))
        return self._single[model, optimizer]

    def train(self, name, layout, ep_flags):
        load = ("--load", self.start(layout.model), "--save", self.out / f"{name} saved")
        return self.scripts.run(name, layout.world, *MODEL.split(), *layout.flags, *load, *CONTINUE, ep_flags=ep_flags)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    with Scripts(megatron_trees.INSTALLED, out) as scripts:
        yield Runs(scripts, out)


def weights(saved):
    """The parameters of the last checkpoint, whole, by their names in it."""
    last = sorted(saved.glob("iter_*"))[-1]
    reader = dcp.FileSystemReader(last)
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def check_records(ours, expected, tolerance):
    """Losses of the last pipeline stage, and the norms, which every rank has."""
    losses, wanted = (next(rank["losses"] for rank in ranks if rank["losses"][0]) for ranks in (ours, expected))
    for mine, theirs in zip(losses, wanted, strict=True):
        assert mine.keys() == theirs.keys() and "lm loss" in mine
        for key in mine:
            assert mine[key] == pytest.approx(theirs[key], rel=tolerance), key
    for rank in ours:
        assert rank["norms"] == pytest.approx(expected[0]["norms"], rel=tolerance)


def check_weights(ours, expected, start, tolerance):
    assert ours.keys() == expected.keys() == start.keys()
    for key in expected:
        change = (expected[key] - start[key]).abs().max().item()
        last_place = torch.finfo(expected[key].dtype).eps * expected[key].abs().max().item()
        assert (ours[key] - expected[key]).abs().max().item() <= max(tolerance * max(change, 1e-3), last_place), key


@pytest.mark.parametrize("name", [name if name == AT_EACH_CHANGE else at_night(name) for name in ALL])
def test_layouts(runs, name):
    layout = ALL[name]
    ours = runs.train(name, layout, layout.ep_flags)
    kinds = {kind for rank in ours for kind in rank["dispatchers"]}
    assert kinds == {"EPTokenDispatcher"}, "in every MoE layer, the multi-token-prediction block's included"
    if "padding" in layout.parallel:
        rows = [expert for rank in ours for layer in rank["rows"] for expert in layer]
        assert all(count % 16 == 0 for count in rows) and len(set(rows)) > 1
    if "packed" in layout.model:
        assert len({rank["tokens"] for rank in ours}) > 1
    assert any("megatron_ep: " in runs.scripts.text(name, rank) for rank in range(layout.world))
    saved = weights(runs.out / f"{name} saved")
    start = weights(runs.start(layout.model))
    if "single" in layout.equal_to:
        optimizer = ADAM if "adam" in layout.parallel else ""
        expected, expected_weights = runs.single(layout.model, optimizer)
        check_records(ours, expected, layout.tolerance)
        check_weights(saved, expected_weights, start, layout.tolerance)
    if "alltoall" in layout.equal_to:
        flags = f"{layout.parallel} --moe-token-dispatcher-type alltoall"
        theirs = runs.train(f"{name}, alltoall", Layout(layout.world, flags, layout.model), None)
        assert {kind for rank in theirs for kind in rank["dispatchers"]} == {"MoEAlltoAllTokenDispatcher"}
        check_records(ours, theirs, layout.tolerance)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["gradients"].keys() == other["gradients"].keys()
            for key, gradient in other["gradients"].items():
                scale = max(gradient.abs().max().item(), 1e-4)
                assert (mine["gradients"][key] - gradient).abs().max().item() <= layout.tolerance * scale, key


@pytest.mark.nightly
def test_overlap_by_the_plugin_with_the_type_of_all_to_all(runs):
    """As recipes of Megatron-Bridge declare it; `pretrain` translates the flags."""
    layout = ALL["bf16, PP 2, VPP 2, 1F1B overlap"]
    layout = dataclasses.replace(layout, parallel=f"{layout.parallel} --moe-token-dispatcher-type alltoall")
    ours, expected = (runs.train(f"overlap, {flags}", layout, flags) for flags in ((PLUGIN,), ()))
    assert {kind for rank in ours for kind in rank["dispatchers"]} == {"EPTokenDispatcher"}
    check_records(ours, expected, 1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in PUBLIC if PUBLIC[name].on_host])
def test_every_public_script(runs, name):
    words = PUBLIC[name].host_flags
    ours = runs.scripts.run(f"{name}/ours", 4, *ADAM.split(), *words, "--train-iters", "2")
    assert {kind for rank in ours for kind in rank["dispatchers"]} == {"EPTokenDispatcher"}
    found = flags.translated(words)
    for note in found.notes:
        assert f"megatron_ep: {note}" in runs.scripts.text(f"{name}/ours").splitlines()
    assert not any("megatron_ep: --moe" in runs.scripts.text(f"{name}/ours", rank) for rank in (1, 2, 3))
    own, kind = ("allgather", "MoEAllGather") if "allgather" in words else ("alltoall", "MoEAlltoAll")
    words = [*found.arguments, flags.TYPE, own]
    theirs = runs.scripts.run(f"{name}/theirs", 4, *ADAM.split(), *words, "--train-iters", "2", ep_flags=None)
    assert {kind for rank in theirs for kind in rank["dispatchers"]} == {f"{kind}TokenDispatcher"}
    check_records(ours, theirs, 2e-4 if own == "allgather" else 2e-5)  # which adds bf16 parts in another order


@pytest.mark.nightly
def test_routing_is_recorded(runs):
    """Layers of every stage by their number in the model, once with recompute, and the rows that experts got."""
    layout = ALL["PP 2, VPP 2, EP 2, full recompute"]
    directory = runs.out / "trace"
    ranks = runs.train("traced", layout, ("--ep-trace", str(directory)))
    found = trace.read(directory)
    assert (found.expert_ranks, found.recorded_steps) == (2, 2)
    assert [group.sources for group in found.groups] == [(0, 1), (2, 3)]
    micro_batches = 16 // 2 // 2
    layers = ([3], [2, 4, 5])  # the first is dense; 5 is that of multi-token prediction
    for group, own in zip(found.groups, layers, strict=True):
        keys = [(step, layer, part) for step in (1, 2) for layer in own for part in range(micro_batches)]
        assert list(zip(group.steps, group.layers, group.micro_batches, strict=True)) == keys
        assert (group.counts.sum(axis=2) == 2 * 16 * 2).all()
        last = [
            np.flatnonzero((group.steps == 2) & (group.layers == layer) & (group.micro_batches == micro_batches - 1))
            for layer in own
        ]
        for place, rank in enumerate(group.sources):
            of_rank = [group.counts[at[0]].sum(axis=0)[4 * place : 4 * place + 4].tolist() for at in last]
            assert sorted(of_rank) == sorted(ranks[rank]["rows"])


@pytest.mark.nightly
def test_a_checkpoint_goes_on_under_the_other_dispatcher(runs):
    """Bit for bit, in both directions, optimizer and random states included. (EP changes in every layout above.)"""
    flags = (*MODEL.split(), *ADAM.split(), "--save-interval", "1000", "--override-opt_param-scheduler")
    alltoall = ("--moe-token-dispatcher-type", "alltoall")

    def train(name, ranks, until, load, ep_flags):
        layout = ("--expert-model-parallel-size", ranks, "--train-iters", until, *(() if ep_flags == () else alltoall))
        saves = (
            "--save",
            runs.out / f"{name} saved",
            *(() if load is None else ("--load", runs.out / f"{load} saved")),
        )
        return runs.scripts.run(name, ranks, *flags, *layout, *saves, ep_flags=ep_flags)

    train("theirs to 1", 2, 1, None, None)
    for first, start, all_ep_flags in (("theirs to 1", 1, ((), None)), ("() to 2", 2, (None, ()))):
        results = [train(f"{ep_flags} to {start + 1}", 2, start + 1, first, ep_flags) for ep_flags in all_ep_flags]
        assert [rank["dispatchers"][0] for rank in (results[0][0], results[1][0])] == [
            "MoEAlltoAllTokenDispatcher" if ep_flags is None else "EPTokenDispatcher" for ep_flags in all_ep_flags
        ]
        ours, theirs = results
        assert len(ours[0]["losses"]) == 1, "it went on where the other had stopped"
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["losses"] == other["losses"] and mine["norms"] == other["norms"]
        saved = [weights(runs.out / f"{ep_flags} to {start + 1} saved") for ep_flags in all_ep_flags]
        assert saved[0].keys() == saved[1].keys() and any("exp_avg" in key for key in saved[0])
        for key, value in saved[0].items():
            assert torch.equal(value, saved[1][key]), key


@pytest.mark.nightly
def test_nothing_is_kept_of_a_backward_pass_that_failed(runs):
    """With Megatron's check for NaN off; the run goes on from what was saved before."""
    flags = (*MODEL.split(), *ADAM.split(), "--expert-model-parallel-size", "2", "--save-interval", "1")
    unchecked, saved = ("--no-check-for-nan-in-loss-and-grad",), ("--save", runs.out / "stalled saved")
    combines = 2 * 4 * 4  # two steps of four microbatches, of three layers and one of the multi-token prediction
    with pytest.raises(AssertionError, match="stalled: exit statuses of ranks"):
        stall = (STALLED, combines, "--train-iters", "3")
        runs.scripts.run("stalled", 2, *flags, *unchecked, *saved, *stall, ep_flags=("--ep-timeout", "2"))
    texts = [runs.scripts.text("stalled", rank) for rank in range(2)]
    assert any("rank 0 timed out first, after 2 s" in text for text in texts), texts
    assert not any("RuntimeError" in text for text in texts), texts
    assert [path.name for path in sorted((runs.out / "stalled saved").glob("iter_*"))] == ["iter_0000001"]
    assert (runs.out / "stalled saved" / "latest_checkpointed_iteration.txt").read_text() == "1"
    again = (*saved, "--load", runs.out / "stalled saved", "--train-iters", "3")
    records = runs.scripts.run("stalled, again", 2, *flags, *again)
    assert all(len(record["losses"]) == 2 for record in records), "it went on where the other had stopped"
    assert all(
        value.isfinite().all() for value in weights(runs.out / "stalled saved").values() if value.is_floating_point()
    )

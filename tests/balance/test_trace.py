"""Traces of routing: what is read is what was written, by any writer, also of a file that was cut off."""

import dataclasses
import json

import numpy as np
import pytest
import routing_traces
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ep.megatron import trace_file
from megatron_ep.tools.balance import megatron_trace, trace

RANDOM = np.random.default_rng(1)


def counts(steps=3, layers=2, micro_batches=2, ranks=4, experts=8):
    return RANDOM.integers(0, 100, (steps, layers, micro_batches, ranks, experts))


def read_back(found):
    """[steps, layers, micro-batches, W, E] of the only group."""
    [group] = found.groups
    steps, layers = len(np.unique(group.steps)), len(np.unique(group.layers))
    return group.counts.reshape(steps, layers, -1, *group.counts.shape[1:])


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.integers(1, 3)] * 4, st.integers(1, 3)))
def test_what_was_written_is_read(tmp_path_factory, shape):
    steps, layers, micro_batches, ranks, local = shape
    written = counts(steps, layers, micro_batches, ranks, ranks * local)
    directory = tmp_path_factory.mktemp("trace")
    found = trace.read(routing_traces.write(directory, written, layers=range(1, layers + 1)))
    assert np.array_equal(read_back(found), written)
    assert (found.num_experts, found.expert_ranks, found.recorded_steps) == (ranks * local, ranks, steps)


def test_a_record_is_about_a_kilobyte():
    assert trace_file.record_type(256).itemsize == 12 + 4 * 256


def test_the_last_pass_of_a_repeated_step_counts(tmp_path):
    first, again = counts(steps=3), counts(steps=2)
    for rank, file in enumerate(sorted(routing_traces.write(tmp_path / "a", first, layers=(1, 2)).iterdir())):
        more = trace_file.file_of(routing_traces.write(tmp_path / "b", again, layers=(1, 2), first_step=3), rank)
        file.write_bytes(file.read_bytes() + more.read_bytes().partition(b"\n")[2])
    found = read_back(trace.read(tmp_path / "a"))
    assert np.array_equal(found, np.concatenate([first[:2], again]))


@pytest.mark.parametrize(("records", "more", "steps"), [(12, 10, 3), (10, 10, 2), (11, 2, 2), (12, 0, 3), (3, 4, 0)])
def test_a_step_that_a_killed_rank_has_not_written_is_left_out(records, more, steps, tmp_path):
    """Of four steps of four records."""
    written = counts(steps=4)
    routing_traces.write(tmp_path, written, layers=(1, 2))
    cut = trace_file.file_of(tmp_path, 2)
    header, _, body = cut.read_bytes().partition(b"\n")
    cut.write_bytes(header + b"\n" + body[: records * trace_file.record_type(8).itemsize + more])
    if steps:
        assert np.array_equal(read_back(trace.read(tmp_path)), written[:steps])
    else:
        with pytest.raises(ValueError, match="has no step"):
            trace.read(tmp_path)


def test_of_a_long_trace_steps_at_even_distances_are_read(tmp_path):
    written = counts(steps=9)
    routing_traces.write(tmp_path, written, layers=(1, 2))
    found = trace.read(tmp_path, max_bytes=written.size * 4 // 3)
    assert np.array_equal(read_back(found), written[::3]) and found.recorded_steps == 9


def test_groups_are_told_apart(tmp_path):
    first, second = counts(ranks=2), counts(ranks=2)
    routing_traces.write(tmp_path, first, layers=(1, 2), group=(0, 2))
    routing_traces.write(tmp_path, second, layers=(3, 4), group=(1, 3))
    found = trace.read(tmp_path)
    assert [group.sources for group in found.groups] == [(0, 2), (1, 3)]
    assert [set(group.layers) for group in found.groups] == [{1, 2}, {3, 4}]


def test_experts_on_several_ranks(tmp_path):
    found = trace.read(routing_traces.write(tmp_path, counts(ranks=4), layers=(1, 2), expert_ranks=2))
    assert (found.expert_ranks, found.groups[0].counts.shape[1]) == (2, 4)


def of_another(**changes):
    """Replaces a file by that of a trace with these changes."""

    def spoil(file):
        other = routing_traces.write(file.parent.parent / "other", counts(), **{"layers": (1, 2)} | changes)
        file.write_bytes((other / file.name).read_bytes())

    return spoil


def header(change):
    """Changes the first line of a file."""

    def spoil(file):
        line, _, rest = file.read_bytes().partition(b"\n")
        file.write_bytes(change(line) + b"\n" + rest)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), "has no file of rank 1, which exchanges tokens with 0"),
        (
            lambda file: routing_traces.write(file.parent, counts(), layers=(1, 2), topk=2, group=(4, 5, 6, 7)),
            "rank_00004.routing: is of another run than rank_00000.routing",
        ),
        (of_another(layers=(1, 3)), "rank_00001.routing: has other layers or micro-batches than rank_00000.routing"),
        (of_another(first_step=10), "has no step that all 4 ranks have recorded"),
        (
            lambda file: file.write_bytes(file.read_bytes().partition(b"\n")[0] + b"\n"),
            "has no step that all 4 ranks have recorded",
        ),
        (lambda file: file.write_bytes(b""), "rank_00001.routing: is no trace"),
        (lambda file: file.write_bytes(file.read_bytes()[:50]), "rank_00001.routing: is no trace"),
        (header(lambda line: b"\0" * 100), "rank_00001.routing: is no trace"),
        (header(lambda line: b"[1, 2]"), "rank_00001.routing: is no trace"),
        (
            header(lambda line: json.dumps(json.loads(line) | {"expert_ranks": 3}).encode()),
            "rank_00001.routing: is no trace",
        ),
    ],
)
def test_bad_traces_are_refused(spoil, message, tmp_path):
    directory = routing_traces.write(tmp_path / "trace", counts(), layers=(1, 2))
    spoil(trace_file.file_of(directory, 1))
    with pytest.raises(ValueError, match=message):
        trace.read(directory)


PASSES = {
    0: [(0, 1, [[0, 1], [2, 3]]), (0, 1, [[0, 1], [0, 1]]), (1, 1, [[3, 2], [1, 0]])],
    1: [(0, 1, [[3, 1], [3, 2]]), (0, 1, [[0, 2], [0, 3]]), (1, 1, [[3, 2], [3, 0]])],
}


def test_megatrons_traces(tmp_path):
    found = megatron_trace.read(routing_traces.write_megatron(tmp_path, PASSES), 4, None)
    assert (found.expert_ranks, found.topk, found.recorded_steps) == (2, 2, 2)
    [group] = found.groups
    assert list(zip(group.steps, group.layers, group.micro_batches, strict=True)) == [(0, 1, 0), (0, 1, 1), (1, 1, 0)]
    for place, rank in enumerate(PASSES):
        expected = [np.bincount(np.ravel(chosen), minlength=4) for _, _, chosen in PASSES[rank]]
        assert np.array_equal(group.counts[:, place], expected)
    apart = megatron_trace.read(tmp_path, 4, 1)
    assert [group.sources for group in apart.groups] == [(0,), (1,)]


def test_megatrons_own_tracer(tmp_path, monkeypatch):
    router_trace = pytest.importorskip("megatron.core.transformer.moe.router_trace", reason="before megatron-core 0.19")
    import torch

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # without a GPU it cannot tell
    tracer = router_trace.RouterTracer(str(tmp_path), 10, rank=0, training_mode=True)
    chosen = torch.tensor([[0, 1], [2, 3], [3, 1]])
    for step in range(2):
        tracer.make_hook("decoder.layers.3.mlp.router")(torch.nn.Identity(), (), (torch.ones(3, 2), chosen))
        tracer.make_hook("mtp.layers.0.mtp_model_layer.mlp.router")(torch.nn.Identity(), (), (torch.ones(3, 2), chosen))
        tracer.advance_step(step)
    [group] = megatron_trace.read(tmp_path, 4, None).groups
    assert set(group.layers) == {3, megatron_trace.MTP} and np.array_equal(group.counts, [[[1, 2, 1, 2]]] * 4)


@pytest.mark.parametrize(
    ("change", "experts", "ep", "message"),
    [
        (lambda text: text, None, None, "does not say how many experts there are: --experts"),
        (lambda text: text, 3, 1, "router_trace_rank0.jsonl: line 1 has expert 3, must be in"),
        (lambda text: text, 4, 3, "--ep is 3, must divide the 2 ranks of the trace and the 4 experts"),
        (lambda text: text.replace("top_indices", "top"), 4, None, "line 1 is none of Megatron's routing traces"),
        (lambda text: text.replace("[0, 1]", '["a", 1]'), 4, None, "line 1 is none of Megatron's routing traces"),
        (lambda text: text.replace("[0, 1]", "[-1, 1]"), 4, None, "line 1 has expert -1"),
        (lambda text: "nonsense\n" + text, 4, None, "line 1 is none of Megatron's routing traces"),
        (lambda text: text.replace('"layer": 1', '"layer": 2'), 4, None, "has other layers .* pipeline stages"),
        (lambda text: "", 4, None, "has no step that all 2 ranks have recorded"),
    ],
)
def test_bad_traces_of_megatron(change, experts, ep, message, tmp_path):
    routing_traces.write_megatron(tmp_path, PASSES)
    file = tmp_path / "router_trace_rank0.jsonl"
    file.write_text(change(file.read_text()))
    with pytest.raises(ValueError, match=message):
        megatron_trace.read(tmp_path, experts, ep)


def test_megatrons_last_line_may_be_cut(tmp_path):
    routing_traces.write_megatron(tmp_path, PASSES)
    file = tmp_path / "router_trace_rank0.jsonl"
    file.write_text(file.read_text()[:-10])
    assert megatron_trace.read(tmp_path, 4, None).recorded_steps == 1


def test_headers_are_checked():
    for wrong in ({"rank": 3}, {"group": (0, 0)}, {"num_experts": 0}, {"expert_ranks": 0}, {"topk": "2"}):
        with pytest.raises(ValueError):
            trace_file._check(dataclasses.replace(routing_traces.HEADER, **wrong))


def test_passes_are_merged_by_layer(tmp_path):
    written = counts(steps=5, layers=2, micro_batches=1)
    found = trace.merged(trace.read(routing_traces.write(tmp_path, written, layers=(1, 2))), 2)
    [group] = found.groups
    assert list(zip(group.steps, group.layers, strict=True)) == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert np.array_equal(read_back(found)[:, :, 0], written[0:4:2, :, 0] + written[1:4:2, :, 0])


def test_fewer_ranks_and_more_share_the_experts(tmp_path):
    found = trace.read(routing_traces.write(tmp_path, counts()))
    assert trace.folded(found, 8).expert_ranks == 8
    with pytest.raises(ValueError, match="--fold is 3, must divide the 8 experts"):
        trace.folded(found, 3)

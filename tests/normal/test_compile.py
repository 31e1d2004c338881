"""torch.compile: dispatch and combine are operators in one graph, with the results and gradients of eager mode."""

import itertools
from unittest import mock

import pytest
import torch
from cases import drawn
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from nightly import at_night
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import megatron_ep as ep
from megatron_ep.normal import operators, plan

HIDDEN, EXPERTS, TOPK = 16, 8, 2


def inputs(tokens, dtype=torch.float32, device="cpu"):
    x, ids, weights = drawn(tokens, EXPERTS, TOPK, HIDDEN, seed=sum(tokens))
    leaves = [[part.to(device).requires_grad_() for part in parts] for parts in ([t.to(dtype) for t in x], weights)]
    return leaves[0], [part.to(device) for part in ids], leaves[1]


def outputs_and_gradients(function, x, ids, weights):
    outputs = function(x, ids, weights)
    loss = sum((out.float() * torch.arange(out.numel(), device=out.device).view(out.shape)).sum() for out in outputs)
    return [*outputs, *torch.autograd.grad(loss, [*x, *weights])]


def assert_all_equal(ours, expected):
    assert len(ours) == len(expected)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(
    ("nodes", "ranks", "options"),
    [(2, 1, {"max_recv_tokens": 40}), (1, 2, {"expert_capacity": 3}), at_night(2, 1, {})],
)
def test_one_graph(nodes, ranks, options, device):
    """There and back, once with the weights applied in combine, and a second dispatch with the same handle."""
    with ep.LocalCluster(nodes, ranks, ep.Config(num_experts=EXPERTS), device=device) as cluster:

        def layer(x, ids, weights):
            rows = ep.dispatch(x, ids, weights, buffer=cluster, **options)
            plain = ep.combine(
                [torch.relu(row) * p.unsqueeze(1) for row, p in zip(rows.x, rows.probs, strict=True)], rows.handle
            )
            weighted = ep.combine([row * 2 for row in rows.x], rows.handle, weights=rows.probs)
            again = ep.dispatch(plain, topk_weights=weights, handle=rows.handle)
            last = ep.combine(again.x, again.handle)
            return [*plain, *weighted, *last, *(count.float() for count in rows.tokens_per_expert)]

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for tokens in ((5, 7), (3, 9)):
            given = inputs(tokens, device=device)
            assert_all_equal(outputs_and_gradients(compiled, *given), outputs_and_gradients(layer, *given))


def test_experts_that_are_split_on_the_host():
    """In one graph, by counts that are known when it runs; x and weights of other dtypes and strides."""
    with ep.LocalCluster(1, 2, ep.Config(num_experts=EXPERTS)) as cluster:

        def layer(x, ids, weights):
            weights = [part.bfloat16() for part in weights]
            rows = ep.dispatch([part.t().contiguous().t() for part in x], ids, weights, buffer=cluster)
            out = []
            for part, counts in zip(rows.x, rows.tokens_per_expert, strict=True):
                sizes = counts.tolist()
                experts = [(i + 1) * one for i, one in enumerate(part[: sum(sizes)].split(sizes))]
                out.append(torch.cat([*experts, part[sum(sizes) :]]))
            return ep.combine(out, rows.handle, weights=rows.probs)

        given = inputs((5, 7))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            assert_all_equal(outputs_and_gradients(compiled, *given), outputs_and_gradients(layer, *given))


def test_no_call_is_left_out_moved_or_merged():
    """Of two that are independent, of one whose result nobody reads, and of one that is made twice."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    calls = []
    launch = plan.DispatchPlan.run

    def noted(of, handle, backend, x, *others):
        calls.append([len(rows) for rows in x])
        return launch(of, handle, backend, x, *others)

    with ep.LocalCluster(1, 2, ep.Config(num_experts=EXPERTS)) as cluster:

        def layer(few, many, weights):
            options = {"buffer": cluster, "max_recv_tokens": 400}
            parts = [
                ep.dispatch(x, ids, weights, **options) for (x, ids), weights in zip((few, many), weights, strict=True)
            ]
            ep.dispatch(*few, **options)
            parts += [ep.dispatch(*few, **options) for _ in range(2)]
            return [y for part in reversed(parts) for y in ep.combine(part.x, part.handle)]

        with mock.patch.object(plan.DispatchPlan, "run", noted):
            results = []
            for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
                x, ids, weights = zip(inputs((5, 7)), inputs((160, 20)), strict=True)
                y = function((x[0], ids[0]), (x[1], ids[1]), weights)
                calls.append("backward")
                grads = torch.autograd.grad(sum(part.square().sum() for part in y), [t for part in x for t in part])
                results.append([*y, *grads])
    assert_all_equal(*results)
    half = len(calls) // 2
    assert calls[:half] == calls[half:] and calls[:5] == [[5, 7], [160, 20], [5, 7], [5, 7], [5, 7]]
    for graph, count in zip(graphs, (9, 8), strict=True):
        chain = [node for node in graph.nodes if "megatron_ep" in str((*node.args[1:2], node.target))]
        assert len(chain) == count
        for before, after in itertools.pairwise(chain):  # each takes the token of the one before
            assert after.args[0].args[0] is before


@pytest.mark.parametrize("partitioned", ["default", at_night("with least memory")])
def test_a_compiled_checkpoint_sends_nothing_again(partitioned):
    """Neither a full one nor one whose policy would rather recompute; one that must is refused."""
    partition = default_partition if partitioned == "default" else min_cut_rematerialization_partition
    keep = lambda graph, _: make_boxed_func(graph.forward)  # noqa: E731
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    calls = []
    with ep.LocalCluster(1, 2, ep.Config(num_experts=EXPERTS)) as cluster:

        def layer(x, ids, weights):
            rows = ep.dispatch([torch.sin(part) for part in x], ids, weights, buffer=cluster, max_recv_tokens=40)
            y = ep.combine([torch.tanh(part) for part in rows.x], rows.handle, weights=rows.probs)
            again = ep.dispatch([torch.cos(part) for part in y], topk_weights=weights, handle=rows.handle)
            return ep.combine([torch.tanh(part) for part in again.x], again.handle)

        def twice(run):
            return lambda x, ids, weights: run(run(x, ids, weights), ids, weights)

        def checkpointed(policy=None):
            contexts = lambda: create_selective_checkpoint_contexts(lambda *_, **__: policy)  # noqa: E731
            options = {} if policy is None else {"context_fn": contexts}
            return lambda *given: checkpoint(layer, *given, use_reentrant=False, **options)

        def noted(of):
            launch = of.run
            return mock.patch.object(of, "run", lambda *given: (calls.append(of.__name__), launch(*given))[1])

        def compiled(policy):
            torch._dynamo.reset()  # it does not look at policies when it looks for a graph that it has
            return torch.compile(twice(checkpointed(policy)), fullgraph=True, backend=backend)

        policies = (None, CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE)
        with noted(plan.DispatchPlan), noted(plan.CombinePlan):
            expected = outputs_and_gradients(twice(layer), *inputs((5, 7)))
            made = calls[:]
            for policy in policies:
                calls.clear()
                assert_all_equal(outputs_and_gradients(compiled(policy), *inputs((5, 7))), expected)
                assert calls == made and len(made) == 16
        never = compiled(CheckpointPolicy.MUST_RECOMPUTE)
        says = r"returns MUST_RECOMPUTE for megatron_ep\.dispatch\.default, must return PREFER_RECOMPUTE or MUST_SAVE"
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=says):
            never(*inputs((5, 7)))


def test_a_checkpoint_of_a_compiled_call_sends_again():
    """The way to recompute with torch.compile."""
    with ep.LocalCluster(1, 2, ep.Config(num_experts=EXPERTS)) as cluster:

        def layer(x, ids, weights):
            rows = ep.dispatch(x, ids, weights, buffer=cluster, max_recv_tokens=40)
            return ep.combine([torch.tanh(part) for part in rows.x], rows.handle, weights=rows.probs)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        checkpointed = lambda *given: checkpoint(compiled, *given, use_reentrant=False)  # noqa: E731
        assert_all_equal(*(outputs_and_gradients(run, *inputs((5, 7))) for run in (layer, checkpointed)))


def test_a_handle_from_outside_and_one_that_leaves():
    x, ids, _ = inputs((5, 6))
    with torch.no_grad(), ep.LocalCluster(1, 2, ep.Config(num_experts=EXPERTS)) as cluster:
        rows = ep.dispatch(x, ids, buffer=cluster)
        expected = ep.combine(rows.x, rows.handle)
        bring = torch.compile(lambda x, handle: ep.combine(x, handle), fullgraph=True, backend="aot_eager")
        assert_all_equal(bring(rows.x, rows.handle), expected)
        send = torch.compile(lambda x, ids: ep.dispatch(x, ids, buffer=cluster), fullgraph=True, backend="aot_eager")
        sent = send(x, ids)
        assert_all_equal(sent.x, rows.x)
        assert_all_equal(sent.tokens_per_expert, rows.tokens_per_expert)
        assert_all_equal(ep.combine(sent.x, sent.handle), expected)


def test_handles_of_flat_rows_are_refused():
    x, ids, _ = inputs((5, 6))
    with torch.no_grad(), ep.LocalCluster(1, 2, ep.Config(num_experts=EXPERTS)) as cluster:
        rows = ep.dispatch(x, ids, buffer=cluster, layout="flat")
        calls = (
            (lambda x, handle: ep.combine(x, handle), rows.x),
            (lambda x, handle: ep.dispatch(x, handle=handle).x, x),
        )
        for call, tensors in calls:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="handle is of flat rows, must be of grouped ones"):
                torch.compile(call, fullgraph=True, backend="aot_eager")(tensors, rows.handle)
            in_parts = torch.compile(call, backend="aot_eager")(tensors, rows.handle)  # eagerly then
            assert_all_equal(in_parts, call(tensors, rows.handle))


def test_what_is_wrong_in_a_graph():
    x, ids, _ = inputs((5, 6))
    with ep.LocalCluster(1, 2, ep.Config(num_experts=EXPERTS)) as cluster:
        send = torch.compile(lambda x, ids: ep.dispatch(x, ids, buffer=cluster).x, fullgraph=True, backend="aot_eager")
        with pytest.raises(ValueError, match=r"topk_idx of rank 1 is .* must hold distinct ids"):
            send(x, [ids[0], ids[1] + EXPERTS])
        assert_all_equal(send(x, ids), ep.dispatch(x, ids, buffer=cluster).x)
    with pytest.raises(ValueError, match="buffer is closed"):
        send(x, ids)


def test_the_operators_are_what_they_say():
    """Schemas, fakes and gradients: see torch.library.opcheck."""
    x, ids, weights = inputs((5, 6))
    with ep.LocalCluster(2, 1, ep.Config(num_experts=EXPERTS)) as cluster:
        number = cluster._group.number
        # and not that two calls return the same: a layout tells which dispatch made it
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operators.dispatch_op, (x, ids, weights, [], number, 1, 0, 40, True), test_utils=utils)
        with torch.no_grad():
            out = operators.dispatch_op(x, ids, weights, [], number, 1, 0, 40, True)
        tables = out[6:12]
        rows = [row.requires_grad_() for row in out[:2]]
        probs = [prob.requires_grad_() for prob in out[2:4]]
        sizes = [len(row) for row in rows]
        tokens = [len(row) for row in x]
        torch.library.opcheck(
            operators.dispatch_again_op, (x, weights, [], tables, number, sizes, True, ""), test_utils=utils
        )
        torch.library.opcheck(operators.combine_op, (rows, probs, [], tables, number, tokens, ""), test_utils=utils)
        torch.library.opcheck(operators.combine_op, (rows, [], probs, tables, number, tokens, ""), test_utils=utils)

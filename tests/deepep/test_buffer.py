"""DeepEP's `Buffer` between processes: on the CPU and, where the two do not differ, on GPUs that processes share."""

import copy
import gc
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import deep_ep_checks as checks
import deep_ep_elastic_checks as elastic
import pytest
import rank_processes
import torch
import torch.distributed as dist
from forced_machines import machines_of
from run_on import run_on

import megatron_ep as ep
from megatron_ep.buffer.any_buffer import rank_group_of
from megatron_ep.deep_ep import (
    Buffer,
    Config,
    ElasticBuffer,
    EventHandle,
    EventOverlap,
    get_logical_domain_size,
    transfers,
)
from megatron_ep.deep_ep.buffer import layout_of
from megatron_ep.deep_ep.instances import BufferRanks, Instances
from megatron_ep.diagnosis import failures
from megatron_ep.meeting import nodes
from megatron_ep.tools.local_ranks import LocalRanks


def group_of(size):
    """This rank's of the groups of so many."""
    groups = [dist.new_group(list(range(r, r + size))) for r in range(0, dist.get_world_size(), size)]
    return groups[dist.get_rank() // size]


def in_groups(check, size, ranks_per_node=None, device="cpu", settings=None):
    """On all ranks of a job, in groups of so many."""
    if device == "cuda":
        device = f"cuda:{dist.get_rank() % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    variables = {} if ranks_per_node is None else {nodes.VARIABLE: str(ranks_per_node)}
    with mock.patch.dict(os.environ, variables):
        check(group_of(size), torch.device(device), **(settings or {}))


def on_nodes(check, size, ranks_per_node):
    """For a check that looks how many nodes there are."""
    in_groups(check, size, ranks_per_node, settings={"nodes": size // ranks_per_node})


def between_machines(check, size, ranks_per_machine):
    """The same over TCP."""
    with machines_of(ranks_per_machine):
        in_groups(check, size, settings={"nodes": size // ranks_per_machine})


GROUPS = [(1, None), (2, None), (4, None), (4, 2)]  # ranks of a group and of a node


@pytest.mark.parametrize(
    ("check", "size", "ranks_per_node", "settings"),
    [
        *((checks.check_normal, *ranks, {"hidden": hidden}) for ranks in GROUPS for hidden in (72, 2048)),
        *((checks.check_float8, size, None, {}) for size in (2, 4)),
        (checks.check_sms, 2, None, {}),
        *((checks.check_low_latency, size, None, {}) for size in (1, 2, 4)),
        (checks.check_masks, 4, None, {}),
        *((elastic.check_elastic, *ranks, {}) for ranks in GROUPS),
    ],
)
def test_on_any_device(four_ranks, check, size, ranks_per_node, settings, device):
    four_ranks.run(in_groups, check, size, ranks_per_node, device, settings)


@pytest.mark.parametrize(
    ("check", "ranks_per_node"),
    [
        (checks.check_normal, 1),
        (checks.check_sizes, None),
        (elastic.check_rounded_once, None),
        (elastic.check_rounded_once, 2),
    ],
)
def test_on_the_host(four_ranks, check, ranks_per_node):
    four_ranks.run(in_groups, check, 4, ranks_per_node)


@pytest.mark.parametrize("ranks", [on_nodes, between_machines])
@pytest.mark.parametrize(
    ("check", "size", "per_node"),
    [*((checks.check_low_latency, *ranks) for ranks in ((2, 1), (4, 2), (4, 1))), (checks.check_masks, 4, 2)],
)
def test_few_tokens_over_nodes(four_ranks, ranks, check, size, per_node):
    four_ranks.run(ranks, check, size, per_node)


@run_on("four_ranks")
def test_a_rank_that_stays_away_is_not_taken_back():
    """It is not taken back, and the others go on without it."""
    group = group_of(4)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    gone = world - 1
    buffer = Buffer(group, enable_shrink=True)
    ids = torch.arange(world).unsqueeze(1)
    x, weights = torch.ones(world, 128, dtype=torch.bfloat16), torch.ones(world, 1)

    def round_trip():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, world, world, use_fp8=False)
        return buffer.low_latency_combine(rows, ids, weights, handle)[0][:, 0].tolist()

    assert round_trip() == [1] * world
    [low_latency] = buffer.runtime.all_low_latency()
    rank_group_of(low_latency.buffer)._rendezvous.timeout = timedelta(seconds=3)  # for a rank that stays away
    dist.barrier(group)
    if rank != gone:
        buffer.low_latency_update_mask_buffer(gone, mask=True)
        for take_back in (
            lambda: buffer.low_latency_update_mask_buffer(gone, mask=False),
            buffer.low_latency_clean_mask_buffer,
        ):
            assert round_trip() == [1] * gone + [0]
            with pytest.raises(ep.EPError, match=f"rank {gone}"):
                take_back()
            status = torch.zeros(world, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0] * gone + [1]
        assert round_trip() == [1] * gone + [0]
    dist.barrier(group)
    buffer.destroy()


def test_eight_ranks():
    with LocalRanks(8, 120) as ranks:
        ranks.run(in_groups, checks.check_normal, 8, 4)
        ranks.run(between_machines, checks.check_low_latency, 8, 4)


class OneRank:
    """A process group as far as a constructor looks."""

    def rank(self):
        return 0

    def size(self):
        return 1


def test_construction():
    with pytest.raises(ValueError, match="group is None, must be a process group"):
        Buffer(None)
    with pytest.raises(ValueError, match="num_nvl_bytes is 100, must be a multiple of 128"):
        Buffer(OneRank(), 100)
    buffer = Buffer(OneRank(), 1024, 256, enable_shrink=True)
    assert (buffer.rank, buffer.group_size, buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (0, 1, 1024, 256)
    assert buffer.get_local_buffer_tensor(torch.int32, offset=64).shape == (240,)
    view = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([4, 8]), use_rdma_buffer=True)
    view.fill_(3)
    assert copy.deepcopy(buffer) is buffer
    with pytest.raises(TypeError, match="Buffer belongs to its process"):
        pickle.dumps(buffer)
    assert buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([32]), use_rdma_buffer=True).eq(3).all()
    with pytest.raises(ValueError, match=r"size is \(129,\), must be at most 128 elements of torch.bfloat16"):
        buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([129]), use_rdma_buffer=True)
    buffer.destroy()
    with pytest.raises(ValueError, match="buffer is destroyed"):
        buffer.reset()


def test_a_communicator_instead_of_a_group(tmp_path):
    """In processes that never initialise torch.distributed."""
    script = Path(__file__).parents[1] / "helpers" / "communicator_ranks.py"
    for status, text in rank_processes.run_ranks([str(script), str(tmp_path / "store")], 3):
        assert status == 0 and text.endswith("done\n"), text


def test_construction_of_elastic_buffers():
    for group in (None, -100):  # the number is what torch gives to ranks outside of a new group
        with pytest.raises(ValueError, match=f"^group is {group}, must be a process group"):
            ElasticBuffer(group, 1)
    with pytest.raises(ValueError, match="num_bytes is None, must be given without num_max_tokens_per_rank and hidden"):
        ElasticBuffer(OneRank())
    with pytest.raises(NotImplementedError, match="num_cpu_bytes is 8"):
        ElasticBuffer(OneRank(), 1, num_cpu_bytes=8)
    with pytest.raises(ValueError, match="num_gpu_timeout_secs is 0, must be a number of seconds in"):
        ElasticBuffer(OneRank(), 1, num_gpu_timeout_secs=0)
    buffer = ElasticBuffer(OneRank(), 3)
    assert (buffer.num_bytes, buffer.rank_idx, buffer.num_ranks, buffer.scaleup_rank_idx) == (2 << 20, 0, 1, 0)
    assert ElasticBuffer(OneRank(), num_max_tokens_per_rank=8, hidden=16).num_bytes % (2 << 20) == 0
    for call in (lambda: buffer.pp_send(None, 0), ElasticBuffer.get_engram_storage_size_hint):
        with pytest.raises(NotImplementedError, match=r"ElasticBuffer\.\w+ is not in megatron_ep.deep_ep"):
            call()
    x, ids = torch.ones(2, 8), torch.tensor([[0], [1]])
    with pytest.raises(ValueError, match="topk_idx and num_experts must be given without a handle"):
        buffer.dispatch(x, ids)
    with pytest.raises(ValueError, match="num_max_tokens_per_rank is 0"):
        buffer.dispatch(x, ids, num_experts=2, do_cpu_sync=False)
    with pytest.raises(ValueError, match="handle is a tuple, must be of a dispatch"):
        buffer.combine(x, (1, 2))


class FourRanks(OneRank):
    def size(self):
        return 4


def test_domains(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for ours, of_torchrun, domains in (
        (None, None, (1, 4)),
        (None, "2", (2, 2)),
        (None, "3", (1, 4)),
        ("2", "4", (2, 2)),
        ("", "2", (2, 2)),
    ):
        for name, value in ((nodes.VARIABLE, ours), ("LOCAL_WORLD_SIZE", of_torchrun)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert get_logical_domain_size(FourRanks()) == domains
    for wrong in ("0", "x", "-1", "3"):
        monkeypatch.setenv(nodes.VARIABLE, wrong)
        text = f"environment variable {nodes.VARIABLE} is '{wrong}', must be a divisor of the 4 ranks"
        with pytest.raises(ValueError, match=text):
            ElasticBuffer(FourRanks(), 1)


def test_layout_of_ids_that_are_none():
    """On the CPU they are refused; where nothing waits for them they do not count."""
    buffer = Buffer(OneRank())
    for ids, text in (
        (torch.tensor([[0], [2]]), r"topk_idx is \[2\] at token 1, must hold ids in \[0, 2\)"),
        (torch.tensor([[-2, 0]]), r"topk_idx is \[-2, 0\] at token 0, must hold ids in \[0, 2\)"),
        (torch.tensor([[0.5]]), "topk_idx is torch.float32, must be one of torch.int64, torch.int32"),
        (torch.tensor([0]), r"topk_idx has shape \(1,\), must be \[T, K\]"),
    ):
        with pytest.raises(ValueError, match=text):
            buffer.get_dispatch_layout(ids, 2)
    ranks, _, experts, goes = layout_of(torch.tensor([[4, 1], [99, -2], [3, 3]]), 4, 2)
    assert ranks.tolist() == [1, 1] and experts.tolist() == [0, 1, 0, 2]
    assert goes.tolist() == [[True, False], [False, False], [False, True]]


def test_sizes():
    for ranks in (1, 2, 3, 8, 16, 64):
        for preset in (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)):
            assert preset.num_sms == Buffer.num_sms
            nvl, rdma = (
                hint(14336, ranks) for hint in (preset.get_nvl_buffer_size_hint, preset.get_rdma_buffer_size_hint)
            )
            assert nvl > 0 and nvl % 128 == 0 and (rdma > 0) == (ranks > 8)
        assert Buffer.get_low_latency_rdma_size_hint(128, 7168, ranks, 64 * ranks) > 128 * 7168 * 2
    with pytest.raises(ValueError, match=r"Config\.num_max_nvl_chunked_send_tokens is 9, must be less than the 8"):
        Config(20, 9, 8)
    with pytest.raises(ValueError, match="new_num_sms is 7, must be even"):
        Buffer.set_num_sms(7)


@run_on("four_ranks")
def test_wrong_arguments():
    """Wrong arguments, in a group of one rank."""
    group = group_of(1)
    buffer = Buffer(group)
    x, ids, weights = torch.ones(2, 8), torch.tensor([[0], [1]]), torch.ones(2, 1)
    float8, counts = x.to(torch.float8_e4m3fn), torch.ones(2, dtype=torch.int32)
    given = {"num_tokens_per_expert": counts, "topk_idx": ids, "topk_weights": weights}
    for changes, text in (
        ({"num_tokens_per_expert": None}, "num_tokens_per_expert is None"),
        ({"num_tokens_per_expert": counts[:0]}, "^num_experts is 0"),
        ({"x": [1]}, "x is a list, must be a tensor"),
        ({"topk_weights": None}, "topk_idx and topk_weights must be given together"),
        ({"topk_idx": None, "topk_weights": None}, "topk_idx is None, must be given with num_worst_tokens and without"),
        ({"topk_idx": torch.tensor([[0], [2]])}, r"topk_idx is \[2\] at token 1, must hold ids in \[0, 2\)"),
        ({"topk_idx": ids[:1]}, r"x has shape \(2, 8\), must be \[1, H\]"),
        ({"topk_weights": weights.double()}, "topk_weights is torch.float64, must be one of torch.float32"),
        ({"expert_alignment": 0}, "expert_alignment is 0"),
        ({"x": x.T}, "x has strides"),
        ({"x": (x, x)}, "x is torch.float32, must be a tensor, or of float8_e4m3fn in a tuple with its scales"),
        ({"x": (float8, x.to("meta"))}, "scales of x are on meta, must be on cpu"),
        ({"x": (float8, x.int()[:1])}, r"scales of x have shape \(1, 8\), must be \[2, S\]"),
    ):
        with pytest.raises(ValueError, match=text):
            buffer.dispatch(**({"x": x} | given | changes))
        buffer.reset()
    *_, handle, _ = buffer.dispatch(x, **given)
    for arguments, text in (
        ((x[:1], handle), r"x has shape \(1, 8\), must be \[2, H\]"),
        ((x, handle, weights[:1]), r"topk_weights has shape \(1, 1\), must be \(2, 1\)"),
        ((x, handle, None, x[:1]), r"bias has shape \(1, 8\), must be \(2, 8\)"),
        ((x, (1, 2)), "handle is a tuple, must be of a dispatch"),
    ):
        with pytest.raises(ValueError, match=text):
            buffer.combine(*arguments)
    with pytest.raises(ValueError, match="topk_idx must not be given with a handle"):
        buffer.dispatch(x, handle, topk_idx=ids)
    bf16 = x.bfloat16()
    for arguments, text in (
        ((bf16, ids, 1, 2), "x has 2 tokens, must have at most num_max_dispatch_tokens_per_rank = 1"),
        ((bf16, ids, 0, 2), "^num_max_dispatch_tokens_per_rank is 0"),
        ((bf16, ids, 4, 0), "^num_experts is 0"),
        ((bf16, ids.expand(2, 33), 4, 2), "^K of topk_idx is 33"),
        ((x, ids, 4, 2), "x is torch.float32, must be torch.bfloat16 with use_fp8=True"),
    ):
        with pytest.raises(ValueError, match=text):
            buffer.low_latency_dispatch(*arguments)
        buffer.reset()
    for idx in (None, [0]):
        with pytest.raises(ValueError, match=r"topk_idx is a \w+, must be a tensor"):
            buffer.get_dispatch_layout(idx, 2)
    with pytest.raises(ValueError, match="use_ue8m0 is True, must be False without"):
        buffer.low_latency_dispatch(bf16, ids, 4, 2, use_ue8m0=True)
    with pytest.raises(ValueError, match="async_finish is True, must be False with return_recv_hook"):
        buffer.low_latency_dispatch(bf16, ids, 4, 2, async_finish=True, return_recv_hook=True)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(bf16, ids, 4, 2, use_fp8=False)
    with pytest.raises(NotImplementedError, match="use_logfmt is True"):
        buffer.low_latency_combine(rows, ids, weights, handle, use_logfmt=True)
    with pytest.raises(ValueError, match="enable_shrink is False, must be True for masks"):
        buffer.low_latency_query_mask_buffer(counts)
    again, *_, handle, _ = buffer.internode_dispatch(x, **given)
    assert torch.equal(buffer.internode_combine(again, handle)[0], x)
    buffer.destroy()


@run_on("four_ranks")
def test_arguments_are_checked_once():
    """Arguments that look like earlier ones are not checked again."""
    group = group_of(1)
    buffer, elastic_buffer = Buffer(group), ElasticBuffer(group, 1)
    x, ids, weights = torch.ones(2, 8), torch.tensor([[0], [1]]), torch.ones(2, 1)
    counts = torch.ones(2, dtype=torch.int32)
    with mock.patch.object(transfers.arguments, "check_payload", wraps=transfers.arguments.check_payload) as check:
        for bias, checked in ((None, 3), (None, 0), (x, 1)):
            check.reset_mock()
            *_, handle, _ = buffer.dispatch(x, num_tokens_per_expert=counts, topk_idx=ids, topk_weights=weights)
            rows, *_ = buffer.dispatch(x, handle)
            buffer.combine(rows, handle, bias=bias)
            assert check.call_count == checked
        for checked in (3, 0):
            check.reset_mock()
            rows, *_, handle, _ = elastic_buffer.dispatch(x, ids, weights, num_experts=2)
            elastic_buffer.dispatch(x, handle=handle)
            elastic_buffer.combine(rows, handle)
            assert check.call_count == checked
    buffer.destroy()
    elastic_buffer.destroy()


@run_on("four_ranks")
def test_one_rank_s_mistake_reaches_the_others():
    """The others hear of it, and all go on after a reset."""
    group = group_of(2)
    buffer, rank = Buffer(group), dist.get_rank(group)
    x, ids, weights = torch.ones(2, 8), torch.tensor([[0], [3]]), torch.ones(2, 1)
    given = {"num_tokens_per_expert": torch.ones(4, dtype=torch.int32), "topk_idx": ids, "topk_weights": weights}
    buffer.dispatch(x, **given)
    wrong = {"topk_weights": weights[:1]} if rank == 1 else {}
    with pytest.raises(ValueError if rank == 1 else ep.EPAbortError, match="topk_weights has shape"):
        buffer.dispatch(x, **(given | wrong))
    buffer.reset()
    assert len(buffer.dispatch(x, **given)[0]) == 2
    buffer.destroy()


@pytest.mark.parametrize(
    ("method", "changes", "text"),
    [
        ("dispatch", {"num_tokens_per_expert": None}, "num_tokens_per_expert is None"),
        ("dispatch", {"x": None}, "x is a NoneType, must be a tensor"),
        ("dispatch", {"handle": 3}, "topk_idx must not be given with a handle"),
        ("combine", {"handle": None}, "handle is a NoneType, must be of a dispatch"),
        ("low_latency_dispatch", {"num_max_dispatch_tokens_per_rank": 0}, "num_max_dispatch_tokens_per_rank is 0"),
        ("low_latency_combine", {"handle": None}, "handle is a NoneType, must be of low_latency_dispatch"),
        ("elastic dispatch", {"num_experts": 0}, "num_experts is 0"),
        ("elastic dispatch", {"x": None}, "x is a NoneType, must be a tensor"),
        ("elastic combine", {"handle": None}, "handle is a NoneType, must be of a dispatch"),
    ],
)
@run_on("four_ranks")
def test_a_mistake_that_is_found_before_a_buffer_is_known_reaches_the_others(method, changes, text):
    """Others wait in a call of the buffer that an earlier call has set up."""
    group = group_of(2)
    buffer, second, rank = Buffer(group), ElasticBuffer(group, 1), dist.get_rank(group)
    x, ids, weights = torch.ones(2, 8).bfloat16(), torch.tensor([[0], [3]]), torch.ones(2, 1)
    given = {"x": x, "topk_idx": ids, "topk_weights": weights}
    normal = given | {"num_tokens_per_expert": torch.ones(4, dtype=torch.int32)}
    sizes = {"num_max_dispatch_tokens_per_rank": 2, "num_experts": 4, "use_fp8": False}
    rows, *_, handle, _ = buffer.dispatch(**normal)
    spread, _, few, *_ = buffer.low_latency_dispatch(x, ids, **sizes)
    received, *_, known, _ = second.dispatch(**given, num_experts=4)
    calls = {
        "dispatch": (buffer.dispatch, normal),
        "combine": (buffer.combine, {"x": rows, "handle": handle}),
        "low_latency_dispatch": (buffer.low_latency_dispatch, {"x": x, "topk_idx": ids} | sizes),
        "low_latency_combine": (buffer.low_latency_combine, given | {"x": spread, "handle": few}),
        "elastic dispatch": (second.dispatch, given | {"num_experts": 4}),
        "elastic combine": (second.combine, {"x": received, "handle": known}),
    }
    call, arguments = calls[method]
    dist.barrier(group)  # or the failure finds a slow rank in an earlier call
    started = time.monotonic()
    with pytest.raises(ValueError if rank == 1 else ep.EPAbortError, match=text):
        call(**(arguments | changes if rank == 1 else arguments))
    assert time.monotonic() - started < 30, "the other rank waited for its timeout"
    for made in (buffer, second):
        made.reset()
    assert torch.equal(buffer.dispatch(**normal)[0], rows)
    assert torch.equal(second.dispatch(**given, num_experts=4)[0], received)
    buffer.destroy()
    second.destroy()


@run_on("four_ranks")
def test_a_mistake_in_the_call_that_sets_a_buffer_up_reaches_the_others():
    group = group_of(2)
    buffer, rank = Buffer(group), dist.get_rank(group)
    tokens = 2 + rank
    x, ids = torch.ones(tokens, 8).bfloat16(), torch.arange(tokens).unsqueeze(1)
    started = time.monotonic()
    with pytest.raises(ValueError if rank == 1 else ep.EPAbortError, match="x has 3 tokens, must have at most"):
        buffer.low_latency_dispatch(x, ids, num_max_dispatch_tokens_per_rank=2, num_experts=4, use_fp8=False)
    assert time.monotonic() - started < 30, "the other rank waited for its timeout"
    buffer.destroy()


@run_on("four_ranks")
def test_too_many_tokens_of_a_rank():
    """Tokens for num_max_tokens_per_rank."""
    group = group_of(2)
    buffer, rank = ElasticBuffer(group, 1, num_max_tokens_per_rank=4), dist.get_rank(group)
    tokens = 4 + rank
    x, ids, weights = torch.ones(tokens, 8), torch.arange(tokens).unsqueeze(1) % 2, torch.ones(tokens, 1)
    for options, text in (
        ({"expert_alignment": 2**30 + 1}, "expert_alignment is 1073741825"),
        (
            {"expert_alignment": 2**20, "num_experts": 4096},
            r"expert_alignment is 1048576, must be an int in \[1, 524288\]",
        ),
        (
            {"num_max_tokens_per_rank": 2**30 - 1, "expert_alignment": 1024, "do_cpu_sync": False, "do_expand": True},
            "they may become .* rows of a rank",
        ),
    ):
        with pytest.raises((ValueError, ep.EPAbortError), match=text):
            buffer.dispatch(x[:4], ids[:4], weights[:4], **{"num_experts": 2} | options)
        buffer.reset()
    text = "num_max_tokens_per_rank is 4, must be at least the 5 tokens of topk_idx"
    for options in ({}, {"do_cpu_sync": False}, {"do_expand": True}):
        with pytest.raises(ValueError if rank == 1 else ep.EPAbortError, match=text):
            buffer.dispatch(x, ids, weights, num_experts=2, **options)
        buffer.reset()
        rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, num_experts=2, num_max_tokens_per_rank=5, **options)
        assert torch.equal(buffer.combine(rows, handle)[0], x)
    buffer.destroy()


@run_on("four_ranks")
def test_too_few_rows():
    """Where R is fixed: weights are NaN, and who asks is told, once."""
    group = group_of(2)
    gc.collect()  # all buffers are asked
    rank = dist.get_rank(group)
    buffer, elastic_buffer = Buffer(group), ElasticBuffer(group, 1)
    x, ids, weights = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)  # all to rank 0
    counts = torch.tensor([4, 0], dtype=torch.int32)

    def v1(size):
        return buffer, buffer.dispatch(
            x, num_tokens_per_expert=counts, topk_idx=ids, topk_weights=weights, num_worst_tokens=size
        )[2]

    def v2(do_expand):
        most = 3 + rank  # all that this rank has
        given = (x[:most], ids[:most], weights[:most])
        options = {"num_max_tokens_per_rank": most, "do_cpu_sync": False, "do_expand": do_expand}
        return elastic_buffer, elastic_buffer.dispatch(*given, num_experts=2, **options)[2]

    for call in (lambda: v1(7), lambda: v2(False), lambda: v2(True)):
        used, arrived = call()
        dist.barrier(group)
        if rank == 0:
            assert arrived.isnan().all()
            with pytest.raises(ep.EPOverflowError, match="more rows came than num_worst_tokens"):
                ep.raise_if_failed()
        dist.barrier(group)
        if rank == 1:
            with pytest.raises(ep.EPAbortError, match="more rows came than num_worst_tokens"):
                ep.raise_if_failed()
        used.reset()
        ep.raise_if_failed()
    arrived = v1(8)[1]
    assert rank == 1 or torch.equal(arrived, torch.ones(8, 1))  # behind the last row lies anything
    ep.raise_if_failed()
    v1(7)
    with mock.patch.object(failures.log, "error") as logged:
        buffer.destroy()
    assert logged.call_count == (rank == 0)
    elastic_buffer.destroy()


def test_events():
    event, calls = EventOverlap(EventHandle(), (torch.ones(1),)), []
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(ValueError, match="hook_after_wait is the second one"):
        event.register_hook_after_wait(lambda: None)
    with event:
        assert not calls
    event.current_stream_wait()
    assert calls == [1] and event.event is not None
    with event(release_handle=True):
        pass
    assert event.event is None
    with EventOverlap():
        pass
    with pytest.raises(ValueError, match="event is None"):
        EventOverlap().current_stream_wait()
    assert Buffer.capture().event is not None


def test_a_buffer_whose_set_up_failed_is_made_by_the_next_call():
    fails = []

    def made(config, device):
        if fails:
            raise ep.EPError("a rank did not come")
        return object()

    instances = Instances(BufferRanks(0, 1, made))
    first, _ = instances.normal(torch.device("cpu"), 4, None, 8)
    fails.append(True)
    with pytest.raises(ep.EPError):
        instances.normal(torch.device("cpu"), 4, None, 1 << 20)
    fails.clear()
    assert instances.normal(torch.device("cpu"), 4, None, 8)[0] is not first

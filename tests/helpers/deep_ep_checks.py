"""What a rank of a DeepEP buffer must get, on any device: each check runs on all ranks of the group at once.

What all ranks send follows from seeds, so every rank knows what it must receive.
"""

import torch
import torch.distributed as dist
from deep_ep_test_utils.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

from megatron_ep import reference
from megatron_ep.deep_ep import Buffer, Config, EventHandle, EventOverlap


class Inputs:
    """Of all ranks of a group."""

    def __init__(self, world, experts, topk, hidden, tokens, seed=0, holes=True):
        self.world, self.experts, self.topk = world, experts, topk
        generator = torch.Generator("cpu").manual_seed(seed)
        new = {"generator": generator, "device": "cpu"}
        self.tokens = [tokens[rank % len(tokens)] for rank in range(world)]
        self.ids = [torch.rand(t, experts, **new).topk(topk, dim=1).indices for t in self.tokens]
        if holes:
            for ids in self.ids:
                ids[torch.rand(ids.shape, **new) < 0.2] = -1
        self.x = [torch.randint(-8, 9, (t, hidden), **new).bfloat16() for t in self.tokens]
        self.weights = [torch.randint(1, 9, (t, topk), **new).float() / 8 for t in self.tokens]

    def ranks_per_token(self, rank):
        owners = self.ids[rank].div(self.experts // self.world, rounding_mode="floor")
        return sum((owners == other).any(dim=1).int() for other in range(self.world))


def same(ours, expected, what):
    assert ours.dtype == expected.dtype and torch.equal(ours.cpu(), expected.cpu()), what


def waited(event, is_async):
    assert (event.event is not None) == is_async
    if is_async:
        event.current_stream_wait()


def check_normal(group, device, hidden=72, tokens=(5, 0, 40, 17), **settings):
    """Layout, order, numbers, cached and shapeless dispatches, sums and weights."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    buffer = Buffer(group, 1 << 20, explicitly_destroy=True)
    for seed, (experts, topk) in enumerate([(2 * world, 2), (4 * world, min(4, 4 * world)), (world, 1)]):
        given = Inputs(world, experts, topk, hidden, tokens, seed)
        _check_one(buffer, given, rank, device, is_async=seed == 1, alignment=(1, 4, 1)[seed], **settings)
    buffer.destroy()
    buffer.destroy()


def _check_one(buffer, given, rank, device, is_async, alignment, config=None):
    world, local_experts = given.world, given.experts // given.world
    x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, given.experts)
    assert event.event is None and (per_node is None) == (world <= 8)
    owners = given.ids[rank].div(local_experts, rounding_mode="floor")
    wanted = torch.stack([(owners == other).any(dim=1) for other in range(world)], dim=1)
    same(in_rank, wanted, "is_token_in_rank")
    same(per_rank, wanted.sum(0).int(), "num_tokens_per_rank")
    same(per_expert, torch.stack([(given.ids[rank] == e).sum() for e in range(given.experts)]).int(), "per expert")

    places = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    options = {"async_finish": is_async, "config": config, "expert_alignment": alignment}
    expected = reference.flat_dispatch(given.x, given.ids, given.weights, given.experts, alignment)
    e_x, e_ids, e_weights, e_counts = (part[rank] for part in expected)
    source = torch.cat([torch.full((t,), r) for r, t in enumerate(given.tokens)])
    rows = reference.flat_rows(given.ids, rank, given.experts)
    token = rows - torch.tensor([0, *given.tokens]).cumsum(0)[source[rows]]

    got, got_ids, got_weights, numbers, handle, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, **places, **options
    )
    waited(event, is_async)
    same(got, e_x, "rows")
    same(got_ids, e_ids.long(), "ids")
    same(got_weights, e_weights, "weights")
    assert numbers == e_counts.tolist()
    prefix = torch.stack([(source[rows] <= r).sum() for r in range(world)]).int()
    same(handle[0][:, rank], prefix, "rank_prefix_matrix")
    same(handle[3], token.int(), "recv_src_idx")
    same(handle[4], wanted, "is_token_in_rank of the handle")
    assert len(handle) == 6 and len(list(handle)) == 6 and handle[5].shape == wanted.shape

    worst = world * max(given.tokens) + 3
    w_x, w_ids, w_weights, none, _, event = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, num_worst_tokens=worst, **places, **options
    )
    waited(event, is_async)
    assert none == [] and len(w_x) == len(w_ids) == len(w_weights) == worst
    same(w_x[: len(rows)], e_x, "rows of a fixed number")
    same(w_ids[: len(rows)], e_ids.long(), "their ids")
    assert (w_ids[len(rows) :] == -1).all(), "ids behind the last row"

    again, *nothing, event = buffer.dispatch(
        2 * x, handle=handle, previous_event=buffer.capture(), **_of_again(options)
    )
    waited(event, is_async)
    same(again, 2 * e_x, "rows of a cached dispatch")
    assert nothing == [None] * 4

    other, no_ids, no_weights, numbers, of_ranks, event = buffer.dispatch(x, **places, **options)
    waited(event, is_async)
    assert no_ids is None and no_weights is None and numbers == e_counts.tolist()
    same(other, e_x, "rows of a dispatch without ids")

    times = given.ranks_per_token(rank).unsqueeze(1)
    filled = e_weights.clone()
    filled[e_ids < 0] = 5
    sent_back = [part.clone() for part in expected[2]]
    for part, part_ids in zip(sent_back, expected[1], strict=True):
        part[part_ids < 0] = 5
    sums = torch.zeros(sum(given.tokens), given.topk)
    for other_rank in range(world):
        sums.index_add_(0, reference.flat_rows(given.ids, other_rank, given.experts), sent_back[other_rank])
    for of in (handle, of_ranks):
        with_weights = filled.to(device) if of is handle else None
        y, y_weights, event = buffer.combine(
            e_x.to(device), of, with_weights, previous_event=EventOverlap(EventHandle()), async_finish=is_async
        )
        waited(event, is_async)
        same(y, (given.x[rank] * times), "sums")
        if of is handle:
            same(y_weights, sums.split(given.tokens)[rank], "sums of weights")
    biases = tuple((given.x[rank] + i).to(device) for i in (1, 2))
    for bias in (biases[0], biases):
        y, none, _ = buffer.combine(e_x.to(device), handle, bias=bias)
        total = given.x[rank] * times + sum(b.cpu() for b in (bias if isinstance(bias, tuple) else (bias,)))
        assert none is None
        same(y, total, "sums with a bias")


def _of_again(options):
    return {name: value for name, value in options.items() if name != "expert_alignment"}


def check_float8(group, device):
    """With scales of any strides; and an expert that a token names twice."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    given = Inputs(world, 2 * world, 3 if world > 1 else 2, 256, (9, 4, 0, 6), holes=False)
    buffer = Buffer(group)
    for ids in given.ids:
        ids[:, -1] = ids[:, 0]
    values, scales = per_token_cast_to_fp8(given.x[rank].to(device))
    columns = scales.T.contiguous().T
    *_, per_expert, in_rank, _ = buffer.get_dispatch_layout(given.ids[rank].to(device), given.experts)
    got, ids, _, numbers, _, _ = buffer.dispatch(
        (values, columns),
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=given.ids[rank].to(device).int(),
        topk_weights=given.weights[rank].to(device),
    )
    e_x, e_ids, _, counts = reference.flat_dispatch(given.x, given.ids, given.weights, given.experts)
    exact = per_token_cast_back(*per_token_cast_to_fp8(e_x[rank]))
    same(per_token_cast_back(*got), exact, "rows of fp8")
    same(ids, e_ids[rank], "ids, int32")
    assert numbers == counts[rank].tolist() and len(got[1]) == len(e_x[rank])
    buffer.destroy()


def check_sms(group, device):
    """Of a class-wide number, and of a config."""
    Buffer.set_num_sms(4)
    try:
        check_normal(group, device, tokens=(3, 1), config=Config(2, 4, 8))
    finally:
        Buffer.set_num_sms(20)


def nodes_behind(buffer):
    """Of the memory that its low-latency calls go through."""
    [low_latency] = buffer.runtime.all_low_latency()
    return low_latency.buffer.topology.nodes


def check_low_latency(group, device, hidden=512, most=8, fp8=True, nodes=1):
    """Rows, numbers, where they come from, and sums, in all kinds of calls."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    experts = 3 * world
    given = Inputs(world, experts, 3, hidden, (most, 3, 0, 5), seed=9)
    x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
    buffer = Buffer(group, num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(most, hidden, world, experts))
    stats = torch.zeros(3, dtype=torch.int32, device=device)
    waits = torch.zeros(world, dtype=torch.int64, device=device)
    kinds = [{"use_fp8": False}]
    if fp8:
        kinds += [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}]
    calls = 0
    for kind in kinds:
        for has_hook in (False, True):
            for repeat in range(2):  # the first is never combined
                rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                    x, ids, most, experts, stats, waits, async_finish=not has_hook, return_recv_hook=has_hook, **kind
                )
                calls += 1
                hook() if has_hook else event.current_stream_wait()
                assert (hook is not None) == has_hook, repeat
            values = rows if kind.get("use_fp8") is False else cast_back(rows)
            _check_places(given, rank, values, counts, handle, most, tolerance=0 if values is rows else 0.07)
            same(stats, calls * counts, "cumulative stats")
            for zero_copy in (False, True):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:] = values
                out = torch.empty_like(x)
                y, event, hook = buffer.low_latency_combine(
                    values,
                    ids,
                    weights,
                    handle,
                    zero_copy=zero_copy,
                    out=out,
                    async_finish=not has_hook,
                    return_recv_hook=has_hook,
                )
                hook() if has_hook else event.current_stream_wait()
                assert y.data_ptr() == out.data_ptr()
                exact = given.x[rank].float() * given.weights[rank].masked_fill(given.ids[rank] < 0, 0).sum(1, True)
                torch.testing.assert_close(y.cpu().float(), exact, rtol=0.08, atol=0.02)
    assert nodes_behind(buffer) == nodes
    fewer = torch.where(ids % 3 == 0, -1, ids)
    y, *_ = buffer.low_latency_combine(values, fewer, weights, handle)
    exact = given.x[rank].float() * given.weights[rank].masked_fill(fewer.cpu() < 0, 0).sum(1, True)
    torch.testing.assert_close(y.cpu().float(), exact, rtol=0.08, atol=0.02)
    buffer.destroy()


def check_sizes(group, device):
    """One low-latency mode serves all sizes of calls, and a larger one takes its place."""
    world, hidden = dist.get_world_size(group), 128
    room = Buffer.get_low_latency_rdma_size_hint(40, hidden, world, world)
    buffer = Buffer(group, num_rdma_bytes=room)
    ids = torch.arange(world, device=device).unsqueeze(1)
    x, weights = torch.ones(world, hidden, dtype=torch.bfloat16, device=device), torch.ones(world, 1, device=device)
    for most, tokens in ((world, 40), (40, 40), (33, 40), (60, 60), (world, 60)):
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, most, world, use_fp8=False)
        assert rows.shape == (1, world * most, hidden) and counts.tolist() == [world]
        src_info, ranges, *sizes = handle
        assert src_info[0, :world].tolist() == [dist.get_rank(group)] * world and sizes == [most, hidden, world]
        assert [int(part) & 0xFFFFFFFF for part in ranges[0]] == [1] * world
        assert torch.equal(buffer.low_latency_combine(rows, ids, weights, handle)[0], x)
        assert [low_latency.max_tokens for low_latency in buffer.runtime.all_low_latency()] == [tokens]
    buffer.destroy()


def cast_back(rows):
    values, scales = rows
    local, most, hidden = values.shape
    flat = scales.contiguous().view(local * most, -1)
    return per_token_cast_back(values.view(-1, hidden), flat).view(values.shape)


def _check_places(given, rank, values, counts, handle, most, tolerance):
    src_info, ranges, *sizes = handle
    assert sizes == [most, values.shape[2], given.experts]
    for local in range(values.shape[0]):
        expert = rank * values.shape[0] + local
        expected = [(r, t) for r in range(given.world) for t in range(given.tokens[r]) if expert in given.ids[r][t]]
        assert int(counts[local]) == len(expected)
        assert src_info[local, : len(expected)].tolist() == [token for _, token in expected]
        for source in range(given.world):
            first, count = int(ranges[local, source]) >> 32, int(ranges[local, source]) & 0xFFFFFFFF
            of_source = [token for r, token in expected if r == source]
            assert count == len(of_source)
            if count:
                assert expected[first : first + count] == [(source, token) for token in of_source]
        if expected:
            exact = torch.stack([given.x[r][t] for r, t in expected])
            torch.testing.assert_close(values[local, : len(expected)].cpu(), exact, rtol=tolerance, atol=tolerance / 4)


def check_masks(group, device, nodes=1):
    """Ranks that the others leave out, by hand, and take back: one by one, or all."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    given = Inputs(world, 2 * world, 2, 128, (4,), seed=3)
    x, ids, weights = (part[rank].to(device) for part in (given.x, given.ids, given.weights))
    buffer = Buffer(group, enable_shrink=True, low_latency_mode=True)

    def status():
        shown = torch.full((world,), 7, dtype=torch.int32, device=device)
        buffer.low_latency_query_mask_buffer(shown)
        return shown.tolist()

    def round_trip(gone=()):
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 2 * world, use_fp8=False)
        y = buffer.low_latency_combine(rows, ids, weights, handle)[0]
        away = given.ids[rank] < 0
        for other in gone:
            away |= given.ids[rank] // 2 == other
        left = given.weights[rank].masked_fill(away, 0)
        same(y, (given.x[rank].float() * left.sum(1, True)).bfloat16(), f"sums without {gone}")

    def leave_out(*gone):
        dist.barrier(group)  # who is told of it in the last call goes without the other in that one
        if rank not in gone:
            for other in gone:
                buffer.low_latency_update_mask_buffer(other, mask=True)
            round_trip(gone)
            assert status() == [int(other in gone) for other in range(world)]
            round_trip(gone)
        dist.barrier(group)

    assert status() == [0] * world
    buffer.low_latency_update_mask_buffer(0, mask=True)  # nothing is set up yet: the one that asks is asked alone
    assert status() == [1] + [0] * (world - 1)
    buffer.low_latency_update_mask_buffer(0)
    round_trip()
    assert nodes_behind(buffer) == nodes
    leave_out(world - 1)
    buffer.reset()
    assert status() == [0] * world
    round_trip()

    one, other = world - 1, world - 2
    leave_out(one, other)
    buffer.low_latency_update_mask_buffer(one, mask=False)
    dist.barrier(group)
    if rank not in (one, other):
        assert status() == [int(away == other) for away in range(world)], "it stays away"
    if rank != other:
        buffer.low_latency_update_mask_buffer(other, mask=True)  # as the one that was away has to
        round_trip((other,))
    dist.barrier(group)
    buffer.low_latency_update_mask_buffer(other, mask=False)
    assert status() == [0] * world
    round_trip()
    leave_out(0)
    buffer.low_latency_clean_mask_buffer()
    assert status() == [0] * world
    round_trip()
    buffer.destroy()

"""What a rank of DeepEP's V2 buffer must get: see deep_ep_checks.py."""

import itertools

import torch
import torch.distributed as dist
from deep_ep_checks import Inputs, same, waited
from deep_ep_test_utils.deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

from megatron_ep import reference
from megatron_ep.deep_ep import ElasticBuffer


def check_elastic(group, device, hidden=256):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    max_tokens = 45
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=max_tokens, hidden=hidden, num_topk=3)
    assert (buffer.rank_idx, buffer.num_ranks) == (rank, world)
    assert buffer.num_scaleout_ranks * buffer.num_scaleup_ranks == world
    cases = [(1, True, False), (4, True, True), (4, False, False), (1, False, True)]
    for seed, (alignment, has_counts, is_float8) in enumerate(cases):
        given = Inputs(world, 2 * world, min(3, 2 * world), hidden, (5, 0, 44, 17), seed)
        _Case(buffer, given, rank, device, alignment, has_counts, is_float8, max_tokens).check(is_async=seed % 2 == 1)
    buffer.destroy()


def check_rounded_once(group, device, hidden=136):
    """Of 1, 2^-8 and -1, of three experts of two ranks: a sum of two that is rounded to bfloat16 loses the 2^-8."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    ids = torch.tensor([[2, 3, 0]], device=device).expand(rank + 1, 3).contiguous()
    x = torch.ones(rank + 1, hidden, dtype=torch.bfloat16, device=device)
    made = torch.tensor([-1.0, 0.0, 1.0, 2.0**-8], device=device)  # of each expert
    for several in (True, False):
        buffer = ElasticBuffer(
            group, num_max_tokens_per_rank=world, hidden=hidden, num_topk=3, allow_multiple_reduction=several
        )
        rows, _, _, handle, _ = buffer.dispatch(x, ids, num_experts=2 * world, do_expand=True)
        expert = 2 * rank + torch.arange(2, device=device).repeat_interleave(
            torch.tensor(handle.num_recv_tokens_per_expert_list, device=device)
        )
        bias = torch.full_like(x, 4)
        y, _, _ = buffer.combine(rows * made.to(rows)[expert % 4].unsqueeze(1), handle)
        with_bias, _, _ = buffer.combine(rows * made.to(rows)[expert % 4].unsqueeze(1), handle, bias=bias)
        expected = torch.full_like(x, 0.0 if several else 2.0**-8)
        same(y, expected, "sums")
        same(with_bias, bias, "sums with a bias")
        buffer.destroy()


class _Case:
    def __init__(self, buffer, given, rank, device, alignment, has_counts, is_float8, max_tokens):
        self.buffer, self.given, self.rank, self.device = buffer, given, rank, device
        self.alignment, self.has_counts, self.is_float8 = alignment, has_counts, is_float8
        self.max_tokens = max_tokens
        self.ids, self.weights = (part[rank].to(device) for part in (given.ids, given.weights))
        self.rows = reference.flat_rows(given.ids, rank, given.experts)
        source = torch.cat([torch.full((t,), r) for r, t in enumerate(given.tokens)])
        first = torch.tensor([0, *given.tokens]).cumsum(0)
        self.source, self.token = source[self.rows], self.rows - first[source[self.rows]]
        local = torch.cat(given.ids)[self.rows] - rank * (given.experts // given.world)
        self.local_ids = local.masked_fill((local < 0) | (local >= given.experts // given.world), -1)

    def sent(self, x):
        return per_token_cast_to_fp8(x.to(self.device)) if self.is_float8 else x.to(self.device)

    def values(self, rows):
        return per_token_cast_back(*rows) if isinstance(rows, tuple) else rows

    def exact(self, x):
        """As it arrives."""
        return per_token_cast_back(*per_token_cast_to_fp8(x)) if self.is_float8 else x

    def dispatch(self, is_async, **options):
        got = self.buffer.dispatch(async_with_compute_stream=is_async, **options)
        waited(got[-1], is_async)
        return got[:-1]

    def check(self, is_async):
        given, rank, came = self.given, self.rank, len(self.rows)
        local_experts = given.experts // given.world
        counts = torch.stack([(self.local_ids == e).sum() for e in range(local_experts)]).int()
        aligned = counts + -counts % self.alignment
        stats = torch.zeros(local_experts, dtype=torch.int32, device=self.device)
        options = {
            "topk_idx": self.ids,
            "topk_weights": self.weights,
            "num_experts": given.experts,
            "expert_alignment": self.alignment,
            "do_cpu_sync": self.has_counts,
            "cumulative_local_expert_recv_stats": stats,
        }
        x = self.sent(given.x[rank])
        flat, ids, weights, handle = self.dispatch(is_async, x=x, do_handle_copy=False, **options)
        grouped, none, row_weights, expanded = self.dispatch(
            is_async,
            x=x,
            do_expand=True,
            use_tma_aligned_col_major_sf=True,
            previous_event=self.buffer.capture(),
            **options,
        )
        assert none is None
        same(stats, 2 * counts, "cumulative stats")
        assert handle.topk_idx is self.ids is not expanded.topk_idx
        same(expanded.topk_idx, given.ids[rank], "the handle's ids")
        if self.is_float8:
            assert grouped[1].stride(0) == 1 and grouped[1].stride(1) % 4 == 0

        all_x, all_weights = torch.cat(given.x), torch.cat(given.weights)
        size = came if self.has_counts else given.world * self.max_tokens
        assert len(self.values(flat)) == len(ids) == len(weights) == handle.num_recv_tokens == size
        same(self.values(flat)[:came], self.exact(all_x[self.rows]), "flat rows")
        same(ids[:came], self.local_ids, "ids")
        assert (ids[came:] == -1).all(), "ids behind the last row"
        same(weights[:came], all_weights[self.rows], "weights, all of them")

        e_x, e_weights, e_counts = (
            part[rank] for part in reference.dispatch(given.x, given.ids, given.weights, given.experts, self.alignment)
        )
        end = len(e_x)
        is_row = e_weights > 0
        assert (len(self.values(grouped)) == end) == self.has_counts or len(self.values(grouped)) >= end
        same(self.values(grouped)[:end][is_row.to(self.device)], self.exact(e_x)[is_row], "grouped rows")
        same(row_weights[:end], e_weights, "their weights")

        for of, is_expanded in ((handle, False), (expanded, True)):
            assert of.num_recv_tokens_per_expert_list == (e_counts.tolist() if self.has_counts else [])
            assert of.num_expanded_tokens == len(self.values(grouped))
            same(of.num_unaligned_recv_tokens_per_expert, counts, "rows of experts")
            ends = aligned.cumsum(0).int()
            same(of.psum_num_recv_tokens_per_expert, ends - aligned + counts if is_expanded else ends, "their sums")
            assert int(of.psum_num_recv_tokens_per_scaleup_rank[-1]) == came
            metadata = of.recv_src_metadata[:came].cpu()
            same(metadata[:, 0], (self.source * self.max_tokens + self.token).int(), "tokens")
            last = torch.tensor([max(k for k, e in enumerate(row) if e >= 0) for row in self.local_ids.tolist()])
            topk, per_node = given.topk, self.buffer.num_scaleup_ranks
            same(metadata[:, 1], (self.source % per_node * topk + last).int(), "last k") if came else None
            rows = metadata[:, 2:]
            assert ((rows >= 0) == ((self.local_ids >= 0) & is_expanded)).all()
            if is_expanded:
                row, k = (rows >= 0).nonzero(as_tuple=True)
                found = self.values(grouped).cpu()[rows[row, k].long()]
                same(found, self.exact(all_x[self.rows[row]]), "where rows of tokens lie")
        of.num_sms = 7  # attributes may be set
        assert of.num_sms == 7

        # the same layouts again, each from either handle
        other = self.sent(2 * given.x[rank])
        for of, is_expanded in itertools.product((handle, expanded), (False, True)):
            if of is handle and is_expanded and not self.has_counts:
                continue  # nobody knows how many rows
            again, again_ids, again_weights, same_handle = self.dispatch(
                is_async, x=other, topk_weights=self.weights, handle=of, do_expand=is_expanded
            )
            assert same_handle is of
            if is_expanded:
                same(self.values(again)[:end][is_row.to(self.device)], self.exact(2 * e_x)[is_row], "grouped again")
                same(again_weights[:end][is_row.to(self.device)], e_weights[is_row], "their weights again")
            else:
                same(self.values(again)[:came], self.exact(2 * all_x[self.rows]), "flat again")
                same(again_ids[:came], self.local_ids, "ids again")
                same(again_weights[:came], all_weights[self.rows], "weights again")
        no_weights = self.dispatch(is_async, x=other, handle=handle)[2]
        assert no_weights is None

        # each row of a token goes back as it came
        times = given.ranks_per_token(rank).unsqueeze(1)
        chosen = (given.ids[rank] >= 0).sum(1, keepdim=True)
        sent = torch.zeros(len(ids), all_x.shape[1], dtype=all_x.dtype)
        sent[:came] = all_x[self.rows]
        groups = torch.full((len(self.values(grouped)), all_x.shape[1]), torch.nan, dtype=all_x.dtype)
        groups[:end][is_row] = e_x[is_row]
        own = given.weights[rank].masked_fill(given.ids[rank] < 0, 0)
        bias = tuple((given.x[rank] + i).to(self.device) for i in (1, 2))
        for of, rows, of_rows, number in ((handle, sent, weights, times), (expanded, groups, row_weights, chosen)):
            y, y_weights, event = self.buffer.combine(
                rows.to(self.device), of, of_rows, async_with_compute_stream=is_async
            )
            waited(event, is_async)
            same(y, (given.x[rank] * number), "sums")
            same(y_weights, own, "weights of the ranks that have the experts")
            y, none, _ = self.buffer.combine(rows.to(self.device), of, bias=bias)
            assert none is None
            same(y, given.x[rank] * number + bias[0].cpu() + bias[1].cpu(), "sums with biases")
        if self.buffer.num_scaleout_ranks == 1 and self.has_counts:
            self.check_bits(handle)

    def check_bits(self, handle):
        """Sums that are not exact: biases, and then the ranks' rows by the last k of each, in fp32, rounded once."""
        given, rank, hidden = self.given, self.rank, self.given.x[0].shape[1]
        generator = torch.Generator("cpu").manual_seed(7)
        new = {"generator": generator, "device": "cpu", "dtype": torch.float32}
        made = [torch.randn(sum(given.tokens), hidden, **new).bfloat16() for _ in range(given.world)]  # by each rank
        biases = [torch.randn(sum(given.tokens), hidden, **new).bfloat16().split(given.tokens)[rank] for _ in range(2)]
        owners = given.ids[rank].div(given.experts // given.world, rounding_mode="floor")
        for count in range(3):
            expected = torch.zeros(given.tokens[rank], hidden, dtype=torch.float32)
            for bias in biases[:count]:
                expected += bias
            for k, other in itertools.product(range(given.topk), range(given.world)):
                is_last = (owners[:, k] == other) & ~(owners[:, k + 1 :] == other).any(dim=1)
                rows = made[other].split(given.tokens)[rank]
                expected = torch.where(is_last.unsqueeze(1), expected + rows, expected)
            bias = tuple(b.to(self.device) for b in biases[:count])
            y = self.buffer.combine(made[rank][self.rows].to(self.device), handle, bias=bias or None)[0]
            same(y, expected.bfloat16(), f"bits of sums with {count} biases")

"""The specification of dispatch and combine, for all ranks at once, in plain torch.

Lists have one entry per rank.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0  # the largest float8_e4m3fn (OCP 8-bit Floating Point Specification 1.0, table 1)
SCALE_BLOCK = 128  # elements of a row that share a scale
SCALE_FORMATS = ("fp32", "pow2", "ue8m0")


def quantize(
    x: torch.Tensor, scale_format: str = "fp32", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts x [T, H], bfloat16, float16 or float32, to values [T, H] of dtype, float8_e4m3fn or float8_e5m2, and
    scales [T, ceil(H / 128)], so that x is about values * scale.

    A scale is the largest |x| of its block of 128 elements (fewer at a row's end) divided by the largest value of dtype
    (448, or 57344), or 1 if that is 0: the blocks of DeepSeek-V3 (its technical report, section 3.3.2). It is kept as
    "fp32", as the next power of two that is not smaller, at least 2^-126 ("pow2"), or that as float8_e8m0fnu ("ue8m0":
    OCP Microscaling Formats 1.0, section 5.4.1). A value is x / scale, at most the largest in magnitude. In a block
    with an infinity or NaN, values and scale become NaN. Computed in float32, rounded to nearest even.
    """
    largest = torch.finfo(dtype).max
    tokens, hidden = x.shape
    blocks = -(-hidden // SCALE_BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * SCALE_BLOCK - hidden)).view(tokens, blocks, SCALE_BLOCK)
    quotients = padded.abs().amax(dim=2) / largest
    scales = torch.where(quotients == 0, 1.0, quotients)
    if scale_format != "fp32":
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = torch.where(quotients.isfinite(), scales, torch.nan)
    values = (padded / scales.unsqueeze(2)).view(tokens, blocks * SCALE_BLOCK)[:, :hidden]
    values = values.clamp(-largest, largest).to(dtype).contiguous()
    return values, scales.to(torch.float8_e8m0fnu) if scale_format == "ue8m0" else scales


def expert_rows(
    topk_idx: list[torch.Tensor], expert: int, expert_alignment: int = 1, expert_capacity: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the rows of an expert in order, as (token, k), and the number of padding rows after them.

    Tokens are counted over all ranks, so the order is (source rank, token).
    """
    token, k = (torch.cat(topk_idx) == expert).nonzero(as_tuple=True)
    if expert_capacity is None:
        return token, k, -len(token) % expert_alignment
    return token[:expert_capacity], k[:expert_capacity], max(0, expert_capacity - len(token))


def left_out(
    topk_idx: list[torch.Tensor], rank: int, num_experts: int, max_recv_tokens: int, expert_capacity: int | None
) -> torch.Tensor:
    """Returns the tokens that do not fit on a rank: those that arrive after max_recv_tokens others, in the order of
    (source rank, token). With expert_capacity there is room for at least this rank's own number of tokens from each
    rank."""
    most = max_recv_tokens
    if expert_capacity is not None:
        most = max(most, len(topk_idx) * len(topk_idx[rank]))
    expert_rank = torch.cat(topk_idx).div(num_experts // len(topk_idx), rounding_mode="floor")
    return (expert_rank == rank).any(dim=1).nonzero()[most:, 0]


def dispatch(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
    expert_capacity: int | None = None,
    max_recv_tokens: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Takes x [T, H], topk_idx [T, K], topk_weights [T, K]; returns x [R, H], probs [R], tokens_per_expert int64 [L].

    Expert e lives on rank e // L. A rank's rows are grouped by expert, each padded with zeros to a multiple of
    expert_alignment, or cut or padded to expert_capacity. With max_recv_tokens all rows together are cut or padded to
    that number, and those of omitted tokens are zeros. Scales of float8 rows arrive as their rows do.
    """
    local_experts = num_experts // len(x)
    sent_x, sent_weights = torch.cat(x), torch.cat(topk_weights)
    out_x, out_probs, out_counts = [], [], []
    for rank in range(len(x)):
        all_x, all_weights = sent_x, sent_weights
        if max_recv_tokens is not None:
            all_x, all_weights = all_x.clone(), all_weights.clone()
            absent = left_out(topk_idx, rank, num_experts, max_recv_tokens, expert_capacity)
            all_x.view(torch.uint8)[absent], all_weights[absent] = 0, 0  # bytes: not every type of scales can be set
        xs, probs, counts = [], [], []
        for expert in range(rank * local_experts, (rank + 1) * local_experts):
            token, k, padding = expert_rows(topk_idx, expert, expert_alignment, expert_capacity)
            xs += [all_x[token], all_x.new_zeros(padding, all_x.shape[1])]
            probs += [all_weights[token, k], all_weights.new_zeros(padding)]
            counts.append(len(token) + padding)
        rest = 0 if max_recv_tokens is None else max(0, max_recv_tokens - sum(counts))
        xs.append(all_x.new_zeros(rest, all_x.shape[1]))
        probs.append(all_weights.new_zeros(rest))
        out_x.append(torch.cat(xs)[:max_recv_tokens])
        out_probs.append(torch.cat(probs)[:max_recv_tokens])
        out_counts.append(torch.tensor(counts, device="cpu"))
    return out_x, out_probs, out_counts


def combine(
    expert_out: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
    expert_capacity: int | None = None,
    max_recv_tokens: int | None = None,
    weights: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Takes expert_out [R, H], rows in the order of dispatch; returns the sum of each token's rows, [T, H].

    Rows that dispatch omitted count as zeros. weights: [R], float32 (float64 for float64): factor of each row,
    multiplied in their dtype.
    Sums in float64. The kernels sum in float32 and round to the dtype of x whenever a partial sum travels: per rank,
    then per node.
    """
    num_tokens = [idx.shape[0] for idx in topk_idx]
    sums = expert_out[0].new_zeros(sum(num_tokens), expert_out[0].shape[1], dtype=torch.float64)
    for rank, out in enumerate(expert_out):
        terms = (out if weights is None else out * weights[rank].unsqueeze(1)).to(torch.float64)
        absent = sums.new_zeros(len(sums), dtype=torch.bool)
        if max_recv_tokens is not None:
            absent[left_out(topk_idx, rank, num_experts, max_recv_tokens, expert_capacity)] = True
        for first, token, _ in places(topk_idx, rank, num_experts, expert_alignment, expert_capacity):
            row = first + torch.arange(len(token), device=token.device)
            arrived = (row < len(terms)) & ~absent[token]
            sums.index_add_(0, token[arrived], terms[row[arrived]])
    return list(sums.to(expert_out[0].dtype).split(num_tokens))


def flat_dispatch(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
    max_recv_tokens: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Dispatches one row for each token that chose an expert of a rank, in the order of (source rank, token).

    Returns x [R, H], ids int32 [R, K], probs [R, K], tokens_per_expert int64 [L]. ids are numbers of the rank's
    experts, from 0, and -1 for others, whose probs are 0. tokens_per_expert is rounded up to expert_alignment; rows are
    not padded. With max_recv_tokens they are cut or padded to that number, with zeros, and -1 for ids.
    """
    local_experts = num_experts // len(x)
    sent_x, sent_weights = torch.cat(x), torch.cat(topk_weights)
    out_x, out_ids, out_probs, out_counts = [], [], [], []
    for rank in range(len(x)):
        ids = torch.cat(topk_idx) - rank * local_experts
        ids = ids.masked_fill((ids < 0) | (ids >= local_experts), -1).int()
        counts = torch.stack([(ids == expert).sum() for expert in range(local_experts)])
        row = flat_rows(topk_idx, rank, num_experts)[:max_recv_tokens]
        rest = 0 if max_recv_tokens is None else max_recv_tokens - len(row)
        out_x.append(torch.cat([sent_x[row], sent_x.new_zeros(rest, sent_x.shape[1])]))
        out_ids.append(torch.cat([ids[row], ids.new_full((rest, ids.shape[1]), -1)]))
        probs = sent_weights[row].masked_fill(ids[row] < 0, 0)
        out_probs.append(torch.cat([probs, probs.new_zeros(rest, probs.shape[1])]))
        out_counts.append(counts + -counts % expert_alignment)
    return out_x, out_ids, out_probs, out_counts


def flat_rows(topk_idx: list[torch.Tensor], rank: int, num_experts: int) -> torch.Tensor:
    """Returns the tokens, counted over all ranks, that chose an expert of a rank."""
    expert_rank = torch.cat(topk_idx).div(num_experts // len(topk_idx), rounding_mode="floor")
    return (expert_rank == rank).any(dim=1).nonzero()[:, 0]


def flat_combine(
    rank_out: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    num_experts: int,
    max_recv_tokens: int | None = None,
    weights: list[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Combines rows [R, H] in the order of flat_dispatch, with weights [R], as `combine` does."""
    num_tokens = [idx.shape[0] for idx in topk_idx]
    sums = rank_out[0].new_zeros(sum(num_tokens), rank_out[0].shape[1], dtype=torch.float64)
    for rank, out in enumerate(rank_out):
        terms = (out if weights is None else out * weights[rank].unsqueeze(1)).to(torch.float64)
        token = flat_rows(topk_idx, rank, num_experts)[:max_recv_tokens]
        sums.index_add_(0, token, terms[: len(token)])
    return list(sums.to(rank_out[0].dtype).split(num_tokens))


def places(
    topk_idx: list[torch.Tensor],
    rank: int,
    num_experts: int,
    expert_alignment: int = 1,
    expert_capacity: int | None = None,
) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Returns for each expert of a rank its first row, and the tokens (over all ranks) and k in the order of its
    rows."""
    local_experts, first, out = num_experts // len(topk_idx), 0, []
    for expert in range(rank * local_experts, (rank + 1) * local_experts):
        token, k, padding = expert_rows(topk_idx, expert, expert_alignment, expert_capacity)
        out.append((first, token, k))
        first += len(token) + padding
    return out


def low_latency_combine(
    expert_out: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    num_experts: int,
    expert_alignment: int = 1,
    max_recv_tokens: int | None = None,
    weights: list[torch.Tensor] | None = None,
    sum_at: str = "token",
) -> list[torch.Tensor]:
    """Takes expert_out [R, H], rows in the order of dispatch; returns the sum of each token's rows, [T, H], bit by bit.

    Products and sums in float32 (float64 for float64), in the order of k, rounded to the dtype of expert_out at the
    end. weights: [T, K] with sum_at="token", [R] with "expert": then the rows of a rank's experts are summed first, and
    their sum takes the place of the last of them and is rounded, too. Rows from max_recv_tokens on, which dispatch
    omitted, count as zeros.
    """
    dtype, world = expert_out[0].dtype, len(expert_out)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ids = torch.cat(topk_idx)
    experts_rank = ids.div(num_experts // world, rounding_mode="floor").masked_fill(ids < 0, -1)
    terms = expert_out[0].new_zeros(*ids.shape, expert_out[0].shape[1], dtype=wide)
    for rank, out in enumerate(expert_out):
        rows = out.to(wide)
        if weights is not None and sum_at == "expert":
            rows = rows * weights[rank].unsqueeze(1)
        for first, token, k in places(topk_idx, rank, num_experts, expert_alignment):
            row = first + torch.arange(len(token), device=token.device)
            there = row < (len(out) if max_recv_tokens is None else max_recv_tokens)
            terms[token[there], k[there]] = rows[row[there]]
    if weights is not None and sum_at == "token":
        terms = terms * torch.cat(weights).unsqueeze(2)

    def in_order(chosen: torch.Tensor) -> torch.Tensor:
        """Returns the sums of the chosen terms. chosen: bool [T, K]."""
        total = terms.new_zeros(len(ids), terms.shape[2])
        for k in range(ids.shape[1]):
            total = torch.where(chosen[:, k : k + 1], total + terms[:, k], total)
        return total

    travels = ids >= 0
    if sum_at == "expert":
        sums = [in_order(experts_rank == rank) for rank in range(world)]
        same_rank = experts_rank.unsqueeze(2) == experts_rank.unsqueeze(1)
        travels &= ~same_rank.triu(diagonal=1).any(dim=2)
        for token, k in travels.nonzero().tolist():
            terms[token, k] = sums[experts_rank[token, k]][token].to(dtype)
    return list(in_order(travels).to(dtype).split([len(idx) for idx in topk_idx]))


def without_masked(topk_idx: list[torch.Tensor], active: list[torch.Tensor], num_experts: int) -> list[torch.Tensor]:
    """Returns topk_idx with -1 for choices of a rank that the token's rank has masked, or that has masked the token's
    rank.

    active: for each rank int32 [W], 0 for the ranks that it has masked. With masked ranks the low-latency mode computes
    what it computes from these ids without masks.
    """
    local_experts, out = num_experts // len(topk_idx), []
    for rank, idx in enumerate(topk_idx):
        linked = torch.stack([other[rank] for other in active]) * active[rank] > 0
        linked[rank] = True
        choices = linked[idx.clamp_min(0).div(local_experts, rounding_mode="floor")]
        out.append(idx.masked_fill(~choices, -1))
    return out


def renormalized(weights: torch.Tensor, topk_idx: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Returns weights [T, K], scaled for tokens of which only the choices in `kept` are left of those in topk_idx, both
    [T, K]: by the sum of the weights of all choices over that of those left, in the order of k, unless that is 0."""
    picked, left = topk_idx >= 0, kept >= 0
    sums = weights.new_zeros(2, len(weights))
    for k in range(weights.shape[1]):
        for total, counts in zip(sums, (picked, left), strict=True):
            total += torch.where(counts[:, k], weights[:, k], weights.new_zeros(()))
    factor = torch.where((picked == left).all(dim=1) | (sums[1] == 0), weights.new_ones(()), sums[0] / sums[1])
    return weights * factor.unsqueeze(1)

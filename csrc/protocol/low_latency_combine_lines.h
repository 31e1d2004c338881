#pragma once

#include "protocol/low_latency_combine_rows.h"
#include "protocol/low_latency_words.h"

namespace ep {

// A low-latency combine where rows are lines, and the values beside them words: a receiver sums a
// row's lines as soon as they are there, and nobody waits until what it has stored has arrived.

// Rows that travel each by themselves stay where they are if this rank's token gets them by the
// same launch. A later one would find in their place what the caller has written there meanwhile.
EP_FN bool keeps_own_rows(const LowLatencyCombineArgs& args, bool in_one_launch) {
    return in_one_launch && !args.sum_at_expert;
}

// The values beside a token's rows.
template <WarpLike W, class F>
EP_FN void send_values(W& warp, const LowLatencyCombine<F>& call, int source, int token,
                       uint32_t own, const typename W::template PerLane<int>& dst_row) {
    const LowLatencyCombineArgs& args = call.args;
    const int bytes = args.format.weight_bytes;
    warp.lanes(bytes ? args.format.topk : 0, [&](int k) {
        if (!(own >> k & 1)) return;
        auto* words =
            call.fabric.template at<uint64_t>(source, args.heap.value_words(call.bank, token, k));
        const uint64_t value = value_of(args, dst_row[k]);
        W::store_word(words, word_with(call, static_cast<uint32_t>(value)));
        if (bytes == 8) W::store_word(words + 1, word_with(call, value >> 32));
    });
}

// Some lines of what the experts here made of one token.
template <class T, WarpLike W, class F>
EP_FN void return_lines(W& warp, const LowLatencyCombine<F>& call, int source, int token,
                        const Lines& lines) {
    const LowLatencyCombineArgs& args = call.args;
    const RowFormat& format = args.format;
    typename W::template PerLane<int> dst_row;
    typename W::template PerLane<char*> slot;
    typename W::template PerLane<const char*> row;
    typename W::template PerLane<Accumulator<T>> weight;
    warp.lanes(format.topk, [&](int k) {
        dst_row[k] = args.layout.dst_rows(source, token)[k];
        slot[k] = call.fabric.template at<char>(source,
                                                args.heap.part(call.bank, args.rank, token, k, 0));
        row[k] = row_of(args, dst_row[k]);
        if (args.row_weights && dst_row[k] >= 0)
            weight[k] = weight_at<T>(args.row_weights, dst_row[k]);
    });
    const uint32_t own =
        warp.ballot(format.topk, [&](int k) { return dst_row[k] != LowLatencyArgs::kElsewhere; });
    const uint32_t rows = warp.ballot(format.topk, [&](int k) { return dst_row[k] >= 0; });
    if (!lines.first) send_values(warp, call, source, token, own, dst_row);
    // the sum to the slot of its first k, or each row to its own
    const uint32_t parts = args.sum_at_expert ? own & (~own + 1) : own;
    for_each_lane(parts, [&](int k) {
        const uint32_t summed = args.sum_at_expert ? rows : rows & uint32_t{1} << k;
        char* to = warp.broadcast(slot, k);
        const size_t bytes = format.payload_bytes;
        if (args.row_weights) {
            warp.template send_sum<T>(to, row, weight, summed, bytes, lines, call.tag);
        } else {
            warp.template send_sum<T>(to, row, Unweighted{}, summed, bytes, lines, call.tag);
        }
    });
}

// A warp's share of the sending half.
template <class T, WarpLike W, class F>
EP_FN bool send_combine_by_lines(W& warp, const LowLatencyCombine<F>& call, const Team& team,
                                 bool in_one_launch) {
    const LowLatencyCombineArgs& args = call.args;
    const int kept = keeps_own_rows(args, in_one_launch) ? args.rank : -1;
    // Each rank begins with another one and ends with itself: no link carries the rows of all.
    return for_own_shares<LineShares>(
        warp, args, team, args.rank + 1,
        [&](int lanes, const auto& source, const auto& token, auto& bits) {
            warp.lanes(lanes, [&](int lane) {
                const int word = source[lane] * args.heap.chunks() + token[lane] / 32;
                bits[lane] = source[lane] == kept ? 0 : args.layout.present(word);
            });
            return true;
        },
        [&](int source, int token, const Lines& lines) {
            return_lines<T>(warp, call, source, token, lines);
            return true;
        });
}

// The values beside a token's rows, once they are there; in_place: whose rows stay where they are.
template <WarpLike W, class F>
EP_FN bool receive_values(W& warp, const LowLatencyCombine<F>& call, int token, uint32_t in_place,
                          const typename W::template PerLane<int>& rank) {
    const LowLatencyCombineArgs& args = call.args;
    const int topk = args.format.topk, bytes = args.format.weight_bytes;
    typename W::template PerLane<uint64_t> value;
    warp.lanes(topk, [&](int k) {
        const bool is_here = in_place >> k & 1;
        value[k] = is_here ? value_of(args, args.layout.dst_rows(args.rank, token)[k]) : 0;
    });
    const bool here = read_words(
        warp, call, Wait::TaggedRow, topk, bytes / 4,
        [&](int k, int half) {
            if (rank[k] < 0 || in_place >> k & 1) return WordOf{-1, nullptr};
            const size_t words = args.heap.value_words(call.bank, token, k);
            return WordOf{rank[k], call.fabric.template own<uint64_t>(words) + half};
        },
        [&](int k, int half, uint32_t bits) {
            if (!(in_place >> k & 1)) value[k] |= static_cast<uint64_t>(bits) << 32 * half;
        });
    if (!here) return false;
    warp.lanes(topk, [&](int k) {
        const size_t at = static_cast<size_t>(token) * topk + k;
        store_weight(args.y_values + at * bytes, value[k], bytes);
    });
    return true;
}

// Where waits are counted: until the first of these lines are there, so that the wait for all of
// them, which follows, need not be.
template <WarpLike W, class F>
EP_FN bool count_wait_for_lines(W& warp, const LowLatencyCombine<F>& call, const RowsToSum<W>& rows,
                                const Lines& lines) {
    if (!call.args.recv_wait_ns) return true;
    return wait_counted(warp, call, Wait::TaggedRow, call.args.format.topk, [&](int k) {
        if (!(rows.mask & rows.in_lines & uint32_t{1} << k)) return nothing_to_wait_for();
        const char* line = rows.row[k] + static_cast<size_t>(lines.first) * Line::kBytes;
        const uint64_t tag = W::load_word(reinterpret_cast<const uint64_t*>(line + Line::kTag));
        return WaitCondition{LineTag{tag}.number(), call.number, rows.rank[k]};
    });
}

template <class T, WarpLike W, class F>
EP_FN bool sum_lines(W& warp, const LowLatencyCombine<F>& call, int token, const Lines& lines,
                     bool in_one_launch) {
    const LowLatencyCombineArgs& args = call.args;
    const RowFormat& format = args.format;
    const int topk = format.topk, kept = keeps_own_rows(args, in_one_launch) ? args.rank : -1;
    RowsToSum<W> rows;
    typename W::template PerLane<Accumulator<T>> weight;
    find_ranks_of(warp, args, token, rows.rank);
    rows.mask = args.sum_at_expert ? warp.first_of(topk, rows.rank)
                                   : warp.ballot(topk, [&](int k) { return rows.rank[k] >= 0; });
    warp.lanes(topk, [&](int k) {
        if (rows.rank[k] == kept) {
            rows.row[k] = row_of(args, args.layout.dst_rows(kept, token)[k]);
        } else {
            rows.row[k] =
                call.fabric.template own<char>(args.heap.part(call.bank, args.rank, token, k, 0));
        }
        if (args.token_weights)
            weight[k] = weight_at<T>(args.token_weights, static_cast<int64_t>(token) * topk + k);
    });
    const uint32_t in_place =
        kept < 0 ? 0 : warp.ballot(topk, [&](int k) { return rows.rank[k] == kept; });
    rows.in_lines = ~in_place;
    rows.tag = call.tag;
    if (!lines.first && !receive_values(warp, call, token, in_place, rows.rank)) return false;
    if (!count_wait_for_lines(warp, call, rows, lines)) return false;
    char* y = args.y + static_cast<size_t>(token) * format.payload_bytes;
    const size_t bytes = format.payload_bytes;
    if (args.token_weights)
        return warp.template receive_sum<T>(Wait::TaggedRow, rows, weight, y, bytes, lines);
    return warp.template receive_sum<T>(Wait::TaggedRow, rows, Unweighted{}, y, bytes, lines);
}

// A warp's share of the receiving half.
template <class T, WarpLike W, class F>
EP_FN bool receive_combine_by_lines(W& warp, const LowLatencyCombine<F>& call, const Team& team,
                                    bool in_one_launch) {
    const int tokens = call.args.num_tokens;
    const LineShares lines(call.args.format, tokens, team.warps);
    const int shares = lines.shares();
    for (int i = team.warp; i < tokens * shares; i += team.warps) {
        if (!sum_lines<T>(warp, call, i / shares, lines[i % shares], in_one_launch)) return false;
    }
    return true;
}

}  // namespace ep

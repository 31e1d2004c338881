#pragma once

#include "protocol/low_latency_combine_rows.h"
#include "protocol/low_latency_words.h"

namespace ep {

// A low-latency combine that returns one row per rank and token, the sum of its experts' rows, as
// lines, and the values beside them as words. A receiver sums lines as soon as they arrive, and no
// sender waits for its stores to arrive. The last k that chose a rank names its row.

// Sends the values of a token's rows. last_k: the last choice of this rank.
template <WarpLike W, class F>
EP_FN void send_values(W& warp, const LowLatencyCombine<F>& call, int source, int token,
                       const PerLane<W, int>& dst_row, int last_k) {
    const LowLatencyCombineArgs& args = call.args;
    const int bytes = args.format.weight_bytes;
    const int64_t flat = args.is_flat ? warp.broadcast(dst_row, last_k) : 0;
    warp.lanes(bytes ? args.format.topk : 0, [&](int k) {
        if (dst_row[k] == LowLatencyArgs::kElsewhere) return;
        auto* words =
            call.fabric.template at<uint64_t>(source, args.heap.value_words(call.bank, token, k));
        const int64_t at = !args.is_flat ? dst_row[k]
                           : flat < 0    ? flat
                                         : flat * args.format.topk + k;
        const uint64_t value = value_of(args, at);
        W::store_word(words, word_with(call, static_cast<uint32_t>(value)));
        if (bytes == 8) W::store_word(words + 1, word_with(call, value >> 32));
    });
}

// Returns some lines of what the experts here made of one token.
template <class T, WarpLike W, class F>
EP_FN void return_lines(W& warp, const LowLatencyCombine<F>& call, int source, int token,
                        const Lines& lines) {
    const LowLatencyCombineArgs& args = call.args;
    const int topk = args.format.topk;
    PerLane<W, int> dst_row;
    PerLane<W, const char*> row;
    PerLane<W, Accumulator<T>> weight;
    warp.lanes(topk, [&](int k) {
        dst_row[k] = args.layout.dst_rows(source, token)[k];
        if (dst_row[k] < 0) return;
        row[k] = row_of(args, dst_row[k]);
        if (args.row_weights) weight[k] = weight_at<T>(args.row_weights, dst_row[k]);
    });
    const uint32_t own =
        warp.ballot(topk, [&](int k) { return dst_row[k] != LowLatencyArgs::kElsewhere; });
    if (!lines.first) {
        send_values(warp, call, source, token, dst_row, highest_lane(own));
        tag_other_kind(warp, call, source, token, highest_lane(own));
    }
    const uint32_t rows = warp.ballot(topk, [&](int k) { return dst_row[k] >= 0; });
    char* slot = call.fabric.template at<char>(
        source, args.heap.sum(call.bank, args.rank, token, highest_lane(own)));
    with_weights(args.row_weights, weight, [&](const auto& weights) {
        warp.template send_sum<T>(slot, row, weights, rows, args.format.payload_bytes, lines,
                                  call.tag);
    });
}

// Sends a warp's share.
template <class T, WarpLike W, class F>
EP_FN bool send_sums(W& warp, const LowLatencyCombine<F>& call, const Team& team) {
    return for_returned<LineShares>(warp, call, team, -1,
                                    [&](int source, int token, const Lines& lines) {
                                        return_lines<T>(warp, call, source, token, lines);
                                        return true;
                                    });
}

// Receives the values of a token's rows.
template <WarpLike W, class F>
EP_FN bool receive_values(W& warp, const LowLatencyCombine<F>& call, int token,
                          const PerLane<W, int>& rank) {
    const LowLatencyCombineArgs& args = call.args;
    const int topk = args.format.topk, bytes = args.format.weight_bytes;
    PerLane<W, uint64_t> value;
    warp.lanes(topk, [&](int k) { value[k] = 0; });
    const bool here = read_words(
        warp, call, Wait::TaggedRow, topk, bytes / 4,
        [&](int k, int half) {
            const size_t words = args.heap.value_words(call.bank, token, k);
            return WordOf{rank[k], call.word(words) + half};
        },
        [&](int k, int half, uint32_t bits) {
            value[k] |= static_cast<uint64_t>(bits) << 32 * half;
        });
    if (!here) return false;
    warp.lanes(topk, [&](int k) { store_value(args, token, k, value[k]); });
    return true;
}

// If waits are measured: waits until the first of these lines have arrived, so that the wait for
// all of them, which follows, need not be measured.
template <WarpLike W, class F>
EP_FN bool count_wait_for_lines(W& warp, const LowLatencyCombine<F>& call, const RowsToSum<W>& rows,
                                const Lines& lines) {
    if (!call.args.recv_wait_ns) return true;
    return wait_counted(warp, call, Wait::TaggedRow, call.args.format.topk, [&](int k) {
        if (!(rows.mask >> k & 1)) return nothing_to_wait_for();
        const char* line = rows.slot[k] + static_cast<size_t>(lines.first) * Line::kBytes;
        const uint64_t tag = W::load_word(reinterpret_cast<const uint64_t*>(line + Line::kTag));
        return WaitCondition{LineTag{tag}.number(), call.number, rows.rank[k]};
    });
}

template <class T, WarpLike W, class F>
EP_FN bool sum_lines(W& warp, const LowLatencyCombine<F>& call, int token, const Lines& lines) {
    const LowLatencyCombineArgs& args = call.args;
    const int topk = args.format.topk;
    RowsToSum<W> rows;
    PerLane<W, Accumulator<T>> weight;
    find_ranks_of(warp, args, token, rows.rank);
    rows.mask = warp.last_of(topk, rows.rank);
    rows.tag = call.tag;
    warp.lanes(topk, [&](int k) {
        rows.slot[k] = call.fabric.template own<char>(
            args.heap.sum(call.bank, rows.rank[k] < 0 ? 0 : rows.rank[k], token, k));
        if (args.token_weights)
            weight[k] = weight_at<T>(args.token_weights, static_cast<int64_t>(token) * topk + k);
    });
    if (!lines.first && !receive_values(warp, call, token, rows.rank)) return false;
    if (!count_wait_for_lines(warp, call, rows, lines)) return false;
    const size_t bytes = args.format.payload_bytes;
    char* y = args.y + token * bytes;
    return with_weights(args.token_weights, weight, [&](const auto& weights) {
        return warp.template receive_sum<T>(Wait::TaggedRow, rows, weights, y, bytes, lines);
    });
}

// Receives a warp's share.
template <class T, WarpLike W, class F>
EP_FN bool receive_sums(W& warp, const LowLatencyCombine<F>& call, const Team& team) {
    const int tokens = call.args.num_tokens;
    const LineShares lines(call.args.format, tokens, team.warps);
    const int shares = lines.shares();
    for (int i = team.warp; i < tokens * shares; i += team.warps) {
        if (!sum_lines<T>(warp, call, i / shares, lines[i % shares])) return false;
    }
    return true;
}

}  // namespace ep

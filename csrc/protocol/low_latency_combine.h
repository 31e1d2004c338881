#pragma once

#include "protocol/low_latency_combine_sums.h"

namespace ep {

// The two halves of a low-latency combine.
//
// Sending: the experts' rows of every token that arrived go back to the slots of the token's k,
// each row by itself, or their sum to the slot of the last k that chose this rank.
//
// Receiving: a token's rows are summed in the order of k. The token's rank knows which rows come,
// so no counts travel. A rank's sum has the place of its last k, as in the normal mode.

// Writes the value that travels with a row.
EP_FN void write_value(const LowLatencyCombineArgs& args, char* slot, int k, int64_t dst_row) {
    const int bytes = args.format.weight_bytes;
    store_weight(slot + args.format.weights() + k * bytes, value_of(args, dst_row), bytes);
}

// Writes a piece of the row of each lane in the mask to the lane's slot.
template <WarpLike W>
EP_FN void write_rows(W& warp, const LowLatencyCombineArgs& args, const PerLane<W, char*>& slot,
                      uint32_t mask, const Piece& piece, const PerLane<W, int>& dst_row) {
    const RowFormat& format = args.format;
    PerLane<W, void*> to{};
    PerLane<W, const void*> from{};
    warp.lanes(format.topk, [&](int k) {
        if (!(mask >> k & 1)) return;
        if (!piece.number) write_value(args, slot[k], k, dst_row[k]);
        const int64_t row = dst_row[k] < 0 ? 0 : dst_row[k];
        from[k] = args.x + row * format.payload_bytes + piece.first;
        to[k] = slot[k] + format.payload() + piece.first;
    });
    const uint32_t rows =
        warp.ballot(format.topk, [&](int k) { return mask >> k & 1 && dst_row[k] >= 0; });
    warp.template copy_each<CacheHint::EvictFirst>(to, from, rows, piece.bytes);
    for_each_lane(mask & ~rows, [&](int k) { warp.zero(warp.broadcast(to, k), piece.bytes); });
}

// Writes a piece of the sum of the rows of the lanes in the mask to `slot`.
template <class T, WarpLike W>
EP_FN void write_sum(W& warp, const LowLatencyCombineArgs& args, char* slot, uint32_t mask,
                     const Piece& piece, const PerLane<W, int>& dst_row) {
    const RowFormat& format = args.format;
    PerLane<W, const void*> part;
    PerLane<W, Accumulator<T>> weight;
    warp.lanes(format.topk, [&](int k) {
        const int64_t row = dst_row[k] < 0 ? 0 : dst_row[k];
        part[k] = args.x + row * format.payload_bytes + piece.first;
        if (args.row_weights && mask >> k & 1)
            weight[k] = dst_row[k] < 0 ? 0 : weight_at<T>(args.row_weights, row);
        if (mask >> k & 1 && !piece.number) write_value(args, slot, k, dst_row[k]);
    });
    const uint32_t rows =
        warp.ballot(format.topk, [&](int k) { return mask >> k & 1 && dst_row[k] >= 0; });
    char* payload = slot + format.payload() + piece.first;
    with_weights(args.row_weights, weight, [&](const auto& weights) {
        warp.template sum<T, CacheHint::EvictFirst>(payload, part, weights, rows,
                                                    piece.bytes / sizeof(T));
    });
}

// Returns a piece of what the experts here made of one token. Rows that are put are put whole.
template <class T, WarpLike W, class F>
EP_FN void return_piece(W& warp, const LowLatencyCombine<F>& call, const Team& team, int source,
                        int token, const Piece& piece) {
    const bool near = call.fabric.maps(source);
    if (!near && piece.number) return;
    const LowLatencyCombineArgs& args = call.args;
    const RowFormat& format = args.format;
    const LowLatencyHeap& heap = args.heap;
    PerLane<W, int> dst_row;
    warp.lanes(format.topk, [&](int k) { dst_row[k] = args.layout.dst_rows(source, token)[k]; });
    const uint32_t own =
        warp.ballot(format.topk, [&](int k) { return dst_row[k] != LowLatencyArgs::kElsewhere; });
    // the rows that travel, each named by its last k
    const uint32_t parts = args.sum_at_expert ? uint32_t{1} << highest_lane(own) : own;
    auto choice_of = [&](int k) { return lanes_below(parts, k); };
    auto part_of = [&](int k) { return heap.part(call.bank, args.rank, token, k, choice_of(k)); };
    auto staged_of = [&](int k) {
        return heap.staged_part(call.bank, source, token, choice_of(k));
    };
    auto slot_of = [&](int k) {
        return near ? call.fabric.template at<char>(source, part_of(k))
                    : call.fabric.template network<char>(staged_of(k));
    };
    const Pieces pieces(format);
    const Piece written = near ? piece : pieces.all();
    PerLane<W, char*> slot;
    warp.lanes(format.topk, [&](int k) { slot[k] = slot_of(k); });
    if (args.sum_at_expert) {
        for_each_lane(parts, [&](int k) {
            write_sum<T>(warp, args, warp.broadcast(slot, k), own, written, dst_row);
        });
    } else {
        write_rows(warp, args, slot, parts, written, dst_row);
    }
    if (near) {
        if (!piece.number) tag_other_kind(warp, call, source, token, highest_lane(own));
        return publish_tags(warp, call, piece, parts, slot_of);
    }
    for_each_lane(parts, [&](int k) {
        warp.lanes(pieces.count, [&](int i) {
            *reinterpret_cast<uint64_t*>(slot_of(k) + Piece::tag(i)) = call.tag;
        });
        call.fabric.put_to(warp, channel_of(call, team, source), source, part_of(k), staged_of(k),
                           format.slot_bytes());
    });
}

// The rank whose rows are summed where they lie; -1: none. It is this rank if one launch runs both
// halves: a later launch might find there what the caller has written since.
EP_FN int kept_rank(const LowLatencyCombineArgs& args, bool in_one_launch) {
    const bool keeps = in_one_launch && !args.sum_at_expert && !args.layout.overflow();
    return keeps ? args.rank : -1;
}

// Sends a warp's share, without lines.
template <class T, WarpLike W, class F>
EP_FN bool send_rows(W& warp, const LowLatencyCombine<F>& call, const Team& team,
                     bool in_one_launch) {
    return for_returned<Pieces>(warp, call, team, kept_rank(call.args, in_one_launch),
                                [&](int source, int token, const Piece& piece) {
                                    return_piece<T>(warp, call, team, source, token, piece);
                                    return true;
                                });
}

// Leaves out the rows of ranks that do not take part; with `renormalize` the weights of the token's
// other rows make up for them.
template <class T, WarpLike W, class F>
EP_FN void drop_ranks(W& warp, const LowLatencyCombine<F>& call, int token, const Piece& piece,
                      PerLane<W, int>& rank, PerLane<W, Accumulator<T>>& weight) {
    const LowLatencyCombineArgs& args = call.args;
    const int topk = args.format.topk;
    const uint32_t dropped = warp.ballot(topk, [&](int k) {
        return args.layout.experts(token)[k] <= LowLatencyArgs::kDropped ||
               (rank[k] >= 0 && !call.takes_part(LowLatencyHalf::Receive, rank[k]));
    });
    if (!dropped) return;
    if (!piece.first) count_dropped(warp, call, dropped);
    warp.lanes(topk, [&](int k) {
        if (dropped >> k & 1) rank[k] = -1;
    });
    if (!args.renormalize) return;
    const uint32_t left = warp.ballot(topk, [&](int k) { return rank[k] >= 0; });
    Accumulator<T> all = 0, kept = 0;
    for_each_lane(left | dropped, [&](int k) {
        const Accumulator<T> own = warp.broadcast(weight, k);
        all += own;
        if (left >> k & 1) kept += own;
    });
    if (kept == 0) return;
    warp.lanes(topk, [&](int k) { weight[k] *= all / kept; });
}

template <class T, WarpLike W, class F>
EP_FN bool sum_piece(W& warp, const LowLatencyCombine<F>& call, int token, const Piece& piece,
                     int kept) {
    const LowLatencyCombineArgs& args = call.args;
    const RowFormat& format = args.format;
    PerLane<W, int> rank;
    PerLane<W, uint32_t> same_rank;
    PerLane<W, char*> slot;
    PerLane<W, const void*> part;
    PerLane<W, Accumulator<T>> weight;
    const size_t first = static_cast<size_t>(token) * format.topk;
    find_ranks_of(warp, args, token, rank);
    warp.lanes(format.topk, [&](int k) {
        if (args.token_weights) weight[k] = weight_at<T>(args.token_weights, first + k);
    });
    if (call.masking()) drop_ranks<T>(warp, call, token, piece, rank, weight);
    warp.match(format.topk, rank, same_rank);
    // slot of the row that holds the k-th choice's contribution
    warp.lanes(format.topk, [&](int k) {
        const int last_k = rank[k] < 0 || !args.sum_at_expert ? k : highest_lane(same_rank[k]);
        const int choice = args.sum_at_expert ? 0 : lanes_below(same_rank[k], k);
        const int source = rank[k] < 0 ? 0 : rank[k];
        slot[k] = written_by<char>(call.fabric, source,
                                   call.heap().part(call.bank, source, token, last_k, choice));
        part[k] = slot[k] + format.payload() + piece.first;
        if (rank[k] < 0 || rank[k] != kept) return;
        part[k] = row_of(args, args.layout.dst_rows(kept, token)[k]) + piece.first;
    });
    const uint32_t parts = warp.ballot(format.topk, [&](int k) {
        return rank[k] >= 0 && (!args.sum_at_expert || highest_lane(same_rank[k]) == k);
    });
    const uint32_t sent = parts & warp.ballot(format.topk, [&](int k) { return rank[k] != kept; });
    if (!call.masking() && !wait_rows_put(warp, call, format.topk, sent, rank)) return false;
    for (int i = piece.number; i < piece.number + piece.count; ++i) {
        const auto from = [&](int k) { return rank[k]; };
        if (!wait_tags(warp, call, format.topk, sent, slot, i, from)) return false;
    }
    warp.lanes(piece.first ? 0 : format.topk, [&](int k) {
        const char* sent_value = slot[k] + format.weights() + k * format.weight_bytes;
        store_value(args, token, k,
                    rank[k] < 0       ? 0
                    : rank[k] == kept ? value_of(args, args.layout.dst_rows(kept, token)[k])
                                      : load_weight(sent_value, format.weight_bytes));
    });
    char* y = args.y + static_cast<size_t>(token) * format.payload_bytes + piece.first;
    with_weights(args.token_weights, weight, [&](const auto& weights) {
        warp.template sum<T, CacheHint::Keep>(y, part, weights, parts, piece.bytes / sizeof(T));
    });
    return true;
}

template <WarpLike W, class F>
EP_FN bool may_receive(W& warp, const LowLatencyCombine<F>& call, const Team& team) {
    return !call.masking() ||
           decide_membership(warp, call, team, LowLatencyHalf::Receive, Wait::Rows,
                             [&](int rank) { return need_rows<W>(call, rank); });
}

constexpr int kMaxParts = 8;  // per share, so that more warps take part

// Receives a warp's share, without lines.
template <class T, WarpLike W, class F>
EP_FN bool receive_rows(W& warp, const LowLatencyCombine<F>& call, const Team& team,
                        bool in_one_launch) {
    const int kept = kept_rank(call.args, in_one_launch);
    const int tokens = call.args.num_tokens;
    const Pieces pieces(call.args.format, tokens, team.warps);
    const int shares = pieces.shares();
    int parts = 1;
    while (parts < kMaxParts && tokens * shares * 2 * parts <= team.warps) parts *= 2;
    const int all = tokens * shares * parts;
    // A warp that sums nothing need not wait. With masking it must: all warps decide membership.
    if (team.warp >= all && !call.masking()) return true;
    if (!may_receive(warp, call, team)) return false;
    for (int i = team.warp; i < all; i += team.warps) {
        const Piece piece = pieces[i / parts % shares].part(i % parts, parts);
        if (!sum_piece<T>(warp, call, i / parts / shares, piece, kept)) return false;
    }
    return true;
}

// kLines: sums travel as lines (by_lines). in_one_launch: one launch runs both halves.

template <class T, bool kLines, WarpLike W, class F>
EP_FN bool send_combine(W& warp, const LowLatencyCombine<F>& call, const Team& team,
                        bool in_one_launch) {
    if constexpr (kLines && F::kKeepsLines) return send_sums<T>(warp, call, team);
    return send_rows<T>(warp, call, team, in_one_launch);
}

template <class T, bool kLines, WarpLike W, class F>
EP_FN bool receive_combine(W& warp, const LowLatencyCombine<F>& call, const Team& team,
                           bool in_one_launch) {
    if constexpr (kLines && F::kKeepsLines) return receive_sums<T>(warp, call, team);
    return receive_rows<T>(warp, call, team, in_one_launch);
}

template <LowLatencyLaunches kLaunches, class T, bool kLines, WarpLike W, class F>
EP_FN Ended low_latency_combine(W& warp, const LowLatencyCombine<F>& call, const Team& team) {
    constexpr bool kInOneLaunch = kLaunches == LowLatencyLaunches::Both;
    return run_halves<kLaunches>(
        warp, call, team, [&] { return send_combine<T, kLines>(warp, call, team, kInOneLaunch); },
        [&] { return receive_combine<T, kLines>(warp, call, team, kInOneLaunch); });
}

}  // namespace ep

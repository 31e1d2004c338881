#pragma once

#include "protocol/low_latency_dispatch_receive.h"
#include "protocol/low_latency_words.h"

namespace ep {

// The receiving half of a low-latency dispatch whose rows are lines: a warp waits for the words
// that say where its share goes, then for the lines themselves.

// Stores for the handle how many flat rows there are, and marks those that no token fills.
template <WarpLike W>
EP_FN void note_flat_rows(W& warp, const LowLatencyDispatchArgs& args, int rows) {
    note_rows(warp, args, rows, rows > args.max_rows);
    if (!args.clears_weights || rows >= args.max_rows) return;
    const int64_t first = int64_t{rows} * args.format.topk, end = args.max_rows * args.format.topk;
    const int bytes = args.format.weight_bytes;
    if (bytes) warp.zero(args.recv_weights + first * bytes, (end - first) * bytes);
    warp.lanes(args.recv_experts ? 32 : 0, [&](int lane) {
        for (int64_t i = first + lane; i < end; i += 32) args.recv_experts[i] = -1;
    });
}

// Stores for the handle which tokens arrive.
template <bool kFlat, WarpLike W, class F>
EP_FN bool note_present_words(W& warp, const LowLatencyDispatch<F>& call) {
    const int chunks = call.heap().chunks(), words = call.world() * chunks;
    PerLane<W, int> arrive;
    warp.lanes(32, [&](int lane) { arrive[lane] = 0; });
    for (int first = 0; first < words; first += 32) {
        const bool here = read_words(
            warp, call, Wait::Choices, lanes_from(first, words), 1,
            [&](int lane, int) {
                const int word = first + lane;
                return chosen_word(call, word / chunks, call.heap().words().present(word % chunks));
            },
            [&](int lane, int, uint32_t bits) {
                const int word = first + lane;
                bits &= call.heap().tokens_of_chunk(word % chunks);
                call.args.layout.present(word) = bits;
                arrive[lane] += popcount(bits);
            });
        if (!here) return false;
    }
    if constexpr (kFlat) note_flat_rows(warp, call.args, warp.exclusive_scan(32, arrive));
    return true;
}

// Reads a token's choices, one per lane: the local expert, or -1 if it is on another rank, and with
// with_weights the weight. Returns false if a wait failed.
template <WarpLike W, class F>
EP_FN bool read_choices(W& warp, const LowLatencyDispatch<F>& call, const RowPlaces& places,
                        int source, int token, bool with_weights, PerLane<W, int>& expert,
                        PerLane<W, uint64_t>& weight) {
    const ChoiceWords numbers = call.heap().words();
    const int topk = call.args.format.topk;
    const int halves = with_weights ? call.args.format.weight_bytes / 4 : 0;
    const uint64_t* words = choice_words(call, call.args.rank, source);
    const size_t first = static_cast<size_t>(token) * topk;
    const uint64_t *experts = words + numbers.expert(first),
                   *weights = words + numbers.weight(first, 0);
    warp.lanes(topk, [&](int lane) { weight[lane] = 0; });
    return read_words(
        warp, call, Wait::Choices, topk, 1 + halves,
        [&](int lane, int i) {
            return WordOf{source,
                          i ? weights + ChoiceWords::kHalves * lane + i - 1 : experts + lane};
        },
        [&](int lane, int i, uint32_t value) {
            if (i) {
                weight[lane] |= static_cast<uint64_t>(value) << 32 * (i - 1);
            } else {
                expert[lane] = places.local_expert(static_cast<int32_t>(value));
            }
        });
}

// Computes the output row of each of a token's choices. Returns false if a wait failed.
template <WarpLike W, class F>
EP_FN bool find_output_rows(W& warp, const LowLatencyDispatch<F>& call, const RowPlaces& places,
                            int source, int token, const PerLane<W, int>& expert,
                            PerLane<W, int>& dst_row) {
    const ChoiceWords numbers = call.heap().words();
    const int topk = call.args.format.topk, chunk = token / 32;
    PerLane<W, int> before;
    warp.lanes(topk, [&](int lane) { before[lane] = 0; });
    // rows of earlier ranks, and of earlier tokens of the source
    const bool counted = read_words(
        warp, call, Wait::Choices, topk, source + chunk + 1,
        [&](int lane, int i) {
            if (expert[lane] < 0) return WordOf{-1, nullptr};
            return i < source ? chosen_word(call, i, numbers.rows(expert[lane]))
                              : chosen_word(call, source, numbers.tokens(expert[lane], i - source));
        },
        [&](int lane, int i, uint32_t value) {
            if (i == source + chunk) value &= (uint32_t{1} << token % 32) - 1;
            before[lane] =
                sum_of(before[lane], i < source ? static_cast<int>(value) : popcount(value));
        });
    if (!counted) return false;
    warp.lanes(topk, [&](int lane) {
        dst_row[lane] =
            expert[lane] < 0 ? LowLatencyArgs::kElsewhere : places.row(expert[lane], before[lane]);
    });
    return true;
}

// Computes the flat row of a token: how many tokens arrive before it. The last of its choices here
// names the row. Returns false if a wait failed.
template <WarpLike W, class F>
EP_FN bool place_of_token(W& warp, const LowLatencyDispatch<F>& call, int source, int token,
                          const PerLane<W, int>& expert, PerLane<W, int>& dst_row) {
    const LowLatencyHeap& heap = call.heap();
    const int chunks = heap.chunks(), last = source * chunks + token / 32;
    PerLane<W, int> before;
    warp.lanes(32, [&](int lane) { before[lane] = 0; });
    const bool counted = read_words(
        warp, call, Wait::Choices, 32, last / 32 + 1,
        [&](int lane, int i) {
            const int word = 32 * i + lane;
            return chosen_word(call, word > last ? -1 : word / chunks,
                               heap.words().present(word % chunks));
        },
        [&](int lane, int i, uint32_t bits) {
            const int word = 32 * i + lane;
            if (word == last) bits &= (uint32_t{1} << token % 32) - 1;
            before[lane] += popcount(bits & heap.tokens_of_chunk(word % chunks));
        });
    if (!counted) return false;
    const int row = warp.exclusive_scan(32, before), topk = call.args.format.topk;
    const uint32_t here = warp.ballot(topk, [&](int lane) { return expert[lane] >= 0; });
    warp.lanes(topk, [&](int lane) {
        dst_row[lane] = expert[lane] < 0           ? LowLatencyArgs::kElsewhere
                        : here >> lane != 1        ? LowLatencyArgs::kSameRow
                        : row < call.args.max_rows ? row
                                                   : LowLatencyArgs::kOverflowed;
    });
    return true;
}

// Stores for combine where a flat row went, and for the caller its experts and weights.
template <WarpLike W>
EP_FN void note_place_of_token(W& warp, const LowLatencyDispatchArgs& args, int source, int token,
                               const PerLane<W, int>& expert, const PerLane<W, int>& dst_row,
                               const PerLane<W, uint64_t>& weight) {
    const int topk = args.format.topk, bytes = args.format.weight_bytes;
    int32_t* noted = args.layout.dst_rows(source, token);
    warp.lanes(topk, [&](int lane) { noted[lane] = dst_row[lane]; });
    const uint32_t placed = warp.ballot(topk, [&](int lane) { return dst_row[lane] >= 0; });
    for_each_lane(placed, [&](int named) {
        const size_t first = static_cast<size_t>(warp.broadcast(dst_row, named)) * topk;
        warp.lanes(topk, [&](int lane) {
            if (args.recv_experts) args.recv_experts[first + lane] = expert[lane];
            store_weight(args.recv_weights + (first + lane) * bytes,
                         expert[lane] < 0 ? 0 : weight[lane], bytes);
        });
    });
}

// Receives some lines of a row and copies them to its rows at each of the token's experts here.
template <bool kFlat, WarpLike W, class F>
EP_FN bool receive_lines_of(W& warp, const LowLatencyDispatch<F>& call, const RowPlaces& places,
                            int source, int token, const Lines& lines) {
    const LowLatencyDispatchArgs& args = call.args;
    const RowFormat& format = args.format;
    const bool is_first = !lines.first;
    PerLane<W, int> expert, dst_row;
    PerLane<W, uint64_t> weight;
    if (!read_choices(warp, call, places, source, token, is_first, expert, weight)) return false;
    if constexpr (kFlat) {
        if (!place_of_token(warp, call, source, token, expert, dst_row)) return false;
        if (is_first) note_place_of_token(warp, args, source, token, expert, dst_row, weight);
    } else {
        if (!find_output_rows(warp, call, places, source, token, expert, dst_row)) return false;
        if (is_first)
            note_output_rows(warp, args, source, token, dst_row,
                             [&](int lane) { return weight[lane]; });
    }
    PerLane<W, char*> row, scales;
    warp.lanes(format.topk, [&](int lane) {
        if (dst_row[lane] < 0) return;
        const size_t number = dst_row[lane];
        row[lane] = args.recv_x + number * format.payload_bytes;
        scales[lane] = args.recv_scales + (args.scale_column ? 4 * args.scale_word(dst_row[lane])
                                                             : number * format.scale_bytes);
    });
    const uint32_t placed = warp.ballot(format.topk, [&](int lane) { return dst_row[lane] >= 0; });
    ScalePlan plan = ScalePlan::side_by_side(format);
    if (args.scale_column) plan.word_stride = 4 * args.scale_column;
    const size_t slot = call.heap().row(call.bank, source, token);
    const LineSource from{call.fabric.template own<char>(slot), call.tag, source,
                          args.recv_wait_ns ? call.waited(source) : nullptr};
    return warp.receive_lines(Wait::TaggedRow, from, lines, row, placed, format.payload_bytes,
                              scales, plan);
}

// Receives a warp's share.
template <bool kFlat, WarpLike W, class F>
EP_FN bool receive_by_lines(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    const LowLatencyDispatchArgs& args = call.args;
    const ChoiceWords numbers = args.heap.words();
    if (!count_wait_for_words(warp, call)) return false;
    const bool started =
        find_starts(warp, args, team, [&](int first, int lanes, auto& rows, auto& most) {
            warp.lanes(lanes, [&](int lane) { rows[lane] = 0; });
            return read_words(
                warp, call, Wait::Choices, lanes, call.world(),
                [&](int lane, int rank) {
                    return chosen_word(call, rank, numbers.rows(first + lane));
                },
                [&](int lane, int rank, uint32_t value) {
                    rows[lane] = sum_of(rows[lane], static_cast<int>(value));
                    most[lane] = larger_count(most[lane], value, rank);
                });
        });
    if (!started || (notes_starts(team) && !note_present_words<kFlat>(warp, call))) return false;
    const RowPlaces places(args, team);
    // Start with this rank's own rows, which are there first.
    return for_own_shares<LineShares>(
        warp, args, team, args.rank,
        [&](int lanes, const auto& rank, const auto& token, auto& bits) {
            return read_words(
                warp, call, Wait::Choices, lanes, 1,
                [&](int lane, int) {
                    return chosen_word(call, rank[lane], numbers.present(token[lane] / 32));
                },
                [&](int lane, int, uint32_t value) {
                    bits[lane] = value & args.heap.tokens_of_chunk(token[lane] / 32);
                });
        },
        [&](int source, int token, const Lines& lines) {
            return receive_lines_of<kFlat>(warp, call, places, source, token, lines);
        });
}

}  // namespace ep

#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// The two halves of a low-latency dispatch.
//
// Sending: for every rank one warp sends which tokens chose which of its experts, as bits, and
// every token goes to the slot of its own number at each rank that wants it.
//
// Receiving: the bits of all ranks give every row its place, in the order of (expert, source rank,
// token). A row is read from its slot as soon as its tag is there.

template <class F>
using LowLatencyDispatch = LowLatencyCall<F, LowLatencyDispatchArgs>;

EP_FN int64_t chosen_expert(const LowLatencyDispatchArgs& args, int token, int k) {
    const size_t i = static_cast<size_t>(token) * args.format.topk + k;
    return args.index_bytes == 8 ? static_cast<const int64_t*>(args.topk_idx)[i]
                                 : static_cast<const int32_t*>(args.topk_idx)[i];
}

// Bit t of the result: token 32 * chunk + t chose one of `count` experts from `first` on. picks: of
// these experts those of each lane's token, as bits.
template <WarpLike W>
EP_FN uint32_t read_picks(W& warp, const LowLatencyDispatchArgs& args, int chunk, int first,
                          int count, typename W::template PerLane<uint32_t>& picks) {
    const int left = args.num_tokens - 32 * chunk;
    const int tokens = left < 0 ? 0 : left < 32 ? left : 32;
    constexpr int kAtOnce = 8;  // loads under way
    warp.lanes(32, [&](int lane) {
        picks[lane] = 0;
        for (int k = 0; lane < tokens && k < args.format.topk; k += kAtOnce) {
            int64_t expert[kAtOnce];
            for (int i = 0; i < kAtOnce; ++i)
                expert[i] = k + i < args.format.topk
                                ? chosen_expert(args, 32 * chunk + lane, k + i) - first
                                : -1;
            for (int i = 0; i < kAtOnce; ++i) {
                if (expert[i] >= 0 && expert[i] < count) picks[lane] |= uint32_t{1} << expert[i];
            }
        }
    });
    return warp.ballot(tokens, [&](int lane) { return picks[lane] != 0; });
}

// Which tokens chose which experts of a rank.
template <WarpLike W, class F>
EP_FN void send_choices(W& warp, const LowLatencyDispatch<F>& call, int rank) {
    const LowLatencyDispatchArgs& args = call.args;
    const LowLatencyHeap& heap = args.heap;
    const int chunks = heap.chunks(), local_experts = heap.local_experts();
    const size_t target = heap.choices(call.bank, args.rank);
    uint32_t* words =
        call.fabric.maps(rank)
            ? call.fabric.template at<uint32_t>(rank, target)
            : call.fabric.template own<uint32_t>(heap.staged_choices(call.bank, rank));
    typename W::template PerLane<uint32_t> picks, tokens, present;  // present: a lane a chunk
    typename W::template PerLane<int> rows;
    warp.lanes(chunks, [&](int lane) { present[lane] = 0; });
    for (int first = 0; first < local_experts; first += 32) {
        const int experts = lanes_from(first, local_experts);
        warp.lanes(experts, [&](int lane) { rows[lane] = 0; });
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const uint32_t any =
                read_picks(warp, args, chunk, rank * local_experts + first, experts, picks);
            warp.lanes(chunks, [&](int lane) {
                if (lane == chunk) present[lane] |= any;
            });
            for (int expert = 0; expert < experts; ++expert) {
                const uint32_t chose =
                    warp.ballot(32, [&](int lane) { return picks[lane] >> expert & 1; });
                warp.lanes(experts, [&](int lane) {
                    if (lane == expert) tokens[lane] = chose;
                });
            }
            warp.lanes(experts, [&](int lane) {
                words[chunks + (1 + chunk) * local_experts + first + lane] = tokens[lane];
                rows[lane] += popcount(tokens[lane]);
            });
        }
        warp.lanes(experts, [&](int lane) { words[chunks + first + lane] = rows[lane]; });
    }
    warp.lanes(chunks, [&](int lane) { words[lane] = present[lane]; });
    if (!call.fabric.maps(rank)) {
        call.fabric.put_to(warp, heap.channels, rank, target, heap.staged_choices(call.bank, rank),
                           heap.choice_bytes());
    }
    call.fabric.signal_to(warp, heap.channels, rank, heap.choice_flag(args.rank), call.number - 1,
                          call.number);
}

// What travels beside a token, a lane each k.
template <WarpLike W>
struct Choice {
    typename W::template PerLane<int> expert;
    typename W::template PerLane<uint64_t> weight;
};

// A token's experts and weights; false: the ids are invalid.
template <WarpLike W>
EP_FN bool read_choice(W& warp, const LowLatencyDispatchArgs& args, int token, Choice<W>& choice) {
    const int topk = args.format.topk;
    typename W::template PerLane<int64_t> id;
    warp.lanes(topk, [&](int lane) {
        id[lane] = chosen_expert(args, token, lane);
        const bool named = id[lane] >= 0 && id[lane] < args.heap.num_experts;
        choice.expert[lane] = named ? static_cast<int>(id[lane]) : -1;
        const size_t weight = (static_cast<size_t>(token) * topk + lane) * args.format.weight_bytes;
        choice.weight[lane] = load_weight(args.weights + weight, args.format.weight_bytes);
    });
    const uint32_t firsts = warp.first_of(topk, choice.expert);
    return !warp.ballot(topk, [&](int lane) {
        return id[lane] < -1 || id[lane] >= args.heap.num_experts ||
               (id[lane] >= 0 && !(firsts >> lane & 1));
    });
}

// Bytes of a row of x.
template <bool kQuantize>
EP_FN size_t bytes_of_row(const RowFormat& format) {
    return static_cast<size_t>(format.payload_bytes) * (kQuantize ? sizeof(BFloat16) : 1);
}

// Into the slots of the lanes in the mask: all of a row but its tag.
template <bool kQuantize, WarpLike W>
EP_FN void write_row(W& warp, const LowLatencyDispatchArgs& args,
                     const typename W::template PerLane<char*>& slot, uint32_t mask, int token,
                     const Choice<W>& choice) {
    const RowFormat& format = args.format;
    typename W::template PerLane<void*> to;
    auto to_part = [&](size_t offset) {
        warp.lanes(format.topk, [&](int lane) {
            if (mask >> lane & 1) to[lane] = slot[lane] + offset;
        });
    };
    const size_t row = token;
    const char* x = args.x + row * bytes_of_row<kQuantize>(format);
    to_part(format.payload());
    if constexpr (kQuantize) {
        warp.quantize(to, mask, x, format.payload_bytes, format.scales() - format.payload(),
                      args.quantize);
    } else {
        warp.template multicast<Reuse::Soon>(to, mask, x, format.payload_bytes);
        if (format.scale_bytes) {
            to_part(format.scales());
            warp.template multicast<Reuse::Soon>(to, mask, args.scales + row * format.scale_bytes,
                                                 format.scale_bytes);
        }
    }
    for_each_lane(mask, [&](int lane) {
        char* out = warp.broadcast(slot, lane);
        warp.lanes(format.topk, [&](int k) {
            reinterpret_cast<int32_t*>(out + format.experts())[k] = choice.expert[k];
            store_weight(out + format.weights() + k * format.weight_bytes, choice.weight[k],
                         format.weight_bytes);
        });
    });
}

template <bool kQuantize, WarpLike W, class F>
EP_FN bool send_token(W& warp, const LowLatencyDispatch<F>& call, const Team& team, int token) {
    const LowLatencyDispatchArgs& args = call.args;
    const RowFormat& format = args.format;
    const LowLatencyHeap& heap = args.heap;
    const size_t bytes = bytes_of_row<kQuantize>(format);
    warp.template stage<Reuse::Late>(args.x + token * bytes, bytes);
    Choice<W> choice;
    if (!read_choice(warp, args, token, choice)) {
        warp.fail(Outcome::BadInput, Wait::None, Need{static_cast<uint64_t>(token), 0, args.rank});
        return false;
    }
    typename W::template PerLane<int> rank;
    typename W::template PerLane<char*> slot;
    warp.lanes(format.topk, [&](int lane) {
        args.layout.experts(token)[lane] = choice.expert[lane];
        rank[lane] = choice.expert[lane] < 0 ? -1 : choice.expert[lane] / heap.local_experts();
    });
    if (heap.masking) drop_picks(warp, call, token, rank);
    const uint32_t ranks = warp.first_of(format.topk, rank);
    const uint32_t near = warp.ballot(
        format.topk, [&](int lane) { return ranks >> lane & 1 && call.fabric.maps(rank[lane]); });
    const size_t target = heap.row(call.bank, args.rank, token);
    warp.lanes(format.topk, [&](int lane) {
        if (near >> lane & 1) slot[lane] = call.fabric.template at<char>(rank[lane], target);
    });
    write_row<kQuantize>(warp, args, slot, near, token, choice);
    warp.template publish_lanes<Scope::System>(format.topk, [&](int lane, auto&& store) {
        if (near >> lane & 1) store(reinterpret_cast<uint64_t*>(slot[lane]), call.tag);
    });
    const uint32_t far = ranks & ~near;
    if (!far) return true;
    const size_t staged = heap.staged_row(call.bank, token);
    warp.lanes(1, [&](int lane) {
        slot[lane] = call.fabric.template own<char>(staged);
        *reinterpret_cast<uint64_t*>(slot[lane]) = call.tag;
    });
    write_row<kQuantize>(warp, args, slot, 1, token, choice);
    for_each_lane(far, [&](int lane) {
        call.fabric.put_to(warp, team.warp, warp.broadcast(rank, lane), target, staged,
                           format.slot_bytes());
    });
    return true;
}

// kQuantize: whether x, bf16, becomes fp8 on the way.
template <bool kQuantize, WarpLike W, class F>
EP_FN bool low_latency_dispatch_send(W& warp, F& fabric, const LowLatencyDispatchArgs& args,
                                     const Team& team) {
    const LowLatencyDispatch<F> call = next_call(fabric, args);
    if (!may_send(warp, call, team)) return false;
    if (team.warp == 0) {
        warp.lanes(1, [&](int) { args.layout.overflow() = 0; });
        for (int first = 0; first < call.world(); first += 32) {
            warp.lanes(lanes_from(first, call.world()),
                       [&](int lane) { *args.layout.waited(first + lane) = 0; });
        }
        if (args.heap.masking) note_active(warp, call, LowLatencyHalf::Send);
    }
    for (int rank = team.warp; rank < call.world(); rank += team.warps) {
        if (call.takes_part(LowLatencyHalf::Send, rank)) send_choices(warp, call, rank);
    }
    // from the other end: the first warps have had choices to send
    for (int token = team.warps - 1 - team.warp; token < args.num_tokens; token += team.warps) {
        if (!send_token<kQuantize>(warp, call, team, token)) return false;
    }
    signal_rows(warp, call, team);
    return end_sending(warp, call, team);
}

// ---- receiving

template <class W, class F>
EP_FN Need need_choices(const LowLatencyDispatch<F>& call, int rank) {
    const size_t flag = call.heap().choice_flag(rank);
    return {acquire_flag<W>(call.fabric, call.heap().channels, rank, flag), call.number, rank};
}

template <WarpLike W, class F>
EP_FN bool wait_choices(W& warp, const LowLatencyDispatch<F>& call) {
    for (int first = 0; first < call.world(); first += 32) {
        const bool here =
            wait_counted(warp, call, Wait::Choices, lanes_from(first, call.world()),
                         [&](int lane) { return need_choices<W>(call, first + lane); });
        if (!here) return false;
    }
    return true;
}

template <WarpLike W, class F>
EP_FN bool may_receive(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    if (!call.heap().masking) return wait_choices(warp, call) && wait_rows_put(warp, call);
    return settle_ranks(warp, call, team, LowLatencyHalf::Receive, Wait::Choices, [&](int rank) {
        const Need choices = need_choices<W>(call, rank);
        return is_met(choices) ? need_rows<W>(call, rank) : choices;
    });
}

// The choices that reached this rank.
template <class F>
struct Choices {
    const LowLatencyDispatch<F>& call;
    int chunks = call.heap().chunks();
    int local_experts = call.heap().local_experts();

    EP_FN const uint32_t* of(int rank) const {
        const LowLatencyHeap& heap = call.heap();
        return call.fabric.template own<uint32_t>(call.takes_part(LowLatencyHalf::Receive, rank)
                                                      ? heap.choices(call.bank, rank)
                                                      : heap.no_choices());
    }
    EP_FN uint32_t present(int rank, int chunk) const { return of(rank)[chunk]; }
    EP_FN int count(int rank, int expert) const { return of(rank)[chunks + expert]; }
    EP_FN uint32_t tokens(int rank, int chunk, int expert) const {
        return of(rank)[chunks + (1 + chunk) * local_experts + expert];
    }
    // Rows of ranks before this one, and of its tokens before this one.
    EP_FN int rows_before(int rank, int token, int expert) const {
        int rows = 0;
        for (int other = 0; other < rank; ++other) rows += count(other, expert);
        for (int chunk = 0; chunk < token / 32; ++chunk)
            rows += popcount(tokens(rank, chunk, expert));
        return rows +
               popcount(tokens(rank, token / 32, expert) & ((uint32_t{1} << token % 32) - 1));
    }
};

// Where each expert's rows begin. Every warp finds out for itself, the first one for the handle.
template <WarpLike W, class F>
EP_FN void find_starts(W& warp, const Choices<F>& choices, const Team& team) {
    const LowLatencyDispatchArgs& args = choices.call.args;
    const LowLatencyLayout& layout = args.layout;
    int32_t* starts = layout.scratch(team.warp);
    typename W::template PerLane<int> rows, start;
    int64_t total = 0;
    for (int first = 0; first < choices.local_experts; first += 32) {
        const int lanes = lanes_from(first, choices.local_experts);
        warp.lanes(lanes, [&](int lane) {
            rows[lane] = 0;
            for (int rank = 0; rank < choices.call.world(); ++rank)
                rows[lane] += choices.count(rank, first + lane);
            start[lane] = static_cast<int>(align_up(rows[lane], args.expert_alignment));
        });
        const int sum = warp.exclusive_scan(lanes, start);
        warp.lanes(lanes, [&](int lane) {
            start[lane] = static_cast<int>(args.expert_rows ? args.expert_rows * (first + lane)
                                                            : total + start[lane]);
            starts[first + lane] = start[lane];
            if (team.warp) return;
            layout.count(first + lane) = rows[lane];
            layout.start(first + lane) = start[lane];
        });
        total += sum;
    }
    if (team.warp) return;
    warp.lanes(1, [&](int) {
        layout.start(choices.local_experts) =
            static_cast<int>(args.expert_rows ? args.expert_rows * choices.local_experts : total);
    });
    const int words = choices.call.world() * choices.chunks;
    for (int first = 0; first < words; first += 32) {
        warp.lanes(lanes_from(first, words), [&](int lane) {
            const int word = first + lane;
            layout.present(word) = choices.present(word / choices.chunks, word % choices.chunks);
        });
    }
}

// A row's scales to its places: as they came, or each word into its column.
template <WarpLike W>
EP_FN void place_scales(W& warp, const LowLatencyDispatchArgs& args, uint32_t placed,
                        const typename W::template PerLane<int>& position, const char* scales) {
    if (!args.scale_column) {
        const size_t bytes = args.format.scale_bytes;
        typename W::template PerLane<void*> row;
        warp.lanes(args.format.topk, [&](int lane) {
            if (placed >> lane & 1) row[lane] = args.recv_scales + position[lane] * bytes;
        });
        warp.template multicast<Reuse::Late>(row, placed, scales, bytes);
        return;
    }
    const auto* words = reinterpret_cast<const uint32_t*>(scales);
    for_each_lane(placed, [&](int lane) {
        auto* column = reinterpret_cast<uint32_t*>(args.recv_scales) +
                       args.scale_word(warp.broadcast(position, lane));
        for (int first = 0; first < args.scale_words(); first += 32) {
            warp.lanes(lanes_from(first, args.scale_words()), [&](int word) {
                column[(first + word) * args.scale_column] = words[first + word];
            });
        }
    });
}

// From its slot to its place at each of its experts here.
template <WarpLike W, class F>
EP_FN bool receive_token(W& warp, const Choices<F>& choices, const Team& team, int source,
                         int token) {
    const LowLatencyDispatch<F>& call = choices.call;
    const LowLatencyDispatchArgs& args = call.args;
    const RowFormat& format = args.format;
    char* slot = call.fabric.template own<char>(call.heap().row(call.bank, source, token));
    typename W::template PerLane<char*> slots;
    warp.lanes(1, [&](int lane) { slots[lane] = slot; });
    if (!wait_tags(warp, call, 1, 1, slots, [&](int) { return source; })) return false;
    warp.template stage<Reuse::Soon>(slot + format.payload(), format.payload_bytes);
    const int first_expert = args.rank * choices.local_experts;
    const int32_t* starts = args.layout.scratch(team.warp);
    typename W::template PerLane<int> position;
    typename W::template PerLane<void*> row;
    warp.lanes(format.topk, [&](int lane) {
        const int expert =
            reinterpret_cast<const int32_t*>(slot + format.experts())[lane] - first_expert;
        position[lane] = LowLatencyArgs::kElsewhere;
        if (expert >= 0 && expert < choices.local_experts) {
            const int64_t place =
                starts[expert] + static_cast<int64_t>(choices.rows_before(source, token, expert));
            position[lane] =
                place < args.max_rows ? static_cast<int>(place) : LowLatencyArgs::kOverflowed;
        }
        args.layout.positions(source, token)[lane] = position[lane];
        if (position[lane] < 0) return;
        const size_t place = position[lane];
        row[lane] = args.recv_x + place * format.payload_bytes;
        store_weight(
            args.recv_weights + place * format.weight_bytes,
            load_weight(slot + format.weights() + lane * format.weight_bytes, format.weight_bytes),
            format.weight_bytes);
    });
    const uint32_t placed = warp.ballot(format.topk, [&](int lane) { return position[lane] >= 0; });
    if (warp.ballot(format.topk,
                    [&](int lane) { return position[lane] == LowLatencyArgs::kOverflowed; })) {
        warp.lanes(1, [&](int) { args.layout.overflow() = 1; });
    }
    warp.template multicast<Reuse::Late>(row, placed, slot + format.payload(),
                                         format.payload_bytes);
    if (format.scale_bytes) place_scales(warp, args, placed, position, slot + format.scales());
    return true;
}

// By the last warp: the tokens that came from each rank, to what the caller counts.
template <WarpLike W>
EP_FN void count_rows(W& warp, const LowLatencyDispatchArgs& args) {
    const int world = args.heap.topology.world(), chunks = args.heap.chunks();
    for (int first = 0; args.recv_rows && first < world; first += 32) {
        warp.lanes(lanes_from(first, world), [&](int lane) {
            for (int chunk = 0; chunk < chunks; ++chunk)
                args.recv_rows[first + lane] +=
                    popcount(args.layout.present((first + lane) * chunks + chunk));
        });
    }
}

template <WarpLike W, class F>
EP_FN bool low_latency_dispatch_receive(W& warp, F& fabric, const LowLatencyDispatchArgs& args,
                                        const Team& team) {
    const LowLatencyDispatch<F> call = begun_call(fabric, args);
    if (!may_receive(warp, call, team)) return false;
    if (args.heap.masking && team.warp == 0) note_active(warp, call, LowLatencyHalf::Receive);
    const Choices<F> choices{call};
    find_starts(warp, choices, team);
    const auto bits = [&](int word) {
        return choices.present(word / choices.chunks, word % choices.chunks);
    };
    const bool all = for_own_rows(warp, args, team, bits, [&](int source, int token) {
        return receive_token(warp, choices, team, source, token);
    });
    if (!all || !end_receiving(warp, call, team)) return false;
    count_rows(warp, args);
    return true;
}

}  // namespace ep

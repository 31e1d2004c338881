#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// The sending half of a low-latency dispatch: for every rank one warp sends which tokens chose
// which of its experts, as bits, and every token goes to the slot of its own number at each rank
// that wants it.

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
    const uint32_t copies = heap.masking ? far : far & (~far + 1);
    warp.lanes(format.topk, [&](int lane) {
        if (!(copies >> lane & 1)) return;
        slot[lane] = call.fabric.template own<char>(heap.staged_row(call.bank, rank[lane], token));
        *reinterpret_cast<uint64_t*>(slot[lane]) = call.tag;
    });
    write_row<kQuantize>(warp, args, slot, copies, token, choice);
    for_each_lane(far, [&](int lane) {
        const int to = warp.broadcast(rank, lane);
        call.fabric.put_to(warp, team.warp, to, target, heap.staged_row(call.bank, to, token),
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

}  // namespace ep

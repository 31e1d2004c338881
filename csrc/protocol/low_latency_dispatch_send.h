#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// The sending half of a low-latency dispatch. Every rank is sent which tokens chose which of its
// experts, as bits, and every token goes to the slot of its own index at each rank that needs it.

EP_FN int64_t chosen_expert(const LowLatencyDispatchArgs& args, int token, int k) {
    const size_t i = static_cast<size_t>(token) * args.format.topk + k;
    return args.index_bytes == 8 ? static_cast<const int64_t*>(args.topk_idx)[i]
                                 : static_cast<const int32_t*>(args.topk_idx)[i];
}

EP_FN int tokens_of_chunk(const LowLatencyDispatchArgs& args, int chunk) {
    const int left = args.num_tokens - 32 * chunk;
    return left < 0 ? 0 : left < 32 ? left : 32;
}

// Calls take(i, load(i)) for i < count, with several loads in flight at once.
template <class Load, class Take>
EP_FN void for_each_load(int count, Load&& load, Take&& take) {
    constexpr int kAtOnce = 8;
    using Loaded = decltype(load(0));
    for (int first = 0; first < count; first += kAtOnce) {
        Loaded loaded[kAtOnce];
        for (int i = 0; i < kAtOnce; ++i)
            loaded[i] = first + i < count ? load(first + i) : Loaded{};
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i < count) take(first + i, loaded[i]);
        }
    }
}

// Calls f(k, expert) for each choice of a token. It reads the low half of an id: the warp that
// sends the token's row rejects an id that needs more.
template <class F>
EP_FN void for_each_choice(const LowLatencyDispatchArgs& args, int token, F&& f) {
    const int topk = args.format.topk, bytes = args.index_bytes;
    const char* ids =
        static_cast<const char*>(args.topk_idx) + static_cast<size_t>(token) * topk * bytes;
    for_each_load(
        topk, [&](int k) { return *reinterpret_cast<const int32_t*>(ids + k * bytes); }, f);
}

// Writes which tokens chose any expert of a rank, and all their choices. Returns how many they are.
template <WarpLike W>
EP_FN int write_tokens(W& warp, const LowLatencyDispatchArgs& args, int rank, char* choices) {
    const int chunks = args.heap.chunks(), local_experts = args.heap.local_experts();
    const int topk = args.format.topk;
    auto* experts = reinterpret_cast<int32_t*>(choices + args.heap.chosen_experts());
    PerLane<W, uint32_t> present;  // a lane a chunk
    PerLane<W, int> is_here;
    warp.lanes(chunks, [&](int lane) { present[lane] = 0; });
    int count = 0;
    for (int chunk = 0; 32 * chunk < args.num_tokens; ++chunk) {
        const int tokens = tokens_of_chunk(args, chunk);
        warp.lanes(tokens, [&](int lane) {
            is_here[lane] = 0;
            for_each_choice(args, 32 * chunk + lane, [&](int, int32_t expert) {
                is_here[lane] |= is_within(expert, rank * local_experts, local_experts);
            });
        });
        const uint32_t any = warp.ballot(tokens, [&](int lane) { return is_here[lane] != 0; });
        warp.lanes(tokens, [&](int lane) {
            if (!(any >> lane & 1)) return;
            int32_t* own = experts + static_cast<size_t>(count + lanes_below(any, lane)) * topk;
            for_each_choice(args, 32 * chunk + lane,
                            [&](int k, int32_t expert) { own[k] = expert; });
        });
        warp.lanes(chunks, [&](int lane) {
            if (lane == chunk) present[lane] = any;
        });
        count += popcount(any);
    }
    auto* words = reinterpret_cast<uint32_t*>(choices);
    warp.lanes(chunks, [&](int lane) { words[lane] = present[lane]; });
    return count;
}

// Writes which tokens chose which of a rank's experts that belong to a part.
template <WarpLike W>
EP_FN void write_bits(W& warp, const LowLatencyDispatchArgs& args, int rank, int part,
                      char* choices) {
    const int count = args.heap.experts_of_part(part);
    const int first = rank * args.heap.local_experts() + 32 * (part - 1);
    auto* words = reinterpret_cast<uint32_t*>(choices + args.heap.choice_part(part));
    PerLane<W, uint32_t> chosen, tokens;
    PerLane<W, int> rows;
    warp.lanes(count, [&](int lane) { rows[lane] = 0; });
    for (int chunk = 0; chunk < args.heap.chunks(); ++chunk) {
        const int left = tokens_of_chunk(args, chunk);
        warp.lanes(32, [&](int lane) {
            chosen[lane] = tokens[lane] = 0;
            if (lane >= left) return;
            for_each_choice(args, 32 * chunk + lane, [&](int, int32_t expert) {
                if (is_within(expert, first, count))
                    chosen[lane] |= uint32_t{1} << (expert - first);
            });
        });
        for (int expert = 0; left && expert < count; ++expert) {
            const uint32_t chose =
                warp.ballot(left, [&](int lane) { return chosen[lane] >> expert & 1; });
            warp.lanes(count, [&](int lane) {
                if (lane == expert) tokens[lane] = chose;
            });
        }
        warp.lanes(count, [&](int lane) {
            words[count * (1 + chunk) + lane] = tokens[lane];
            rows[lane] += popcount(tokens[lane]);
        });
    }
    warp.lanes(count, [&](int lane) { words[lane] = rows[lane]; });
}

// Sends a rank a part of what this rank's tokens chose there, see LowLatencyHeap; unmapped: all.
template <WarpLike W, class F>
EP_FN void send_choices(W& warp, const LowLatencyDispatch<F>& call, int rank, int part) {
    const LowLatencyHeap& heap = call.heap();
    const size_t target = heap.choices(call.bank, call.args.rank);
    const size_t flag = heap.choice_flag(call.args.rank, part);
    uint64_t from = call.number - 1, to = call.number;
    if (call.fabric.maps(rank)) {
        char* choices = call.fabric.template at<char>(rank, target);
        part ? write_bits(warp, call.args, rank, part, choices)
             : static_cast<void>(write_tokens(warp, call.args, rank, choices));
    } else {
        if (part) return;
        from = ChoiceFlag::of(from, released_last(call)).value;
        to = ChoiceFlag::of(to, releases_last(call)).value;
        const size_t staged = heap.staged_choices(call.bank, rank);
        char* choices = call.fabric.template network<char>(staged);
        for (int other = 1; other < heap.choice_parts(); ++other)
            write_bits(warp, call.args, rank, other, choices);
        const int tokens = write_tokens(warp, call.args, rank, choices);
        warp.lanes(1, [&](int) {
            *call.fabric.template own<uint32_t>(heap.tokens_sent(call.bank, rank)) = tokens;
        });
        call.fabric.put_to(
            warp, heap.channels, rank, target, staged,
            heap.chosen_experts() + sizeof(int32_t) * tokens * call.args.format.topk);
    }
    call.fabric.signal_to(warp, heap.channels, rank, flag, from, to);
}

// What travels with a token: lane k has its k-th choice.
template <WarpLike W>
struct Choice {
    PerLane<W, int> expert;
    PerLane<W, uint64_t> weight;
};

// Reads a token's experts and weights. Returns false if the ids are invalid.
template <WarpLike W>
EP_FN bool read_choice(W& warp, const LowLatencyDispatchArgs& args, int token, Choice<W>& choice) {
    const int topk = args.format.topk;
    PerLane<W, int64_t> id;
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

// Bytes of x that become `bytes` of a row.
template <bool kQuantize>
EP_FN size_t bytes_of_x(size_t bytes) {
    return bytes * (kQuantize ? sizeof(BFloat16) : 1);
}

// Where a piece begins in x.
template <bool kQuantize>
EP_FN const char* piece_of_x(const LowLatencyDispatchArgs& args, int token, const Piece& piece) {
    const size_t first = static_cast<size_t>(token) * args.format.payload_bytes + piece.first;
    return args.x + bytes_of_x<kQuantize>(first);
}

// Writes a piece of a row, without its tag, into the slots of the lanes in the mask.
template <bool kQuantize, WarpLike W>
EP_FN void write_piece(W& warp, const LowLatencyDispatchArgs& args, const PerLane<W, char*>& slot,
                       uint32_t mask, int token, const Piece& piece, const Choice<W>& choice) {
    const RowFormat& format = args.format;
    PerLane<W, void*> to{};
    auto to_part = [&](size_t offset) {
        warp.lanes(format.topk, [&](int lane) {
            if (mask >> lane & 1) to[lane] = slot[lane] + offset;
        });
    };
    const char* x = piece_of_x<kQuantize>(args, token, piece);
    const size_t payload = format.payload() + piece.first;
    const size_t scales = format.scales() + piece.first_scale;
    to_part(payload);
    if constexpr (kQuantize) {
        warp.quantize(to, mask, x, piece.bytes, scales - payload, args.quantize);
    } else {
        warp.template multicast<CacheHint::Keep>(to, mask, x, piece.bytes);
        if (piece.scale_bytes) {
            const size_t row = token;
            to_part(scales);
            warp.template multicast<CacheHint::Keep>(
                to, mask, args.scales + row * format.scale_bytes + piece.first_scale,
                piece.scale_bytes);
        }
    }
    if (piece.number || !format.weight_bytes) return;
    for_each_lane(mask, [&](int lane) {
        char* out = warp.broadcast(slot, lane);
        warp.lanes(format.topk, [&](int k) {
            store_weight(out + format.weights() + k * format.weight_bytes, choice.weight[k],
                         format.weight_bytes);
        });
    });
}

// Puts a whole row to the ranks of the lanes in the mask.
template <bool kQuantize, WarpLike W, class F>
EP_FN void put_row(W& warp, const LowLatencyDispatch<F>& call, const Team& team, uint32_t mask,
                   int token, const PerLane<W, int>& rank, const Choice<W>& choice) {
    const RowFormat& format = call.args.format;
    const LowLatencyHeap& heap = call.heap();
    const Pieces pieces(format);
    const uint32_t copies = call.masking() ? mask : mask & (~mask + 1);
    PerLane<W, char*> slot;
    warp.lanes(format.topk, [&](int lane) {
        if (!(copies >> lane & 1)) return;
        slot[lane] =
            call.fabric.template network<char>(heap.staged_row(call.bank, rank[lane], token));
        for (int piece = 0; piece < pieces.count; ++piece)
            *reinterpret_cast<uint64_t*>(slot[lane] + Piece::tag(piece)) = call.tag;
    });
    write_piece<kQuantize>(warp, call.args, slot, copies, token, pieces.all(), choice);
    PerLane<W, size_t> staged;
    warp.lanes(format.topk, [&](int lane) {
        if (mask >> lane & 1) staged[lane] = heap.staged_row(call.bank, rank[lane], token);
    });
    call.fabric.put_each(
        warp, mask, rank, [&](int to) { return channel_of(call, team, to); },
        heap.row(call.bank, call.args.rank, token), staged, format.slot_bytes());
}

// Reads what a token chose and the rank of each choice, one per lane; -1: none. for_handle: also
// stores the choices. Invalid ids fail the call, and it returns false.
template <WarpLike W>
EP_FN bool find_ranks(W& warp, const LowLatencyDispatchArgs& args, int token, bool for_handle,
                      Choice<W>& choice, PerLane<W, int>& rank) {
    if (!read_choice(warp, args, token, choice)) {
        warp.fail(Outcome::BadInput, Wait::None,
                  WaitCondition{static_cast<uint64_t>(token), 0, args.rank});
        return false;
    }
    const int local_experts = args.heap.local_experts();
    warp.lanes(args.format.topk, [&](int lane) {
        if (for_handle) args.layout.experts(token)[lane] = choice.expert[lane];
        rank[lane] = choice.expert[lane] < 0 ? -1 : choice.expert[lane] / local_experts;
    });
    return true;
}

template <bool kQuantize, WarpLike W, class F>
EP_FN bool send_piece(W& warp, const LowLatencyDispatch<F>& call, const Team& team, int token,
                      const Piece& piece) {
    const LowLatencyDispatchArgs& args = call.args;
    const RowFormat& format = args.format;
    const LowLatencyHeap& heap = args.heap;
    warp.template stage<CacheHint::EvictFirst>(piece_of_x<kQuantize>(args, token, piece),
                                               bytes_of_x<kQuantize>(piece.bytes));
    Choice<W> choice;
    PerLane<W, int> rank;
    PerLane<W, char*> slot;
    if (!find_ranks(warp, args, token, piece.number == 0, choice, rank)) return false;
    if (call.masking()) drop_choices(warp, call, token, piece, rank);
    const uint32_t ranks = warp.first_of(format.topk, rank);
    const uint32_t near = warp.ballot(
        format.topk, [&](int lane) { return ranks >> lane & 1 && call.fabric.maps(rank[lane]); });
    const size_t target = heap.row(call.bank, args.rank, token);
    warp.lanes(format.topk, [&](int lane) {
        if (near >> lane & 1) slot[lane] = call.fabric.template at<char>(rank[lane], target);
    });
    write_piece<kQuantize>(warp, args, slot, near, token, piece, choice);
    publish_tags(warp, call, piece, near, [&](int k) {
        const int to = static_cast<int>(chosen_expert(args, token, k)) / heap.local_experts();
        return call.fabric.template at<char>(to, target);
    });
    const uint32_t far = ranks & ~near;
    if (!F::kMapsAll && far && !piece.number)
        put_row<kQuantize>(warp, call, team, far, token, rank, choice);
    return true;
}

// Sends a warp's share of all choices, dealt from the middle warp on.
template <WarpLike W, class F>
EP_FN void send_all_choices(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    const int parts = call.heap().choice_parts(), first = team.warps - team.warps / 2;
    for (int i = (team.warp + first) % team.warps; i < call.world() * parts; i += team.warps) {
        if (call.takes_part(LowLatencyHalf::Send, i / parts))
            send_choices(warp, call, i / parts, i % parts);
    }
}

// Sends a warp's share of all tokens, dealt from the last warp down: in small batches the first
// warps receive. kQuantize: whether x is bf16 that becomes fp8.
template <bool kQuantize, WarpLike W, class F>
EP_FN bool send_tokens(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    const int tokens = call.args.num_tokens;
    const Pieces pieces(call.args.format, tokens, team.warps);
    const int shares = pieces.shares();
    for (int i = team.warps - 1 - team.warp; i < tokens * shares; i += team.warps) {
        if (!send_piece<kQuantize>(warp, call, team, i / shares, pieces[i % shares])) return false;
    }
    return true;
}

// Sends a warp's share, without lines.
template <bool kQuantize, WarpLike W, class F>
EP_FN bool send_by_slots(W& warp, const LowLatencyDispatch<F>& call, const Team& team) {
    send_all_choices(warp, call, team);
    return send_tokens<kQuantize>(warp, call, team);
}

}  // namespace ep

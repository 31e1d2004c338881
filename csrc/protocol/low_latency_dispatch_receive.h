#pragma once

#include "protocol/low_latency_mask.h"

namespace ep {

// The receiving half of a low-latency dispatch: the bits of all ranks give every row its place, in
// the order of (expert, source rank, token). A row is read from its slot as soon as its tag is
// there.

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
            const int64_t before = choices.rows_before(source, token, expert);
            const int64_t place = starts[expert] + before;
            const bool fits = args.expert_rows ? before < args.expert_rows : place < args.max_rows;
            position[lane] = fits ? static_cast<int>(place) : LowLatencyArgs::kOverflowed;
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

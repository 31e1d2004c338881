#pragma once

#include "core/low_latency_args.h"
#include "exec/warp.h"
#include "fabric/fabric.h"
#include "protocol/weights.h"

namespace ep {

// The low-latency mode: a token goes straight to each rank that needs it, in one hop. A call has a
// sending and a receiving half, launched separately or as one; then a warp receives once it has
// sent its share. No warp waits for another warp of its own rank and call.
//
// A sender writes into memory that its reader has released, and waits for nothing else. A receiver
// waits for the numbers and tags of its call. Two calls of a kind may be in flight, one per bank;
// their receiving halves may come in any order. There is no deadlock if all ranks send in the same
// order and receive a call before they send the second one after it: number the sending halves in
// that order and give a receiving half its call's number. A half then waits only for halves with
// smaller numbers, or for sending halves with its own.

// A warp's index among the warps that share a half.
struct Team {
    int warp;
    int warps;
};

EP_HD constexpr Role role_of(LowLatencyKind kind, LowLatencyHalf half) {
    const bool sends = half == LowLatencyHalf::Send;
    if (kind == LowLatencyKind::Dispatch)
        return sends ? Role::LowLatencySender : Role::LowLatencyReceiver;
    return sends ? Role::LowLatencyCombineSender : Role::LowLatencyCombineReceiver;
}

// How a warp's share of a launch ended.
enum class Ended { Failed, Well, Last };  // Last: well, after all others

// A fabric for calls that never mask: their kernels contain no code for masking.
template <class F>
struct NeverMasking : F {
    using F::F;
};
template <class F>
constexpr bool kMayMask = true;
template <class F>
constexpr bool kMayMask<NeverMasking<F>> = false;

// One call as one rank sees it.
template <class F, class Args>
struct LowLatencyCall {
    F& fabric;
    const Args& args;
    uint64_t number;
    int bank = static_cast<int>(number % LowLatencyHeap::kBanks);
    uint64_t tag = tag_of(args, number);

    static constexpr LowLatencyKind kKind = Args::kKind;
    static constexpr int kShapeBits = LineTag::kShapeBits;

    // A row's tag: the call's number, and what both ends must agree on for the row to make sense.
    static EP_FN uint64_t tag_of(const Args& args, uint64_t number) {
        uint64_t shape = args.shape();
        auto add = [&](uint64_t value) {
            shape = (shape ^ value) * 0x9e3779b97f4a7c15;
            shape ^= shape >> 32;
        };
        add(static_cast<uint64_t>(args.format.payload_bytes) << 32 |
            static_cast<uint32_t>(args.format.payload_type));
        add(static_cast<uint64_t>(args.format.scale_bytes) << 32 | args.format.weight_bytes << 16 |
            args.format.topk);
        if (args.layout_call) add(*args.layout_call << 32 | args.resets_since_made);
        return number << kShapeBits | shape >> (64 - kShapeBits);
    }

    // Number of the call before this one in its bank; 0: none.
    EP_FN uint64_t previous() const {
        return number > LowLatencyHeap::kBanks ? number - LowLatencyHeap::kBanks : 0;
    }
    EP_FN const LowLatencyHeap& heap() const { return args.heap; }
    EP_FN int world() const { return args.heap.topology.world(); }
    EP_FN bool masking() const { return kMayMask<F> && heap().masking; }
    // A word of this rank's heap.
    EP_FN uint64_t* word(size_t offset) const { return fabric.template own<uint64_t>(offset); }
    // The word that says whether `rank` takes part in this half (see low_latency_mask.h).
    // takes_part reads it once it is decided.
    EP_FN uint64_t* membership(LowLatencyHalf half, int rank) const {
        return word(heap().membership(half, kKind, bank, rank));
    }
    EP_FN uint64_t* waited(int rank) const { return word(heap().waited(kKind, bank, rank)); }
    EP_FN bool takes_part(LowLatencyHalf half, int rank) const {
        return !masking() || load_decided(membership(half, rank)) & 1;
    }
};

template <class F>
using LowLatencyDispatch = LowLatencyCall<F, LowLatencyDispatchArgs>;
template <class F>
using LowLatencyCombine = LowLatencyCall<F, LowLatencyCombineArgs>;

// The call that a sending half begins.
template <class F, class Args>
EP_FN LowLatencyCall<F, Args> next_call(F& fabric, const Args& args) {
    return {fabric, args, *fabric.template own<uint64_t>(args.heap.sent(Args::kKind)) + 1};
}

// The call that a receiving half ends.
template <class F, class Args>
EP_FN LowLatencyCall<F, Args> begun_call(F& fabric, const Args& args) {
    return {fabric, args, *args.call};
}

// Same as wait_all. If waits are measured, also records how long this one waited for each rank.
template <WarpLike W, class F, class Args, class ConditionOf>
EP_FN bool wait_counted(W& warp, const LowLatencyCall<F, Args>& call, Wait wait, int count,
                        ConditionOf&& need) {
    if (call.args.recv_wait_ns) {
        uint32_t missing = warp.ballot(count, [&](int lane) { return !is_met(need(lane)); });
        while (missing) {
            const uint32_t met = warp.wait_any(
                wait, count, [&](int lane) { return missing >> lane & 1 ? need(lane) : never(); });
            if (!met) return false;
            const uint64_t lasted = warp.elapsed();
            warp.lanes(count, [&](int lane) {
                if (met >> lane & 1) W::raise(call.waited(need(lane).peer), lasted);
            });
            missing &= ~met;
        }
    }
    return warp.wait_all(wait, count, need);
}

// Adds the measured waits to the caller's recv_wait_ns. Called by a receiving half's last warp.
template <WarpLike W, class F, class Args>
EP_FN void count_waits(W& warp, const LowLatencyCall<F, Args>& call) {
    if (!call.args.recv_wait_ns) return;
    for (int first = 0; first < call.world(); first += 32) {
        warp.lanes(lanes_from(first, call.world()), [&](int lane) {
            uint64_t* waited = call.waited(first + lane);
            if (first + lane != call.args.rank) call.args.recv_wait_ns[first + lane] += *waited;
            *waited = 0;
        });
    }
}

template <class W, class F>
EP_FN uint64_t acquire_flag(F& fabric, int channel, int rank, size_t flag) {
    if (fabric.maps(rank))
        return W::template acquire<Scope::System>(fabric.template own<uint64_t>(flag));
    return fabric.template acquire_signal<W>(channel, flag);
}

// Memory of this rank that `rank` writes, by stores or by puts.
template <class T, class F>
EP_FN T* written_by(const F& fabric, int rank, size_t offset) {
    return fabric.maps(rank) ? fabric.template own<T>(offset) : fabric.template network<T>(offset);
}

// To unmapped ranks a dispatch's choices also release the dispatch before, which saves a message
// each. A dispatch that is received after those choices have left is released by a credit instead.

template <class F, class Args>
constexpr bool kChoicesRelease = Args::kKind == LowLatencyKind::Dispatch && !F::kMapsAll;

// Whether this dispatch's choices release the dispatch before.
template <class F>
EP_FN bool releases_last(const LowLatencyDispatch<F>& call) {
    const uint64_t last = call.number - 1;
    const int bank = static_cast<int>(last % LowLatencyHeap::kBanks);
    const size_t released = call.heap().released(call.kKind, bank, call.args.rank);
    return last && *call.word(released) == last;
}

// Whether the choices of the dispatch before this one did so.
template <class F>
EP_FN bool released_last(const LowLatencyDispatch<F>& call) {
    const size_t credited = call.heap().credited(call.bank);
    return call.previous() && *call.word(credited) != call.previous();
}

// Condition that `rank` has finished with what the previous call in this bank left there.
template <class W, class F, class Args>
EP_FN WaitCondition need_release(const LowLatencyCall<F, Args>& call, int rank) {
    const LowLatencyHeap& heap = call.heap();
    auto flag = [&](size_t of) { return acquire_flag<W>(call.fabric, heap.channels, rank, of); };
    if constexpr (kChoicesRelease<F, Args>) {
        if (!call.fabric.maps(rank)) {
            const uint64_t received = ChoiceFlag{flag(heap.choice_flag(rank, 0))}.received();
            if (received >= call.previous()) return {received, call.previous(), rank};
        }
    }
    return {flag(heap.released(Args::kKind, call.bank, rank)), call.previous(), rank};
}

template <WarpLike W, class F, class Args>
EP_FN bool wait_released(W& warp, const LowLatencyCall<F, Args>& call) {
    for (int first = 0; first < call.world(); first += 32) {
        const bool free =
            warp.wait_all(Wait::Release, lanes_from(first, call.world()),
                          [&](int lane) { return need_release<W>(call, first + lane); });
        if (!free) return false;
    }
    return true;
}

// Called by every warp at the end of its share of a half: whether all others have finished.
template <WarpLike W>
EP_FN bool is_last(W& warp, uint64_t* joins, const Team& team) {
    const uint64_t done = warp.template arrive<Scope::Rank>(joins) + 1;
    return quotient(done, team.warps) * team.warps == done;
}

// With masking: tells mapped ranks that this call's stores have arrived. Called by the last warp.
template <WarpLike W, class F, class Args>
EP_FN void publish_all_sent(W& warp, const LowLatencyCall<F, Args>& call) {
    const size_t flag = call.heap().all_sent_flag(Args::kKind, call.args.rank);
    for (int first = 0; first < call.world(); first += 32) {
        const int lanes = lanes_from(first, call.world());
        warp.template publish_lanes<Scope::System>(lanes, [&](int lane, auto&& store) {
            const int rank = first + lane;
            if (call.fabric.maps(rank) && call.takes_part(LowLatencyHalf::Send, rank))
                store(call.fabric.template at<uint64_t>(rank, flag), call.number);
        });
    }
}

// Credits a flag at each of up to 32 ranks from `first` on, if names(rank) holds.
template <WarpLike W, class F, class Args, class Names>
EP_FN void credit_some(W& warp, const LowLatencyCall<F, Args>& call, int first, size_t flag,
                       uint64_t from, uint64_t to, Names&& names) {
    const int lanes = lanes_from(first, call.world());
    warp.template credit_lanes<Scope::System>(lanes, [&](int lane, auto&& store) {
        if (call.fabric.maps(first + lane) && names(first + lane))
            store(call.fabric.template at<uint64_t>(first + lane, flag), to);
    });
    if constexpr (F::kMapsAll) return;
    const uint32_t far = warp.ballot(
        lanes, [&](int lane) { return !call.fabric.maps(first + lane) && names(first + lane); });
    if (far) call.fabric.credit_each(warp, first, far, call.heap().channels, flag, from, to);
}

template <WarpLike W, class F, class Args, class Names>
EP_FN void credit_ranks(W& warp, const LowLatencyCall<F, Args>& call, size_t flag, uint64_t from,
                        uint64_t to, Names&& names) {
    for (int first = 0; first < call.world(); first += 32)
        credit_some(warp, call, first, flag, from, to, names);
}

// With masking: masks ranks that did not take part in this half. Called by the last warp.
template <WarpLike W, class F, class Args>
EP_FN void note_masked(W& warp, const LowLatencyCall<F, Args>& call, LowLatencyHalf half) {
    for (int first = 0; first < call.world(); first += 32) {
        warp.lanes(lanes_from(first, call.world()), [&](int lane) {
            const int rank = first + lane;
            if (call.takes_part(half, rank)) return;
            *call.word(call.heap().masked(rank)) = 1;
            call.args.mask.active[rank] = 0;
        });
    }
}

// Counts this call as sent. Called by the last warp, when all have read the previous number.
template <WarpLike W, class F, class Args>
EP_FN void count_sent(W& warp, const LowLatencyCall<F, Args>& call) {
    warp.lanes(1, [&](int) {
        *call.word(call.heap().sent(Args::kKind)) = call.number;
        *call.args.call = call.number;
    });
}

template <WarpLike W, class F, class Args>
EP_FN Ended end_sending(W& warp, const LowLatencyCall<F, Args>& call, const Team& team) {
    W::launch_dependents();
    if (!is_last(warp, call.word(call.heap().send_joins(Args::kKind)), team)) return Ended::Well;
    if (call.masking()) {
        publish_all_sent(warp, call);
        note_masked(warp, call, LowLatencyHalf::Send);
    }
    count_sent(warp, call);
    return Ended::Last;
}

// Lets all ranks use this call's bank again.
template <WarpLike W, class F, class Args>
EP_FN void release_bank(W& warp, const LowLatencyCall<F, Args>& call) {
    const LowLatencyHeap& heap = call.heap();
    uint64_t from = call.previous();
    bool to_all = true;
    if constexpr (kChoicesRelease<F, Args>) {
        from = *call.word(heap.credited(call.bank));
        to_all = *call.word(heap.sent(Args::kKind)) > call.number;
    }
    credit_ranks(warp, call, heap.released(Args::kKind, call.bank, call.args.rank), from,
                 call.number, [&](int rank) {
                     return (to_all || call.fabric.maps(rank)) &&
                            call.takes_part(LowLatencyHalf::Receive, rank);
                 });
    if constexpr (kChoicesRelease<F, Args>) {
        if (!to_all) return;
        warp.lanes(1, [&](int) { *call.word(heap.credited(call.bank)) = call.number; });
    }
}

template <WarpLike W, class F, class Args>
EP_FN Ended end_receiving(W& warp, const LowLatencyCall<F, Args>& call, const Team& team) {
    W::launch_dependents();
    if (!is_last(warp, call.word(call.heap().receive_joins(Args::kKind)), team)) return Ended::Well;
    count_waits(warp, call);
    release_bank(warp, call);
    if (call.masking()) note_masked(warp, call, LowLatencyHalf::Receive);
    return Ended::Last;
}

// Rows to unmapped ranks. If a fabric orders the puts of all warps on a channel (kOrdersWarps), all
// rows to a rank go over one channel, and one flag follows them. Otherwise each block has its own
// channel and its own flag at every rank.

template <class F>
EP_FN int row_flags(const LowLatencyHeap& heap) {
    return F::kOrdersWarps ? 1 : heap.channels;
}

// Channel of the rows between this rank and `rank`, in both directions. number: index of the flag.
template <class F, class Args>
EP_FN int row_channel(const LowLatencyCall<F, Args>& call, int number, int rank) {
    const int channels = call.heap().channels;
    return F::kOrdersWarps ? NetworkFlags::channel_of_pair(call.args.rank, rank, channels) : number;
}

// Channel over which a warp puts rows to a rank.
template <class F, class Args>
EP_FN int channel_of(const LowLatencyCall<F, Args>& call, const Team& team, int rank) {
    return row_channel(call, team.warp % call.heap().channels, rank);
}

// Whether this call puts rows to a rank that is not mapped. Called by the last of all warps.
template <class F>
EP_FN bool puts_rows(const LowLatencyDispatch<F>& call, int rank) {
    return *call.fabric.template own<uint32_t>(call.heap().tokens_sent(call.bank, rank)) > 0;
}
template <class F>
EP_FN bool puts_rows(const LowLatencyCombine<F>& call, int rank) {
    uint32_t any = 0;
    for (int chunk = 0; chunk < call.heap().chunks(); ++chunk)
        any |= call.args.layout.present(rank * call.heap().chunks() + chunk);
    return any != 0;
}

// Signals unmapped ranks that the rows behind a flag have been put. Called by every warp after its
// puts; the last one of a flag signals. A rank that expects no rows does not wait, and gets the
// flag with a later call; with masking all ranks get it.
template <WarpLike W, class F, class Args>
EP_FN void signal_rows(W& warp, const LowLatencyCall<F, Args>& call, const Team& team) {
    const LowLatencyHeap& heap = call.heap();
    if (F::kMapsAll || !heap.staged) return;
    const int flags = row_flags<F>(heap), own = team.warp % flags;
    const Team sharing{team.warp / flags, (team.warps - own + flags - 1) / flags};
    uint64_t* joins = call.word(heap.put_joins(Args::kKind, own));
    if (!is_last(warp, joins, sharing)) return;
    auto is_signalled = [&](int rank) {
        if (call.fabric.maps(rank) || !call.takes_part(LowLatencyHalf::Send, rank)) return false;
        return flags > 1 || call.masking() || puts_rows(call, rank);
    };
    for (int first = 0; first < call.world(); first += 32) {
        const int lanes = lanes_from(first, call.world());
        const uint32_t signalled_ranks =
            warp.ballot(lanes, [&](int lane) { return is_signalled(first + lane); });
        if (!signalled_ranks) continue;
        PerLane<W, uint64_t> from;
        warp.lanes(lanes, [&](int lane) {
            if (!(signalled_ranks >> lane & 1)) return;
            const size_t signalled = heap.signalled(Args::kKind, own, first + lane);
            from[lane] = *call.word(signalled);
            *call.word(signalled) = call.number;
        });
        call.fabric.signal_each(
            warp, first, signalled_ranks, [&](int rank) { return row_channel(call, own, rank); },
            heap.row_flag(Args::kKind, own, call.args.rank), from, call.number);
    }
}

template <class W, class F, class Args>
EP_FN WaitCondition need_put_rows(const LowLatencyCall<F, Args>& call, int number, int rank) {
    const size_t flag = call.heap().row_flag(Args::kKind, number, rank);
    return {acquire_flag<W>(call.fabric, row_channel(call, number, rank), rank, flag), call.number,
            rank};
}

// Waits until all rows have arrived that the ranks of the lanes in the mask put in this call.
// Called only by warps that need one of these rows.
template <WarpLike W, class F, class Args>
EP_FN bool wait_rows_put(W& warp, const LowLatencyCall<F, Args>& call, int count, uint32_t mask,
                         const PerLane<W, int>& rank) {
    if constexpr (F::kMapsAll) return true;
    const uint32_t far = warp.ballot(
        count, [&](int lane) { return mask >> lane & 1 && !call.fabric.maps(rank[lane]); });
    if (!far) return true;
    const int flags = row_flags<F>(call.heap());
    if (flags == 1) {
        return wait_counted(warp, call, Wait::PutRows, count, [&](int lane) {
            return far >> lane & 1 ? need_put_rows<W>(call, 0, rank[lane]) : nothing_to_wait_for();
        });
    }
    bool here = true;
    for_each_lane(far, [&](int lane) {
        const int source = warp.broadcast(rank, lane);
        for (int first = 0; first < flags && here; first += 32) {
            here = wait_counted(warp, call, Wait::PutRows, lanes_from(first, flags), [&](int one) {
                return need_put_rows<W>(call, first + one, source);
            });
        }
    });
    return here;
}

// Publishes after a warp's stores that slot_of(k) holds this piece of rows, for each k in the mask.
// All tags are stored at once, because each store of a flag waits for the stores before it.
template <WarpLike W, class F, class Args, class SlotOf>
EP_FN void publish_tags(W& warp, const LowLatencyCall<F, Args>& call, const Piece& piece,
                        uint32_t mask, SlotOf&& slot_of) {
    const int topk = call.args.format.topk, at_once = 32 / topk;
    for (int done = 0; done < piece.count; done += at_once) {
        const int tags = lanes_from(done, piece.count, at_once);
        warp.template publish_lanes<Scope::System>(topk * tags, [&](int lane, auto&& store) {
            if (!(mask >> lane % topk & 1)) return;
            const size_t tag = Piece::tag(piece.number + done + lane / topk);
            store(reinterpret_cast<uint64_t*>(slot_of(lane % topk) + tag), call.tag);
        });
    }
}

// Waits for a piece of this call's rows, from rank_of(lane), in the slots of the lanes in the mask.
template <WarpLike W, class F, class Args, class RankOf>
EP_FN bool wait_tags(W& warp, const LowLatencyCall<F, Args>& call, int count, uint32_t mask,
                     const PerLane<W, char*>& slot, int piece, RankOf&& rank_of) {
    constexpr int kShapeBits = LowLatencyCall<F, Args>::kShapeBits;
    PerLane<W, uint64_t> tag;
    const bool here = wait_counted(warp, call, Wait::TaggedRow, count, [&](int lane) {
        if (!(mask >> lane & 1)) return nothing_to_wait_for();
        auto* flag = reinterpret_cast<uint64_t*>(slot[lane] + Piece::tag(piece));
        tag[lane] = W::template acquire<Scope::System>(flag);
        return WaitCondition{tag[lane] >> kShapeBits, call.number, rank_of(lane)};
    });
    if (!here) return false;
    const uint32_t mismatches =
        warp.ballot(count, [&](int lane) { return mask >> lane & 1 && tag[lane] != call.tag; });
    if (!mismatches) return true;
    PerLane<W, int> rank;
    warp.lanes(count, [&](int lane) { rank[lane] = mask >> lane & 1 ? rank_of(lane) : -1; });
    const int lane = lowest_lane(mismatches);
    warp.fail(Outcome::Mismatch, Wait::None,
              WaitCondition{warp.broadcast(tag, lane), call.tag, warp.broadcast(rank, lane)});
    return false;
}

// Calls f(rank, token, share) for every warps-th share of the rows whose bits are set, from the
// warp's index on, until it returns false: warps get equal shares, whatever the choices.
// read_bits(lanes, rank, token, bits) reads for each lane the bits of 32 tokens of a rank from
// `token` on; false: it failed. Shares: how rows are cut. Begins with first_rank.
template <class Shares, WarpLike W, class ReadBits, class F>
EP_FN bool for_own_shares(W& warp, const LowLatencyArgs& args, const Team& team, int first_rank,
                          ReadBits&& read_bits, F&& f) {
    const int chunks = args.heap.chunks(), world = args.heap.topology.world();
    const int words = world * chunks;  // one lane each
    PerLane<W, uint32_t> rows;
    PerLane<W, int> before, rank, token;
    bool go_on = true;
    auto read = [&](int first) {
        const int lanes = lanes_from(first, words);
        warp.lanes(lanes, [&](int lane) {
            rank[lane] = (first_rank + (first + lane) / chunks) % world;
            token[lane] = 32 * ((first + lane) % chunks);
        });
        go_on = go_on && read_bits(lanes, rank, token, rows);
        if (!go_on) return 0;
        warp.lanes(lanes, [&](int lane) { before[lane] = popcount(rows[lane]); });
        return warp.exclusive_scan(lanes, before);
    };
    int all = 0;
    for (int first = 0; first < words; first += 32) all += read(first);
    const Shares pieces(args.format, all, team.warps);
    const int shares = pieces.shares();
    int total = 0;
    for (int first = 0; first < words && go_on; first += 32) {
        const int lanes = lanes_from(first, words);
        const int sum = words > 32 ? read(first) : all;
        // becomes this warp's first share of the word's rows
        warp.lanes(lanes, [&](int lane) {
            const int dealt = (total + before[lane]) * shares % team.warps;
            before[lane] = dealt <= team.warp ? team.warp - dealt : team.warp - dealt + team.warps;
        });
        const uint32_t own = warp.ballot(
            lanes, [&](int lane) { return before[lane] < popcount(rows[lane]) * shares; });
        for_each_lane(own, [&](int lane) {
            const int source = warp.broadcast(rank, lane);
            const int first_token = warp.broadcast(token, lane);
            const uint32_t mask = warp.broadcast(rows, lane);
            const int end = popcount(mask) * shares;
            for (int i = warp.broadcast(before, lane); i < end && go_on; i += team.warps)
                go_on = f(source, first_token + nth_lane(mask, i / shares), pieces[i % shares]);
        });
        total += sum;
    }
    return go_on;
}

}  // namespace ep

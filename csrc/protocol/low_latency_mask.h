#pragma once

#include "protocol/low_latency.h"

namespace ep {

// How calls go on without ranks that stay away.
//
// Before a half reads or writes rows it decides its membership: a rank takes part if all that the
// half needs from it is there, otherwise it is left out. The first warp that decides about a rank
// records the decision and the others follow it, so no warp waits for another. A rank that was left
// out once is masked for good, and is notified.
//
// If a caller asked for it, both ranks go on, each without the other. But a rank that another one
// masked for its silence ends, alone, when it learns of that. Otherwise there would be two groups
// that each take the other for dead. If two ranks wait for each other, only one is the first to
// mask the other (see is_first_to_mask).
//
// Two ranks that have not masked each other exchange what they would without masking. A masked rank
// is neither read from nor written to, and what still arrives from it goes to memory that no other
// rank writes.

// Whether this rank has masked `rank` before this half, or has been masked by it.
template <class W, class F, class Args>
EP_FN bool is_masked_since_before(const LowLatencyCall<F, Args>& call, LowLatencyHalf half,
                                  int rank) {
    if (half == LowLatencyHalf::Receive && !call.takes_part(LowLatencyHalf::Send, rank))
        return true;
    return *call.word(call.heap().masked(rank)) ||
           acquire_flag<W>(call.fabric, call.heap().channels, rank, call.heap().masked_flag(rank));
}

// Whether this rank has masked `rank`, is asked to, or has been masked by it.
template <class W, class F, class Args>
EP_FN bool is_masked(const LowLatencyCall<F, Args>& call, LowLatencyHalf half, int rank) {
    if (rank == call.args.rank) return false;
    return !call.args.mask.active[rank] || is_masked_since_before<W>(call, half, rank);
}

// Sends a heartbeat to the ranks that may wait for this one: it waits too, and is alive. That
// includes ranks that it is asked to mask from now on: they are notified only once this rank has
// waited for all others.
template <WarpLike W, class F, class Args>
EP_FN void send_heartbeat(W& warp, const LowLatencyCall<F, Args>& call, LowLatencyHalf half) {
    PerLane<W, uint64_t> before;
    warp.lanes(1, [&](int lane) {
        uint64_t* own = call.word(call.heap().own_heartbeats());
        before[lane] = *own;
        *own = before[lane] + 1;
    });
    const uint64_t heartbeats = warp.broadcast(before, 0);
    credit_ranks(warp, call, call.heap().heartbeat_flag(call.args.rank), heartbeats, heartbeats + 1,
                 [&](int rank) { return !is_masked_since_before<W>(call, half, rank); });
}

// Whether and why `rank` has masked this one.
template <class W, class F, class Args>
EP_FN MaskReason masked_by(const LowLatencyCall<F, Args>& call, int rank) {
    return static_cast<MaskReason>(
        acquire_flag<W>(call.fabric, call.heap().channels, rank, call.heap().masked_flag(rank)));
}

// The word in which one of two mapped ranks claims to be the first to mask the other.
template <class F, class Args>
EP_FN uint64_t* claim_on(const LowLatencyCall<F, Args>& call, int rank) {
    const int own = call.args.rank;
    const LowLatencyHeap& heap = call.heap();
    return own < rank ? call.word(heap.first_to_mask(rank))
                      : call.fabric.template at<uint64_t>(rank, heap.first_to_mask(own));
}

// Whether this rank masks `rank` before `rank` masks it. Called by one lane. Unmapped ranks share
// no word: if both mask each other at the same time, both are notified and both end.
template <class W, class F, class Args>
EP_FN bool is_first_to_mask(const LowLatencyCall<F, Args>& call, int rank) {
    if (!call.fabric.maps(rank)) return masked_by<W>(call, rank) != MaskReason::Silent;
    const uint64_t claim = 1 + static_cast<uint64_t>(call.args.rank);
    W::template compare_exchange<Scope::System>(claim_on(call, rank), 0, claim);
    return W::template acquire<Scope::System>(claim_on(call, rank)) == claim;
}

// Called by one lane: withdraws the claim of a rank that ends, and so must not make others end.
template <class W, class F, class Args>
EP_FN void take_claim_back(const LowLatencyCall<F, Args>& call, int rank) {
    if (!call.fabric.maps(rank)) return;
    W::template compare_exchange<Scope::System>(claim_on(call, rank),
                                                1 + static_cast<uint64_t>(call.args.rank), 0);
}

// Masks the ranks that are left out from now on, and notifies them and the host. Called by the
// first warp once the membership is decided. Returns false if this rank has been masked as silent
// and must end.
template <WarpLike W, class F, class Args>
EP_FN bool mask_ranks(W& warp, const LowLatencyCall<F, Args>& call, LowLatencyHalf half,
                      Wait wait) {
    const LowLatencyMask& mask = call.args.mask;
    auto end_by = [&](int rank) {
        warp.fail(Outcome::CutOff, wait, WaitCondition{0, 1, rank});
        return false;
    };
    // a rank that has been masked as silent masks no other
    for (int first = 0; first < call.world(); first += 32) {
        const uint32_t cut_off = warp.ballot(lanes_from(first, call.world()), [&](int lane) {
            const int rank = first + lane;
            return !call.takes_part(half, rank) && masked_by<W>(call, rank) == MaskReason::Silent;
        });
        if (cut_off) return end_by(first + lowest_lane(cut_off));
    }
    for (int first = 0; first < call.world(); first += 32) {
        const int lanes = lanes_from(first, call.world());
        const uint32_t masked = warp.ballot(lanes, [&](int lane) {
            const int rank = first + lane;
            const bool is_known =
                *call.word(call.heap().masked(rank)) ||
                (half == LowLatencyHalf::Receive && !call.takes_part(LowLatencyHalf::Send, rank));
            return !call.takes_part(half, rank) && !is_known;
        });
        if (!masked) continue;
        const uint32_t silent = warp.ballot(lanes, [&](int lane) {
            const int rank = first + lane;
            return masked >> lane & 1 && mask.active[rank] &&
                   masked_by<W>(call, rank) != MaskReason::Asked;
        });
        const uint32_t beaten = warp.ballot(lanes, [&](int lane) {
            return silent >> lane & 1 && !is_first_to_mask<W>(call, first + lane);
        });
        if (beaten) {
            warp.lanes(lanes, [&](int lane) {
                if ((silent & ~beaten) >> lane & 1) take_claim_back<W>(call, first + lane);
            });
            return end_by(first + lowest_lane(beaten));
        }
        auto notify = [&](uint32_t ranks, MaskReason why) {
            credit_some(warp, call, first, call.heap().masked_flag(call.args.rank), 0,
                        static_cast<uint64_t>(why),
                        [&](int rank) { return ranks >> (rank - first) & 1; });
        };
        notify(silent, MaskReason::Silent);
        notify(masked & ~silent, MaskReason::Asked);
        const uint64_t waited = warp.elapsed();
        warp.lanes(lanes, [&](int lane) {
            if (masked >> lane & 1) mask.shown[first + lane].waited_ns = waited;
        });
        const uint64_t state = MaskedRank::kWaited + static_cast<uint64_t>(wait);
        warp.template publish_lanes<Scope::System>(lanes, [&](int lane, auto&& store) {
            if (masked >> lane & 1)
                store(&mask.shown[first + lane].state,
                      silent >> lane & 1 ? state : MaskedRank::kAsked);
        });
    }
    return true;
}

// Waits until it is decided whether each of 32 ranks from `first` on takes part: see
// decide_membership. Returns false if the wait failed.
template <WarpLike W, class F, class Args, class ConditionOf>
EP_FN bool decide_ranks(W& warp, const LowLatencyCall<F, Args>& call, const Team& team,
                        LowLatencyHalf half, Wait wait, int first, ConditionOf&& need) {
    const LowLatencyMask& mask = call.args.mask;
    const int lanes = lanes_from(first, call.world());
    auto membership_of = [&](int rank) {
        return W::template acquire<Scope::Rank>(call.membership(half, rank));
    };
    auto is_decided = [&](int rank) { return membership_of(rank) >> 1 == call.number; };
    auto heartbeats_of = [&](int rank) {
        const size_t flag = call.heap().heartbeat_flag(rank);
        return acquire_flag<W>(call.fabric, call.heap().channels, rank, flag);
    };
    PerLane<W, uint64_t> heartbeats;
    PerLane<W, int> silent;
    warp.lanes(lanes, [&](int lane) {
        heartbeats[lane] = heartbeats_of(first + lane);
        silent[lane] = 0;
    });
    uint32_t open = warp.ballot(lanes, [](int) { return true; });
    bool has_waited = false, over = false;
    for (int slices = 0;; slices += over) {
        // Whether the lane's rank keeps this warp waiting.
        auto is_missing = [&](int lane) {
            const int rank = first + lane;
            const uint64_t before = membership_of(rank);
            if (before >> 1 == call.number) return false;
            bool takes_part = !is_masked<W>(call, half, rank);
            if (takes_part && !is_met(need(rank))) {
                const uint64_t heard = heartbeats_of(rank);
                silent[lane] = heard == heartbeats[lane] ? silent[lane] + over : 0;
                heartbeats[lane] = heard;
                const bool may_come = silent[lane] < mask.silent_slices && slices < mask.max_slices;
                if (may_come || rank == call.args.rank) return true;
                takes_part = false;
            }
            W::template compare_exchange<Scope::Rank>(call.membership(half, rank), before,
                                                      call.number << 1 | takes_part);
            return !is_decided(rank);
        };
        const uint32_t missing =
            warp.ballot(lanes, [&](int lane) { return open >> lane & 1 && is_missing(lane); });
        if (has_waited && half == LowLatencyHalf::Receive && call.args.recv_wait_ns) {
            const uint64_t lasted = warp.elapsed();
            warp.lanes(lanes, [&](int lane) {
                if ((open & ~missing) >> lane & 1) W::raise(call.waited(first + lane), lasted);
            });
        }
        if (!missing) break;
        if (slices >= mask.max_slices) {  // all others are decided
            warp.fail(Outcome::Timeout, wait, need(call.args.rank));
            return false;
        }
        open = missing;
        const Waited end = warp.wait_any_for(
            wait, lanes,
            [&](int lane) {
                const int rank = first + lane;
                if (!(open >> lane & 1)) return never();
                return is_decided(rank) || is_masked<W>(call, half, rank) ? nothing_to_wait_for()
                                                                          : need(rank);
            },
            mask.slice_ns);
        if (end == Waited::Failed) return false;
        has_waited = true;
        over = end == Waited::Over;
        if (over && team.warp == 0) send_heartbeat(warp, call, half);
    }
    // makes what each lane has acquired visible to all lanes: a ballot orders nothing
    warp.lanes(lanes, [](int) {});
    return true;
}

// Whether all required ranks take part; if not, the call fails. Called once membership is decided.
template <WarpLike W, class F, class Args>
EP_FN bool required_take_part(W& warp, const LowLatencyCall<F, Args>& call, const Team& team,
                              LowLatencyHalf half, Wait wait) {
    const int32_t* required = call.args.mask.required;
    for (int rank = 0; required && rank < call.world(); ++rank) {
        if (!required[rank] || call.takes_part(half, rank)) continue;
        if (team.warp == 0) warp.fail(Outcome::Masked, wait, WaitCondition{0, 1, rank});
        return false;
    }
    return true;
}

// Waits until it is decided whether each rank takes part. It does if need(rank) is met. It is left
// out if nothing has come from it for mask.silent_slices slices, heartbeats of waiting ranks
// included, or after mask.max_slices in any case. This rank itself is waited for until then and
// never left out: its other warps may only be late. Returns false if the wait failed, this
// rank has been masked, or a required rank does not take part.
template <WarpLike W, class F, class Args, class ConditionOf>
EP_FN bool decide_membership(W& warp, const LowLatencyCall<F, Args>& call, const Team& team,
                             LowLatencyHalf half, Wait wait, ConditionOf&& need) {
    for (int first = 0; first < call.world(); first += 32) {
        if (!decide_ranks(warp, call, team, half, wait, first, need)) return false;
    }
    if (team.warp == 0 && !mask_ranks(warp, call, half, wait)) return false;
    return required_take_part(warp, call, team, half, wait);
}

// ---- used by both kinds of call

template <WarpLike W, class F, class Args>
EP_FN bool may_send(W& warp, const LowLatencyCall<F, Args>& call, const Team& team) {
    if (!call.masking()) return wait_released(warp, call);
    return decide_membership(warp, call, team, LowLatencyHalf::Send, Wait::Release,
                             [&](int rank) { return need_release<W>(call, rank); });
}

// Condition that all rows of a rank have arrived.
template <class W, class F, class Args>
EP_FN WaitCondition need_rows(const LowLatencyCall<F, Args>& call, int rank) {
    if (call.fabric.maps(rank)) {
        const size_t flag = call.heap().all_sent_flag(Args::kKind, rank);
        return {acquire_flag<W>(call.fabric, 0, rank, flag), call.number, rank};
    }
    WaitCondition need = nothing_to_wait_for();
    for (int flag = 0; flag < row_flags<F>(call.heap()) && is_met(need); ++flag)
        need = need_put_rows<W>(call, flag, rank);
    return need;
}

// Counts choices that a half leaves out.
template <WarpLike W, class F, class Args>
EP_FN void count_dropped(W& warp, const LowLatencyCall<F, Args>& call, uint32_t choices) {
    if (choices)
        warp.template arrive<Scope::Rank>(call.args.mask.dropped + static_cast<int>(Args::kKind),
                                          popcount(choices));
}

// Drops a dispatch's choices of ranks that do not take part, and records them as not sent. rank:
// each choice's; -1: none.
template <WarpLike W, class F, class Args>
EP_FN void drop_choices(W& warp, const LowLatencyCall<F, Args>& call, int token, const Piece& piece,
                        PerLane<W, int>& rank) {
    const uint32_t dropped = warp.ballot(call.args.format.topk, [&](int lane) {
        return rank[lane] >= 0 && !call.takes_part(LowLatencyHalf::Send, rank[lane]);
    });
    warp.lanes(call.args.format.topk, [&](int lane) {
        if (!(dropped >> lane & 1)) return;
        rank[lane] = -1;
        if (piece.number) return;
        int32_t& expert = call.args.layout.experts(token)[lane];
        expert = LowLatencyArgs::kDropped - expert;
    });
    if (!piece.number) count_dropped(warp, call, dropped);
}

// Stores for the handle which ranks took part in both halves of the dispatch.
template <WarpLike W, class F, class Args>
EP_FN void note_active(W& warp, const LowLatencyCall<F, Args>& call) {
    for (int first = 0; first < call.world(); first += 32) {
        warp.lanes(lanes_from(first, call.world()), [&](int lane) {
            const int rank = first + lane;
            call.args.layout.active(rank) = call.takes_part(LowLatencyHalf::Send, rank) &&
                                            call.takes_part(LowLatencyHalf::Receive, rank);
        });
    }
}

// Whether the layout that a call uses, if any, is that of a dispatch that has not failed: after a
// reset of the buffer its handle may still be used. The first warp fails the call otherwise.
template <WarpLike W, class F, class Args>
EP_FN bool has_layout(W& warp, const LowLatencyCall<F, Args>& call, const Team& team) {
    if (!call.args.layout_call || *call.args.layout_call != Args::kGivenUp) return true;
    if (team.warp == 0) warp.fail(Outcome::NoLayout, Wait::None, WaitCondition{});
    return false;
}

// Runs a launch's halves of a call. In a launch of both each warp sends its share, then receives
// its share. With few rows most warps have none to send and are ready when the first ones come;
// with many all warps send. What the warps on the GPU send arrives, whatever they wait for
// afterwards.
//
// send() and receive(): a warp's share; false: it ended badly.
//
// Halves of one launch end together, but with masking other ranks wait for all that this one sends.
// A rank that the sending half left out is left out of the receiving half, too.
template <LowLatencyLaunches kLaunches, WarpLike W, class F, class Args, class Send, class Receive>
EP_FN Ended run_halves(W& warp, const LowLatencyCall<F, Args>& call, const Team& team, Send&& send,
                       Receive&& receive) {
    if (!has_layout(warp, call, team)) return Ended::Failed;
    if constexpr (sends(kLaunches)) {
        if (!may_send(warp, call, team)) return Ended::Failed;
        if (!send()) return Ended::Failed;
        signal_rows(warp, call, team);
        if constexpr (!receives(kLaunches)) return end_sending(warp, call, team);
        const size_t joins = call.heap().send_joins(Args::kKind);
        if (call.masking() && is_last(warp, call.word(joins), team)) publish_all_sent(warp, call);
        warp.begin_half(role_of(Args::kKind, LowLatencyHalf::Receive));
    }
    if constexpr (receives(kLaunches)) {
        if (!receive()) return Ended::Failed;
        const Ended ended = end_receiving(warp, call, team);
        if (sends(kLaunches) && ended == Ended::Last) count_sent(warp, call);
        return ended;
    }
}

}  // namespace ep

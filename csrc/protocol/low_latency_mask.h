#pragma once

#include "protocol/low_latency.h"

namespace ep {

// Calls that go on without ranks that stay away.
//
// Before a half does anything it has a verdict on every rank: it takes part, because all that the
// half needs of it is there, or it is left out. The first warp to have one writes it down and all
// others follow, so none waits for another. A rank that was left out once is so for good: the link
// to it is cut, and this one tells it so.
//
// Where a caller asked for that both go on, each without the other. But a rank that another has
// taken for dead ends, alone, once it hears of that; else there were two groups that each take the
// other for dead. Of two that wait for each other one is first, see is_first_to_cut. So of two
// ranks of which one has taken the other for dead only one goes on.
//
// A link that is whole carries what it carries without masking. Of one that is cut nothing is read
// or written any more, and what may still arrive goes to memory that nobody else writes.

// Whether this rank has nothing to do with that one any more, or is not meant to have.
template <class W, class F, class Args>
EP_FN bool is_cut(const LowLatencyCall<F, Args>& call, LowLatencyHalf half, int rank) {
    if (rank == call.args.rank) return false;
    if (half == LowLatencyHalf::Receive && !call.takes_part(LowLatencyHalf::Send, rank))
        return true;
    if (!call.args.mask.active[rank] || *call.fabric.template own<uint64_t>(call.heap().cut(rank)))
        return true;
    return acquire_flag<W>(call.fabric, call.heap().channels, rank, call.heap().cut_flag(rank));
}

// To the ranks that may wait for this one: it waits, too, and is alive.
template <WarpLike W, class F, class Args>
EP_FN void send_beat(W& warp, const LowLatencyCall<F, Args>& call, LowLatencyHalf half) {
    typename W::template PerLane<uint64_t> before;
    warp.lanes(1, [&](int lane) {
        uint64_t* own = call.fabric.template own<uint64_t>(call.heap().own_beats());
        before[lane] = *own;
        *own = before[lane] + 1;
    });
    const uint64_t beats = warp.broadcast(before, 0);
    credit_ranks(warp, call, call.heap().beat_flag(call.args.rank), beats, beats + 1,
                 [&](int rank) { return !is_cut<W>(call, half, rank); });
}

// What `rank` has told this one of the link to it.
template <class W, class F, class Args>
EP_FN Cut told_cut(const LowLatencyCall<F, Args>& call, int rank) {
    return static_cast<Cut>(
        acquire_flag<W>(call.fabric, call.heap().channels, rank, call.heap().cut_flag(rank)));
}

// What the two ranks of a link claim: whoever is first takes the other for dead. Only where that
// rank's memory is mapped.
template <class F, class Args>
EP_FN uint64_t* claim_on(const LowLatencyCall<F, Args>& call, int rank) {
    const int own = call.args.rank;
    const LowLatencyHeap& heap = call.heap();
    return own < rank ? call.fabric.template own<uint64_t>(heap.first_to_cut(rank))
                      : call.fabric.template at<uint64_t>(rank, heap.first_to_cut(own));
}

// By a lane: whether this rank takes `rank` for dead before that takes this one for dead. Whose
// memory is not mapped cannot be asked: if both do so at once both are told, and both end.
template <class W, class F, class Args>
EP_FN bool is_first_to_cut(const LowLatencyCall<F, Args>& call, int rank) {
    if (!call.fabric.maps(rank)) return told_cut<W>(call, rank) != Cut::Silent;
    const uint64_t claim = 1 + static_cast<uint64_t>(call.args.rank);
    W::template settle<Scope::System>(claim_on(call, rank), 0, claim);
    return W::template acquire<Scope::System>(claim_on(call, rank)) == claim;
}

// By a lane: of a rank that ends itself, and so must not end others.
template <class W, class F, class Args>
EP_FN void take_claim_back(const LowLatencyCall<F, Args>& call, int rank) {
    if (!call.fabric.maps(rank)) return;
    W::template settle<Scope::System>(claim_on(call, rank),
                                      1 + static_cast<uint64_t>(call.args.rank), 0);
}

// By the first warp, once there is a verdict on every rank: cuts the links to those that are left
// out from now on, and tells them and the host. false: this rank has been taken for dead, and ends.
template <WarpLike W, class F, class Args>
EP_FN bool cut_links(W& warp, const LowLatencyCall<F, Args>& call, LowLatencyHalf half, Wait wait) {
    const LowLatencyMask& mask = call.args.mask;
    auto end_by = [&](int rank) {
        warp.fail(Outcome::CutOff, wait, WaitCondition{0, 1, rank});
        return false;
    };
    // whoever has been taken for dead takes nobody else for dead
    for (int first = 0; first < call.world(); first += 32) {
        const uint32_t told = warp.ballot(lanes_from(first, call.world()), [&](int lane) {
            const int rank = first + lane;
            return !call.takes_part(half, rank) && told_cut<W>(call, rank) == Cut::Silent;
        });
        if (told) return end_by(first + lowest_lane(told));
    }
    for (int first = 0; first < call.world(); first += 32) {
        const int lanes = lanes_from(first, call.world());
        const uint32_t cut = warp.ballot(lanes, [&](int lane) {
            const int rank = first + lane;
            const bool is_known =
                *call.fabric.template own<uint64_t>(call.heap().cut(rank)) ||
                (half == LowLatencyHalf::Receive && !call.takes_part(LowLatencyHalf::Send, rank));
            return !call.takes_part(half, rank) && !is_known;
        });
        if (!cut) continue;
        const uint32_t silent = warp.ballot(lanes, [&](int lane) {
            const int rank = first + lane;
            return cut >> lane & 1 && mask.active[rank] && told_cut<W>(call, rank) != Cut::Asked;
        });
        const uint32_t beaten = warp.ballot(lanes, [&](int lane) {
            return silent >> lane & 1 && !is_first_to_cut<W>(call, first + lane);
        });
        if (beaten) {
            warp.lanes(lanes, [&](int lane) {
                if ((silent & ~beaten) >> lane & 1) take_claim_back<W>(call, first + lane);
            });
            return end_by(first + lowest_lane(beaten));
        }
        auto tell = [&](uint32_t ranks, Cut why) {
            credit_some(warp, call, first, call.heap().cut_flag(call.args.rank), 0,
                        static_cast<uint64_t>(why),
                        [&](int rank) { return ranks >> (rank - first) & 1; });
        };
        tell(silent, Cut::Silent);
        tell(cut & ~silent, Cut::Asked);
        const uint64_t waited = warp.age();
        warp.lanes(lanes, [&](int lane) {
            if (cut >> lane & 1) mask.shown[first + lane].waited_ns = waited;
        });
        const uint64_t state = MaskedRank::kWaited + static_cast<uint64_t>(wait);
        warp.template publish_lanes<Scope::System>(lanes, [&](int lane, auto&& store) {
            if (cut >> lane & 1)
                store(&mask.shown[first + lane].state,
                      silent >> lane & 1 ? state : MaskedRank::kAsked);
        });
    }
    return true;
}

// Until there is a verdict on every rank. need(rank): all that this half needs of it. A rank is
// left out once it has been silent for so long that it is not waiting, either. false: the wait
// ended badly, this rank has been taken for dead, or a rank is missing that must not be.
template <WarpLike W, class F, class Args, class ConditionOf>
EP_FN bool settle_ranks(W& warp, const LowLatencyCall<F, Args>& call, const Team& team,
                        LowLatencyHalf half, Wait wait, ConditionOf&& need) {
    const LowLatencyMask& mask = call.args.mask;
    auto verdict_on = [&](int rank) {
        return W::template acquire<Scope::Rank>(call.verdict(half, rank));
    };
    auto is_settled = [&](int rank) { return verdict_on(rank) >> 1 == call.number; };
    auto beats_of = [&](int rank) {
        const size_t flag = call.heap().beat_flag(rank);
        return acquire_flag<W>(call.fabric, call.heap().channels, rank, flag);
    };
    typename W::template PerLane<uint64_t> beats;
    typename W::template PerLane<int> silent;
    for (int first = 0; first < call.world(); first += 32) {
        const int lanes = lanes_from(first, call.world());
        warp.lanes(lanes, [&](int lane) {
            beats[lane] = beats_of(first + lane);
            silent[lane] = 0;
        });
        uint32_t open = warp.ballot(lanes, [](int) { return true; });
        bool has_waited = false, over = false;
        for (int slices = 0;; slices += over) {
            // Whether the lane's rank keeps this warp waiting.
            auto is_missing = [&](int lane) {
                const int rank = first + lane;
                const uint64_t before = verdict_on(rank);
                if (before >> 1 == call.number) return false;
                bool takes_part = !is_cut<W>(call, half, rank);
                if (takes_part && !is_met(need(rank))) {
                    const uint64_t heard = beats_of(rank);
                    silent[lane] = heard == beats[lane] ? silent[lane] + over : 0;
                    beats[lane] = heard;
                    if (silent[lane] < mask.silent_slices && slices < mask.max_slices) return true;
                    takes_part = false;
                }
                W::template settle<Scope::Rank>(call.verdict(half, rank), before,
                                                call.number << 1 | takes_part);
                return !is_settled(rank);
            };
            const uint32_t missing =
                warp.ballot(lanes, [&](int lane) { return open >> lane & 1 && is_missing(lane); });
            if (has_waited && half == LowLatencyHalf::Receive && call.args.recv_wait_ns) {
                const uint64_t lasted = warp.age();
                warp.lanes(lanes, [&](int lane) {
                    if ((open & ~missing) >> lane & 1) W::raise(call.waited(first + lane), lasted);
                });
            }
            if (!missing) break;
            open = missing;
            const Waited end = warp.wait_a_while(
                wait, lanes,
                [&](int lane) {
                    const int rank = first + lane;
                    if (!(open >> lane & 1)) return never();
                    return is_settled(rank) || is_cut<W>(call, half, rank) ? nothing_to_wait_for()
                                                                           : need(rank);
                },
                mask.slice_ns);
            if (end == Waited::Badly) return false;
            has_waited = true;
            over = end == Waited::Over;
            if (over && team.warp == 0) send_beat(warp, call, half);
        }
        // what a lane has acquired is there for all: a vote orders nothing
        warp.lanes(lanes, [](int) {});
    }
    if (team.warp == 0 && !cut_links(warp, call, half, wait)) return false;
    if (!mask.required) return true;
    for (int rank = 0; rank < call.world(); ++rank) {
        if (!mask.required[rank] || call.takes_part(half, rank)) continue;
        if (team.warp == 0) warp.fail(Outcome::Masked, wait, WaitCondition{0, 1, rank});
        return false;
    }
    return true;
}

// ---- what both kinds of call need of the others

template <WarpLike W, class F, class Args>
EP_FN bool may_send(W& warp, const LowLatencyCall<F, Args>& call, const Team& team) {
    if (!call.heap().masking) return wait_released(warp, call);
    return settle_ranks(warp, call, team, LowLatencyHalf::Send, Wait::Release,
                        [&](int rank) { return need_release<W>(call, rank); });
}

// All of a rank's rows.
template <class W, class F, class Args>
EP_FN WaitCondition need_rows(const LowLatencyCall<F, Args>& call, int rank) {
    if (call.fabric.maps(rank)) {
        const size_t flag = call.heap().all_sent_flag(Args::kKind, rank);
        return {acquire_flag<W>(call.fabric, 0, rank, flag), call.number, rank};
    }
    WaitCondition need = nothing_to_wait_for();
    for (int channel = 0; channel < call.heap().channels && is_met(need); ++channel)
        need = need_put_rows<W>(call, channel, rank);
    return need;
}

// Choices that a half was without.
template <WarpLike W, class F, class Args>
EP_FN void count_dropped(W& warp, const LowLatencyCall<F, Args>& call, uint32_t choices) {
    if (choices)
        warp.template arrive<Scope::Rank>(call.args.mask.dropped + static_cast<int>(Args::kKind),
                                          popcount(choices));
}

// A dispatch leaves out the choices of such ranks: what is not sent is remembered as such. rank: of
// each choice, -1 for none.
template <WarpLike W, class F, class Args>
EP_FN void drop_choices(W& warp, const LowLatencyCall<F, Args>& call, int token, const Piece& piece,
                        typename W::template PerLane<int>& rank) {
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

// For the handle: with whom the dispatch was exchanged, in both directions.
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

}  // namespace ep

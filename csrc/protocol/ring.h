#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "fabric/fabric.h"
#include "protocol/weights.h"

namespace ep {

// Rings: the producer fills slots and publishes a tail, the consumer reads them and returns a head
// as credit. These are the cursors of the two ends, one cache line each in the heap of their rank.
struct OutCursor {
    uint64_t next;       // slots filled so far
    uint64_t published;  // slots published to the consumer; network rings: put by the coordinator
    uint64_t slot_bytes;
    uint64_t end;      // value of `next` at the end of this call
    uint64_t written;  // network rings of dispatch: slots filled; the coordinator sees `next`
    // Rows that each warp of the intra-rank pass has summed for this rank in this call.
    uint64_t summed[CombineArgs::kMaxSumWarps];
};
static_assert(sizeof(OutCursor) <= Heap::kLine);
struct InCursor {
    uint64_t next;       // slots read so far
    uint64_t published;  // slots returned to the producer
    uint64_t end;        // value of `next` at the end of this call
    uint64_t assigned;   // combine: slots that are assigned to a receiver
};

// One number for what both ends of a ring must agree on: the call, its layout, and the rows' shape
// and type. `resets_since_made` is part of it because a reset restarts the numbers of calls and
// layouts.
EP_FN uint64_t row_tag(const TransferArgs& args) {
    uint64_t tag = uint64_t{args.resets_since_made} << 3 | args.is_flat << 2 |
                   args.is_weighted << 1 | args.is_combine;
    auto add = [&](uint64_t value) {
        tag = (tag ^ value) * 0x9e3779b97f4a7c15;
        tag ^= tag >> 32;
    };
    add(args.call);
    add(args.layout.totals().epoch);
    add(static_cast<uint64_t>(args.format.payload_bytes) << 32 |
        static_cast<uint32_t>(args.format.payload_type));
    add(static_cast<uint64_t>(args.format.scale_bytes) << 32 | args.format.weight_bytes << 16 |
        args.format.topk);
    return tag | 1;  // never 0, which is the tag of an unwritten slot
}

// The rings of one channel, as one rank's roles see them. `peer` is the local rank at the other
// end.
template <class F>
struct Rings {
    F& fabric;
    const TransferArgs& args;
    int channel;
    uint64_t tag = row_tag(args);
    uint64_t nvl_slots = args.nvl_slots();
    uint64_t rdma_slots = args.rdma_slots();
    size_t slot_bytes = args.format.slot_bytes();

    // NVLink rings, producer's end
    EP_FN OutCursor& nvl_out(int node, int peer) const {
        return *fabric.template own<OutCursor>(args.heap.nvl_out(channel, node, peer));
    }
    EP_FN OutCursor& to_rank(int rank) const {
        return nvl_out(args.topology().node_of(rank), args.topology().local_of(rank));
    }
    EP_FN uint64_t* nvl_out_head(int node, int peer) const {
        return fabric.template own<uint64_t>(args.heap.nvl_head(channel, node, peer));
    }
    EP_FN uint64_t* nvl_out_tail(int node, int peer) const {
        return fabric.template peer<uint64_t>(peer,
                                              args.heap.nvl_tail(channel, node, args.local()));
    }
    EP_FN char* nvl_out_slot(int node, int peer, uint64_t position) const {
        return fabric.template peer<char>(peer, args.heap.nvl_data(channel, node, args.local())) +
               slot(position, nvl_slots);
    }

    // NVLink rings, consumer's end
    EP_FN InCursor& nvl_in(int node, int peer) const {
        return *fabric.template own<InCursor>(args.heap.nvl_in(channel, node, peer));
    }
    EP_FN uint64_t* nvl_in_tail(int node, int peer) const {
        return fabric.template own<uint64_t>(args.heap.nvl_tail(channel, node, peer));
    }
    EP_FN uint64_t* nvl_in_head(int node, int peer) const {
        return fabric.template peer<uint64_t>(peer,
                                              args.heap.nvl_head(channel, node, args.local()));
    }
    // A slot of the ring from this rank to itself, which carries no rows: scratch for combine.
    EP_FN char* nvl_own_slot(int position) const {
        return fabric.template own<char>(args.heap.nvl_data(channel, args.node(), args.local())) +
               slot(position, nvl_slots);
    }
    EP_FN const char* nvl_in_slot(int node, int peer, uint64_t position) const {
        return fabric.template own<char>(args.heap.nvl_data(channel, node, peer)) +
               slot(position, nvl_slots);
    }

    // Network rings. `next` is shared by the role that fills (drains) slots and its coordinator.
    EP_FN OutCursor& rdma_out(int node) const {
        return *fabric.template own<OutCursor>(args.heap.rdma_out(channel, node));
    }
    template <class W>
    EP_FN uint64_t acquire_rdma_head(int node) const {
        return fabric.template acquire_signal<W>(channel, args.heap.rdma_head(channel, node));
    }
    EP_FN char* rdma_out_slot(int node, uint64_t position) const {
        if constexpr (F::kMapsAll) {  // rows are written in place, and no put follows
            return fabric.template at<char>(args.on_rail(node),
                                            args.heap.rdma_data(channel, args.node(), node)) +
                   slot(position, rdma_slots);
        } else {
            return fabric.template network<char>(
                       args.heap.rdma_staging(channel, node, args.node())) +
                   slot(position, rdma_slots);
        }
    }
    EP_FN InCursor& rdma_in(int node) const {
        return *fabric.template own<InCursor>(args.heap.rdma_in(channel, node));
    }
    template <class W>
    EP_FN uint64_t acquire_rdma_tail(int node) const {
        return fabric.template acquire_signal<W>(channel, args.heap.rdma_tail(channel, node));
    }
    EP_FN const char* rdma_in_slot(int node, uint64_t position) const {
        return fabric.template network<char>(args.heap.rdma_data(channel, node, args.node())) +
               slot(position, rdma_slots);
    }

    EP_FN size_t slot(uint64_t position, uint64_t slots) const {
        return (position & (slots - 1)) * slot_bytes;
    }

    EP_FN int rank_at(int node, int peer) const { return args.topology().rank(node, peer); }
};

// Prepares NVLink rings for rows of this call: those that carry rows of source ranks rank_of(i), i
// < count. If the slot size differs from the last call's, the ring must be empty first, or a new
// row would overwrite an unread old one. Returns false if that wait fails.
template <WarpLike W, class F, class RankOf>
EP_FN bool open_nvl_rings(W& warp, const Rings<F>& rings, int count, RankOf&& rank_of) {
    const uint64_t slot_bytes = rings.slot_bytes;
    const Topology& topology = rings.args.topology();
    for (int first = 0; first < count; first += 32) {
        const int lanes = lanes_from(first, count);
        auto out = [&](int lane) -> OutCursor& {
            const int rank = rank_of(first + lane);
            return rings.to_rank(rank);
        };
        const bool drained = warp.wait_all(Wait::NvlDrain, lanes, [&](int lane) {
            if (out(lane).slot_bytes == slot_bytes) return nothing_to_wait_for();
            const int rank = rank_of(first + lane);
            const int node = topology.node_of(rank), peer = topology.local_of(rank);
            return WaitCondition{W::template acquire<Scope::System>(rings.nvl_out_head(node, peer)),
                                 out(lane).next, rings.rank_at(rings.args.node(), peer)};
        });
        if (!drained) return false;
        warp.lanes(lanes, [&](int lane) { out(lane).slot_bytes = slot_bytes; });
    }
    return true;
}

// Prepares the network rings to `count` (at most 32) nodes, from other_node(first) on. Without
// kOrdersWarps a ring must be empty even if its slot size stays: this call's flag might be seen
// before a row that another warp put in an earlier call.
template <WarpLike W, class F>
EP_FN bool open_rdma_rings(W& warp, const Rings<F>& rings, int first, int count) {
    const uint64_t slot_bytes = rings.slot_bytes;
    const bool drained = warp.wait_all(Wait::RdmaDrain, count, [&](int lane) {
        const int node = rings.args.other_node(first + lane);
        const OutCursor& out = rings.rdma_out(node);
        if (F::kOrdersWarps && out.slot_bytes == slot_bytes) return nothing_to_wait_for();
        const uint64_t next = out.next;
        return WaitCondition{rings.template acquire_rdma_head<W>(node), next,
                             rings.rank_at(node, rings.args.local())};
    });
    if (!drained) return false;
    warp.lanes(count, [&](int lane) {
        OutCursor& out = rings.rdma_out(rings.args.other_node(first + lane));
        out.slot_bytes = slot_bytes;
        out.written = out.next;
    });
    return true;
}

// Publishes all rows written so far to the consumers of this channel's NVLink rings for `node`.
template <WarpLike W, class F>
EP_FN void publish_tails(W& warp, const Rings<F>& rings, int node) {
    const int peers = rings.args.topology().ranks_per_node;
    for (int first = 0; first < peers; first += 32) {
        warp.template publish_lanes<Scope::System>(
            lanes_from(first, peers), [&](int lane, auto&& store) {
                OutCursor& out = rings.nvl_out(node, first + lane);
                if (out.published != out.next)
                    store(rings.nvl_out_tail(node, first + lane), out.published = out.next);
            });
    }
}

// Returns all slots read so far to the producers of this channel's NVLink rings for `node`.
template <WarpLike W, class F>
EP_FN void publish_heads(W& warp, const Rings<F>& rings, int node) {
    const int peers = rings.args.topology().ranks_per_node;
    for (int first = 0; first < peers; first += 32) {
        warp.template credit_lanes<Scope::System>(
            lanes_from(first, peers), [&](int lane, auto&& store) {
                InCursor& in = rings.nvl_in(node, first + lane);
                if (in.published != in.next)
                    store(rings.nvl_in_head(node, first + lane), in.published = in.next);
            });
    }
}

// These conditions read this rank's cursor before the acquire: loads after an acquire wait for it.
template <WarpLike W, class F>
EP_FN WaitCondition nvl_credit(const Rings<F>& rings, int node, int peer) {
    const uint64_t next = rings.nvl_out(node, peer).next;
    return {W::template acquire<Scope::System>(rings.nvl_out_head(node, peer)) + rings.nvl_slots,
            next + 1, rings.rank_at(rings.args.node(), peer)};
}

template <WarpLike W, class F>
EP_FN WaitCondition nvl_row_at(const Rings<F>& rings, int node, int peer, uint64_t next) {
    return {W::template acquire<Scope::System>(rings.nvl_in_tail(node, peer)), next + 1,
            rings.rank_at(rings.args.node(), peer)};
}

template <WarpLike W, class F>
EP_FN WaitCondition nvl_row(const Rings<F>& rings, int node, int peer) {
    return nvl_row_at<W>(rings, node, peer, rings.nvl_in(node, peer).next);
}

template <WarpLike W, class F>
EP_FN WaitCondition rdma_credit(const Rings<F>& rings, int node, uint64_t next) {
    return {rings.template acquire_rdma_head<W>(node) + rings.rdma_slots, next + 1,
            rings.rank_at(node, rings.args.local())};
}

template <WarpLike W, class F>
EP_FN WaitCondition rdma_row(const Rings<F>& rings, int node, uint64_t next) {
    return {rings.template acquire_rdma_tail<W>(node), next + 1,
            rings.rank_at(node, rings.args.local())};
}

// Whether the row of each lane in the mask belongs to this call. If not, ranks issued different
// sequences of calls: fails and blames rank_of(lane). tag: the tag in each lane's row.
template <WarpLike W, class F, class RankOf>
EP_FN bool belong_to_call(W& warp, const Rings<F>& rings, uint32_t mask,
                          const PerLane<W, uint64_t>& tag, RankOf&& rank_of) {
    const uint32_t mismatches = warp.ballot(rings.args.format.topk, [&](int lane) {
        return (mask >> lane & 1) && tag[lane] != rings.tag;
    });
    if (!mismatches) return true;
    const int lane = lowest_lane(mismatches);
    warp.fail(Outcome::Mismatch, Wait::None,
              WaitCondition{warp.broadcast(tag, lane), rings.tag, rank_of(lane)});
    return false;
}

template <WarpLike W, class F>
EP_FN bool belongs_to_call(W& warp, const Rings<F>& rings, uint64_t tag, int peer) {
    if (tag == rings.tag) return true;
    warp.fail(Outcome::Mismatch, Wait::None, WaitCondition{tag, rings.tag, peer});
    return false;
}

}  // namespace ep

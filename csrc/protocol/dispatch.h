#pragma once

#include <concepts>
#include <type_traits>

#include "protocol/polled_rings.h"
#include "protocol/tokens.h"

namespace ep {

// Roles of dispatch, one warp each. A token of this rank goes
//
//   to ranks of this node:
//     nvl_sender -> NVLink ring -> receiver
//   to ranks of another node, once for all of them:
//     rdma_sender -> staging -> sender_coordinator -> network ring -> forwarder -> NVLink ring
//     -> receiver
//
// and credit for the slots comes back
//
//   from receiver to nvl_sender or forwarder,
//   from forwarder over forwarder_coordinator to rdma_sender.
//
// Where the fabric maps the rail, rows are packed in the network ring itself, and
// sender_coordinator only signals. Each ring carries rows of one source rank and channel in token
// order, so the consumer knows which row comes next.

// Takes the next slot of the NVLink ring to each lane's peer and waits until all of these rings
// have room. Publishes the tails after each batch, and before it waits because a consumer may be
// waiting for these rows. Returns false if the wait fails.
template <WarpLike W, class F>
EP_FN bool take_slots(W& warp, const Rings<F>& rings, int node, uint32_t lanes,
                      const PerLane<W, int>& peer, int& batch, PerLane<W, void*>& slot) {
    const int topk = rings.args.format.topk;
    PerLane<W, uint64_t> next;
    auto credit = [&](int lane) {
        if (!(lanes >> lane & 1)) return nothing_to_wait_for();
        const WaitCondition need = nvl_credit<W>(rings, node, peer[lane]);
        next[lane] = need.required;
        return need;
    };
    const bool room = warp.met(topk, credit);
    if (++batch == rings.args.nvl_batch || !room) {
        publish_tails(warp, rings, node);
        batch = 0;
    }
    if (!room && !warp.wait_all(Wait::NvlCredit, topk, credit)) return false;
    warp.lanes(topk, [&](int lane) {
        if (!(lanes >> lane & 1)) return;
        slot[lane] = rings.nvl_out_slot(node, peer[lane], next[lane] - 1);
        rings.nvl_out(node, peer[lane]).next = next[lane];
    });
    return true;
}

// Copies one part of a row to `offset` in the slots of the lanes in the mask.
template <WarpLike W>
EP_FN void write_part(W& warp, const RowFormat& format, const PerLane<W, void*>& slot,
                      uint32_t lanes, size_t offset, const char* part, size_t bytes) {
    PerLane<W, void*> to;
    warp.lanes(format.topk, [&](int lane) {
        if (lanes >> lane & 1) to[lane] = static_cast<char*>(slot[lane]) + offset;
    });
    warp.template multicast<CacheHint::Keep>(to, lanes, part, bytes);
}

template <WarpLike W>
EP_FN void write_token(W& warp, const DispatchArgs& args, const PerLane<W, void*>& slot,
                       uint32_t lanes, int token) {
    const RowFormat& format = args.format;
    const size_t row = token;
    write_part(warp, format, slot, lanes, format.payload(), args.x + row * format.payload_bytes,
               format.payload_bytes);
    if (format.scale_bytes)
        write_part(warp, format, slot, lanes, format.scales(),
                   args.scales + row * format.scale_bytes, format.scale_bytes);
}

// Output rows of one arrived row: lane k has that of the k-th expert. written: lanes whose rows are
// copied now. cleared: lanes whose rows are zeroed, as `dst_rows` has no room for the arrived row.
template <WarpLike W>
struct OutputRows {
    PerLane<W, void*> row, scales;
    uint32_t written, cleared;
};

// Finds the one output row of a flat row: its index among the rows that arrive at this rank.
template <WarpLike W>
EP_FN void find_flat_row(W& warp, const DispatchArgs& args, const Header<W>& header,
                         int64_t received, OutputRows<W>& dst) {
    const RowFormat& format = args.format;
    const int first_expert = args.rank * args.layout.local_experts();
    dst.written = dst.cleared = 0;
    if (received >= args.max_rows) {
        args.layout.totals().overflow = 1;
        return;
    }
    PerLane<W, int> expert;  // local number
    warp.lanes(format.topk, [&](int k) {
        const bool is_here = is_within(header.expert[k], first_expert, args.layout.local_experts());
        expert[k] = is_here ? header.expert[k] - first_expert : TransferArgs::kElsewhere;
        const int64_t number = received * format.topk + k;
        if (args.fills_tables) args.dst_rows[number] = expert[k];
        store_weight(args.recv_weights + number * format.weight_bytes,
                     is_here || args.has_all_weights ? header.weight[k] : 0, format.weight_bytes);
        dst.row[k] = args.recv_x + received * format.payload_bytes;
        dst.scales[k] = args.recv_scales + received * format.scale_bytes;
    });
    const uint32_t here = warp.ballot(format.topk, [&](int k) { return expert[k] >= 0; });
    dst.written = here & -here;
}

// Computes the output rows of an arrived row, stores them in `dst_rows` for combine, and writes the
// row's weights. first_only: the intra-rank pass writes all output rows but the first.
template <WarpLike W>
EP_FN void find_output_rows(W& warp, const DispatchArgs& args, const Header<W>& header,
                            int source_rank, int64_t received, bool first_only,
                            OutputRows<W>& dst) {
    const Layout& layout = args.layout;
    const RowFormat& format = args.format;
    const int first_expert = args.rank * layout.local_experts();
    const bool remembered = received < args.max_received;
    if (args.source_tokens && remembered)
        warp.lanes(1, [&](int) {
            args.source_tokens[received] = static_cast<int32_t>(header.stamp.token);
        });
    if (args.is_flat) return find_flat_row(warp, args, header, received, dst);
    PerLane<W, int> dst_row;
    warp.lanes(format.topk, [&](int lane) {
        dst_row[lane] = TransferArgs::kElsewhere;
        if (is_within(header.expert[lane], first_expert, layout.local_experts())) {
            const int expert = header.expert[lane] - first_expert;
            const int index = header.index[lane];
            const int64_t row = int64_t{layout.expert_base(source_rank)[expert]} + index;
            const bool fits =
                index >= 0 && row < layout.expert_start(expert + 1) && row < args.max_rows;
            dst_row[lane] = fits ? static_cast<int>(row) : TransferArgs::kOverflowed;
        }
        if (remembered) args.dst_rows[received * format.topk + lane] = dst_row[lane];
        if (dst_row[lane] >= 0) {
            const size_t row = dst_row[lane];
            dst.row[lane] = args.recv_x + row * format.payload_bytes;
            dst.scales[lane] = args.recv_scales + row * format.scale_bytes;
            store_weight(args.recv_weights + row * format.weight_bytes,
                         remembered ? header.weight[lane] : 0, format.weight_bytes);
        }
    });
    const uint32_t overflowed = warp.ballot(
        format.topk, [&](int lane) { return dst_row[lane] == TransferArgs::kOverflowed; });
    if (overflowed || !remembered) layout.totals().overflow = 1;
    const uint32_t placed = warp.ballot(format.topk, [&](int lane) { return dst_row[lane] >= 0; });
    const uint32_t now = first_only ? placed & -placed : placed;
    dst.written = remembered ? now : 0;
    dst.cleared = remembered ? 0 : placed;
}

template <WarpLike W>
EP_FN void clear_output_rows(W& warp, const RowFormat& format, const OutputRows<W>& dst) {
    for_each_lane(dst.cleared, [&](int lane) {
        warp.zero(warp.broadcast(dst.row, lane), format.payload_bytes);
        warp.zero(warp.broadcast(dst.scales, lane), format.scale_bytes);
    });
}

// Reads row and scales once, for all output rows.
template <WarpLike W>
EP_FN void write_output_rows(W& warp, const RowFormat& format, const OutputRows<W>& dst,
                             const char* row, const char* scales) {
    warp.template multicast<CacheHint::EvictFirst>(dst.row, dst.written, row, format.payload_bytes);
    if (format.scale_bytes) {
        warp.template multicast<CacheHint::EvictFirst>(dst.scales, dst.written, scales,
                                                       format.scale_bytes);
    }
    clear_output_rows(warp, format, dst);
}

// Writes this rank's tokens [first, end) for its own experts. received: index of the first such row
// among all rows that arrive at this rank.
template <WarpLike W>
EP_FN void write_own_tokens(W& warp, const DispatchArgs& args, int first, int end,
                            int64_t received) {
    const RowFormat& format = args.format;
    OutputRows<W> dst;
    const auto is_own = [&](int rank) { return rank == args.rank; };
    for_each_token(warp, args, first, end, is_own, [&](int token, const Header<W>& header) {
        const int local_experts = args.layout.local_experts();
        const uint32_t own = warp.ballot(format.topk, [&](int lane) {
            return header.expert[lane] >= 0 && header.expert[lane] / local_experts == args.rank;
        });
        if (!own) return true;
        const size_t row = token;
        const char* x = args.x + row * format.payload_bytes;
        warp.template stage<CacheHint::EvictFirst>(x, format.payload_bytes);
        find_output_rows(warp, args, header, args.rank, received++, false, dst);
        write_output_rows(warp, format, dst, x, args.scales + row * format.scale_bytes);
        return true;
    });
}

// Into how many parts `warps` warps divide each channel's own rows. A planned layout may have its
// own rows in few channels.
EP_FN int parts_of_own_rows(const DispatchArgs& args, int warps) {
    const int parts = args.layout.is_planned ? warps / args.layout.channels : 1;
    return parts > 1 ? parts : 1;
}

// Writes one part of a channel's own rows, after it has counted those of the earlier parts.
template <WarpLike W>
EP_FN void write_part_of_own_rows(W& warp, const DispatchArgs& args, int channel, int part,
                                  int parts) {
    const int first = args.layout.first_token(args.rank, channel),
              tokens = args.layout.first_token(args.rank, channel + 1) - first;
    const int begin = first + static_cast<int>(static_cast<int64_t>(tokens) * part / parts),
              end = first + static_cast<int>(static_cast<int64_t>(tokens) * (part + 1) / parts);
    int64_t received = args.layout.received_start(channel, args.rank);
    for (int token = first; token < begin; token += 32) {
        const int some_end = token + lanes_from(token, begin);
        received += popcount(
            tokens_to(warp, args, token, some_end, [&](int rank) { return rank == args.rank; }));
    }
    write_own_tokens(warp, args, begin, end, received);
}

// Writes the own rows of all channels: the share of warp `number` of `warps`.
template <WarpLike W>
EP_FN void write_own_rows(W& warp, const DispatchArgs& args, int number, int warps) {
    const int parts = parts_of_own_rows(args, warps);
    for (int piece = number; piece < args.layout.channels * parts; piece += warps)
        write_part_of_own_rows(warp, args, piece / parts, piece % parts, parts);
}

// Tag: the sender starts when the counts are known. Another type lets it start earlier:
//   known(warp)  whether the counts are known now
//   wait(warp)   waits for the counts; false if they will not come
struct CountsKnown {};

// Writes own tokens for ranks of this node into their NVLink rings, and own tokens for this rank
// into their output rows unless the intra-rank pass does that. A ring slot needs no counts, an
// output row does: own rows that precede the counts are written at the end.
template <WarpLike W, FabricLike<W> F, class Counts = CountsKnown>
EP_FN void nvl_sender(W& warp, F& fabric, const DispatchArgs& args, int channel,
                      Counts&& counts = {}) {
    constexpr bool kCountsComeLater = !std::same_as<std::remove_cvref_t<Counts>, CountsKnown>;
    const Rings<F> rings{fabric, args, channel};
    const RowFormat& format = args.format;
    const int node = args.node();
    const Topology& topology = args.topology();
    const bool opened = open_nvl_rings(warp, rings, topology.ranks_per_node,
                                       [&](int i) { return topology.rank(node, i); });
    if (!opened) return;
    PerLane<W, int> peer;
    PerLane<W, void*> slot, to;
    OutputRows<W> dst;
    const int first = args.layout.first_token(args.rank, channel),
              end = args.layout.first_token(args.rank, channel + 1);
    int placed_from = kCountsComeLater ? end : first, own_before = 0;
    int64_t received = kCountsComeLater ? 0 : args.layout.received_start(channel, args.rank);
    int batch = 0;
    bool go_on = true;
    const auto is_served = [&](int rank) {
        return topology.node_of(rank) == node && !(rank == args.rank && args.has_intra_rank_pass);
    };
    for_each_token(warp, args, first, end, is_served, [&](int token, const Header<W>& header) {
        const uint32_t firsts = peers_on_node(warp, args, node, header.expert, peer);
        if (!firsts) return true;
        const uint32_t own =
            warp.ballot(format.topk, [&](int lane) { return peer[lane] == args.local(); });
        const uint32_t others = firsts & ~own;
        if constexpr (kCountsComeLater) {
            if (own && placed_from == end) {
                if (counts.known(warp)) {
                    placed_from = token;
                    received = args.layout.received_start(channel, args.rank) + own_before;
                } else {
                    ++own_before;
                }
            }
        }
        const bool writes_own = own && placed_from <= token && !args.has_intra_rank_pass;
        if (!others && !writes_own) return true;
        const char* x = args.x + static_cast<size_t>(token) * format.payload_bytes;
        warp.template stage<CacheHint::EvictFirst>(x, format.payload_bytes);
        if (others && !take_slots(warp, rings, node, others, peer, batch, slot))
            return go_on = false;
        dst.written = dst.cleared = 0;
        if (writes_own) find_output_rows(warp, args, header, args.rank, received++, false, dst);
        auto copy_part = [&](size_t offset, const PerLane<W, void*>& place, const char* part,
                             size_t bytes) {
            warp.lanes(format.topk, [&](int lane) {
                to[lane] =
                    others >> lane & 1 ? static_cast<char*>(slot[lane]) + offset : place[lane];
            });
            warp.template multicast<CacheHint::Keep>(to, others | dst.written, part, bytes);
        };
        copy_part(format.payload(), dst.row, x, format.payload_bytes);
        if (format.scale_bytes) {
            copy_part(format.scales(), dst.scales,
                      args.scales + static_cast<size_t>(token) * format.scale_bytes,
                      format.scale_bytes);
        }
        clear_output_rows(warp, format, dst);
        write_header(warp, format, slot, others, rings.tag, header);
        return true;
    });
    publish_tails(warp, rings, node);
    if constexpr (kCountsComeLater) {
        if (go_on && counts.wait(warp))
            write_own_tokens(warp, args, first, placed_from,
                             args.layout.received_start(channel, args.rank));
    }
}

// Writes own tokens for up to `max_count` other nodes, from other_node(first) on, into slots of
// their network rings, once per node. A row is published to the coordinator together with the next
// one: its writes have finished by then, so publishing does not wait for them.
template <WarpLike W, FabricLike<W> F>
EP_FN void rdma_sender(W& warp, F& fabric, const DispatchArgs& args, int channel, int first,
                       int max_count = 32) {
    const Rings<F> rings{fabric, args, channel};
    const RowFormat& format = args.format;
    const int count = lanes_from(first, args.other_nodes(), max_count);
    if (!open_rdma_rings(warp, rings, first, count)) return;
    PerLane<W, int> node;
    PerLane<W, uint64_t> next;
    PerLane<W, void*> slot;
    bool has_written = false;
    auto publish = [&] {
        if (!has_written) return;
        warp.template publish_lanes<Scope::Rank>(count, [&](int lane, auto&& store) {
            OutCursor& out = rings.rdma_out(args.other_node(first + lane));
            if (out.next != out.written) store(&out.next, out.written);
        });
    };
    const int first_token = args.layout.first_token(args.rank, channel),
              end_token = args.layout.first_token(args.rank, channel + 1);
    const auto is_far = [&](int rank) { return args.topology().node_of(rank) != args.node(); };
    for_each_token(
        warp, args, first_token, end_token, is_far, [&](int token, const Header<W>& header) {
            const uint32_t lanes = nodes_among(warp, args, first, count, header.expert, node);
            if (!lanes) return true;
            const char* x = args.x + static_cast<size_t>(token) * format.payload_bytes;
            warp.template stage<CacheHint::EvictFirst>(x, format.payload_bytes);
            publish();
            auto credit = [&](int lane) {
                if (!(lanes >> lane & 1)) return nothing_to_wait_for();
                next[lane] = rings.rdma_out(node[lane]).written;
                return rdma_credit<W>(rings, node[lane], next[lane]);
            };
            if (!warp.wait_all(Wait::RdmaCredit, format.topk, credit)) return false;
            warp.lanes(format.topk, [&](int lane) {
                if (!(lanes >> lane & 1)) return;
                slot[lane] = rings.rdma_out_slot(node[lane], next[lane]);
                rings.rdma_out(node[lane]).written = next[lane] + 1;
            });
            write_token(warp, args, slot, lanes, token);
            write_header(warp, format, slot, lanes, rings.tag, header);
            has_written = true;
            return true;
        });
    publish();
}

// Whether `rail_experts` has room for a channel's rows from `count` other nodes, from
// other_node(first) on. Fails the call if not.
template <WarpLike W>
EP_FN bool has_room_for_rail(W& warp, const TransferArgs& args, int channel, int first, int count) {
    auto end_of = [&](int lane) {
        return args.layout.rail_end(channel, args.other_node(first + lane));
    };
    const uint32_t over =
        warp.ballot(count, [&](int lane) { return end_of(lane) > args.max_rail; });
    if (!over) return true;
    warp.fail(Outcome::Overflow, Wait::None,
              WaitCondition{static_cast<uint64_t>(args.max_rail),
                            static_cast<uint64_t>(end_of(lowest_lane(over))), args.rank});
    return false;
}

// Moves rows of up to `max_count` other nodes, from other_node(first) on, from the network rings
// into the NVLink rings of the local ranks that need them, in the order in which they become ready.
// Stores their experts in `rail_experts` for combine.
template <WarpLike W, FabricLike<W> F>
EP_FN void forwarder(W& warp, F& fabric, const DispatchArgs& args, int channel, int first,
                     int max_count = 32) {
    const Rings<F> rings{fabric, args, channel};
    const RowFormat& format = args.format;
    const Topology& topology = args.topology();
    const int count = lanes_from(first, args.other_nodes(), max_count);
    if (!has_room_for_rail(warp, args, channel, first, count)) return;
    const bool opened = open_nvl_rings(warp, rings, count * topology.ranks_per_node, [&](int i) {
        return topology.rank(args.other_node(first + i / topology.ranks_per_node),
                             i % topology.ranks_per_node);
    });
    if (!opened) return;
    PerLane<W, int> left, peer;
    PerLane<W, void*> slot;
    Header<W> header;
    const size_t body_bytes = format.slot_bytes() - format.payload();  // includes the scales
    warp.lanes(count, [&](int lane) {
        left[lane] = args.layout.rail(channel, args.other_node(first + lane));
    });
    auto has_more = [&](int lane) { return left[lane] > 0; };
    auto arrived = [&](int lane) {
        const int node = args.other_node(first + lane);
        return rdma_row<W>(rings, node, rings.rdma_in(node).next);
    };
    auto serve = [&](int lane, uint64_t next, int rows) {
        const int node = args.other_node(first + lane);
        const int64_t start = args.layout.rail_end(channel, node) - warp.broadcast(left, lane);
        int batch = 0;
        for (int i = 0; i < rows; ++i) {
            const char* source = rings.rdma_in_slot(node, next);
            warp.template stage<CacheHint::Keep>(source + format.payload(), body_bytes);
            read_header(warp, format, source, header);
            if (!belongs_to_call(warp, rings, header.stamp.tag, rings.rank_at(node, args.local())))
                return false;
            warp.lanes(format.topk, [&](int k) {
                args.rail_experts[(start + i) * format.topk + k] = header.expert[k];
            });
            const uint32_t lanes = peers_on_node(warp, args, args.node(), header.expert, peer);
            if (!take_slots(warp, rings, node, lanes, peer, batch, slot)) return false;
            write_part(warp, format, slot, lanes, format.payload(), source + format.payload(),
                       body_bytes);
            write_header(warp, format, slot, lanes, rings.tag, header);
            warp.template credit<Scope::Rank>(&rings.rdma_in(node).next, ++next);
        }
        publish_tails(warp, rings, node);
        return true;
    };
    poll_queues(warp, count, Wait::RdmaRow, args.nvl_batch, left, has_more, arrived, serve);
}

// Moves rows from the rings of up to `max_count` source ranks, from other_rank(first) on, to the
// output rows of this rank's experts.
template <WarpLike W, FabricLike<W> F>
EP_FN void receiver(W& warp, F& fabric, const DispatchArgs& args, int channel, int first,
                    int max_count) {
    const Rings<F> rings{fabric, args, channel};
    const RowFormat& format = args.format;
    const int count = lanes_from(first, args.other_ranks(), max_count);
    Header<W> header;
    OutputRows<W> dst;
    auto cursor = [&](int node, int peer) -> InCursor& { return rings.nvl_in(node, peer); };
    auto serve = [&](const ReadyBatch& batch) {
        for (int i = 0; i < batch.rows; ++i) {
            const char* slot = rings.nvl_in_slot(batch.node, batch.peer, batch.position + i);
            warp.template stage<CacheHint::Keep>(slot + format.payload(), format.payload_bytes);
            read_header(warp, format, slot, header);
            if (!belongs_to_call(warp, rings, header.stamp.tag, batch.rank)) return false;
            find_output_rows(warp, args, header, batch.rank, batch.first + i,
                             args.has_intra_rank_pass, dst);
            write_output_rows(warp, format, dst, slot + format.payload(), slot + format.scales());
        }
        const uint64_t next = batch.position + batch.rows;
        InCursor& in = rings.nvl_in(batch.node, batch.peer);
        warp.lanes(1, [&](int) { in.next = in.published = next; });
        warp.template credit<Scope::System>(rings.nvl_in_head(batch.node, batch.peer), next);
        return true;
    };
    poll_rings(warp, rings, first, count, Wait::NvlRow, cursor, nvl_row<W, F>, serve);
}

}  // namespace ep

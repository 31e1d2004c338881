// Tokens in dispatch: which ranks and nodes they go to, and the headers that travel with them.
#pragma once

#include "core/args.h"
#include "exec/warp.h"
#include "protocol/weights.h"

namespace ep {

// Finds the distinct local ranks of `node` among a row's experts: `peer` has each lane's, or -1.
// Returns the last lane of each.
template <WarpLike W>
EP_FN uint32_t peers_on_node(W& warp, const TransferArgs& args, int node,
                             const PerLane<W, int>& expert, PerLane<W, int>& peer) {
    const int local_experts = args.layout.local_experts();
    warp.lanes(args.layout.topk, [&](int lane) {
        const int rank = expert[lane] < 0 ? -1 : expert[lane] / local_experts;
        peer[lane] = rank >= 0 && args.topology().node_of(rank) == node
                         ? args.topology().local_of(rank)
                         : -1;
    });
    return warp.last_of(args.layout.topk, peer);
}

// Finds the distinct nodes among a row's experts, of `count` from other_node(first) on. Returns
// each one's first lane.
template <WarpLike W>
EP_FN uint32_t nodes_among(W& warp, const TransferArgs& args, int first, int count,
                           const PerLane<W, int>& expert, PerLane<W, int>& node) {
    const int local_experts = args.layout.local_experts();
    warp.lanes(args.layout.topk, [&](int lane) {
        node[lane] = expert[lane] < 0 ? -1 : args.topology().node_of(expert[lane] / local_experts);
        const int place = node[lane] < 0 ? -1 : args.place_of_node(node[lane]);
        if (place < first || place >= first + count) node[lane] = -1;
    });
    return warp.first_of(args.layout.topk, node);
}

// What travels with a token: lane k has that of its k-th choice.
template <WarpLike W>
struct Header {
    PerLane<W, int> expert, index;
    PerLane<W, uint64_t> weight;
    // Uniform in all lanes: the token's index on its source rank, and for a row in a slot its tag.
    RowFormat::Stamp stamp;
};

template <WarpLike W>
EP_FN void read_header(W& warp, const DispatchArgs& args, int token, Header<W>& header) {
    const RowFormat& format = args.format;
    header.stamp.token = token;
    warp.lanes(format.topk, [&](int lane) {
        header.expert[lane] = args.layout.experts(token)[lane];
        header.index[lane] = args.layout.index(token)[lane];
        const size_t weight =
            (static_cast<size_t>(token) * format.topk + lane) * format.weight_bytes;
        header.weight[lane] = load_weight(args.weights + weight, format.weight_bytes);
    });
}

template <WarpLike W>
EP_FN void read_header(W& warp, const RowFormat& format, const char* slot, Header<W>& header) {
    header.stamp = *reinterpret_cast<const RowFormat::Stamp*>(slot + format.tag());
    warp.lanes(format.topk, [&](int lane) {
        header.expert[lane] = reinterpret_cast<const int32_t*>(slot + format.experts())[lane];
        header.index[lane] = reinterpret_cast<const int32_t*>(slot + format.index())[lane];
        header.weight[lane] =
            load_weight(slot + format.weights() + lane * format.weight_bytes, format.weight_bytes);
    });
}

// Writes a row's header into the slots of the lanes in the mask.
template <WarpLike W>
EP_FN void write_header(W& warp, const RowFormat& format, const PerLane<W, void*>& slots,
                        uint32_t mask, uint64_t tag, const Header<W>& header) {
    for_each_lane(mask, [&](int to) {
        char* slot = static_cast<char*>(warp.broadcast(slots, to));
        warp.lanes(format.topk, [&](int lane) {
            if (lane == 0)
                *reinterpret_cast<RowFormat::Stamp*>(slot + format.tag()) = {tag,
                                                                             header.stamp.token};
            reinterpret_cast<int32_t*>(slot + format.experts())[lane] = header.expert[lane];
            reinterpret_cast<int32_t*>(slot + format.index())[lane] = header.index[lane];
            store_weight(slot + format.weights() + lane * format.weight_bytes, header.weight[lane],
                         format.weight_bytes);
        });
    });
}

// Returns which tokens of [first, end), at most 32, a lane each, go to a rank with wanted(rank).
template <WarpLike W, class Wanted>
EP_FN uint32_t tokens_to(W& warp, const DispatchArgs& args, int first, int end, Wanted&& wanted) {
    const Layout& layout = args.layout;
    return warp.ballot(end - first, [&](int lane) {
        bool any = false;
        for (int k = 0; k < layout.topk; ++k) {
            const int expert = layout.experts(first + lane)[k];
            any |= expert >= 0 && wanted(expert / layout.local_experts());
        }
        return any;
    });
}

// Calls f(token, header) for tokens [first, end) of this rank, until it returns false. Reads each
// header while f serves the token before. Most tokens of a plan may stay on their rank, so of those
// only the ones are visited that go to a rank with wanted(rank).
template <WarpLike W, class Wanted, class F>
EP_FN void for_each_token(W& warp, const DispatchArgs& args, int first, int end, Wanted&& wanted,
                          F&& f) {
    Header<W> header, next;
    uint32_t left = 0;  // not yet visited among the 32 tokens before `first`
    auto read_next = [&] {
        while (!left) {
            if (first >= end) return -1;
            const int some = lanes_from(first, end);
            left = args.layout.is_planned ? tokens_to(warp, args, first, first + some, wanted)
                                          : first_lanes(some);
            first += 32;
        }
        const int token = first - 32 + lowest_lane(left);
        left &= left - 1;
        read_header(warp, args, token, next);
        return token;
    };
    for (int token = read_next(); token >= 0;) {
        header = next;
        const int served = token;
        token = read_next();
        if (!f(served, header)) return;
    }
}

}  // namespace ep
